"""Run a module as if on another machine.

python -m tests.fault_lab.hosts.machine NAMESPACE MODULE ARGUMENTS...

The process enters a network namespace (`-` stays where it is). What it starts is forked from it, so
it comes up without imports; it is a process of this machine like any other.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import sys
import tempfile
from typing import Final

from tests.warm import children_from_a_warm_interpreter

_CLONE_NEWNET: Final = 0x40000000


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
    with children_from_a_warm_interpreter(of_this_one=True):
        sys.argv = [module, *arguments]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
