"""Run a module as if on another machine.

python -m tests.fault_lab.hosts.machine NAMESPACE MODULE ARGUMENTS...

The process enters a network namespace (`-` stays where it is). What it starts is forked from it, so
it comes up without imports; it is a process of this machine like any other.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import runpy
import sys
import tempfile
from typing import Any, Final

from tests.warm import WARM, children_from_a_warm_interpreter

_CLONE_NEWNET: Final = 0x40000000
_STARTERS: Final = ("areal_lab.controllers.rollout_worker",)
"""Modules that start engines themselves: machines within this one."""
_FORKED: Final = (*WARM, "areal_lab.cluster.rank_worker")


def enter(namespace: str) -> None:
    """Move this process into a network namespace, before it has another thread."""
    with open(f"/run/netns/{namespace}", "rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")


def main() -> None:
    """Become the module."""
    namespace, module, *arguments = sys.argv[1:]
    if namespace != "-":
        enter(namespace)
    tempfile.tempdir = None  # another TMPDIR than that of the warm interpreter
    # The first child, before there is a thread.
    with children_from_a_warm_interpreter(_FORKED, of_this_one=True):
        start = asyncio.create_subprocess_exec

        async def start_starters_here(*command: str, **options: Any) -> Any:
            if command[1] == "-m" and command[2] in _STARTERS:
                command = (*command[:2], "tests.fault_lab.hosts.machine", "-", *command[2:])
            return await start(*command, **options)

        asyncio.create_subprocess_exec = start_starters_here  # type: ignore[assignment]
        sys.argv = [module, *arguments]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
