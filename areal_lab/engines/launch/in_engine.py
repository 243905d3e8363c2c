"""Run a server's module in the engine's own Python, and exit with the parent.

    python -P in_engine.py MODULE arguments...

The engine's environment has no `areal_lab`, so two light modules of it are imported by path. They
need psutil, which every engine requires anyway. `-P` keeps this folder off the module path, where
its files would shadow others.
"""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from pathlib import Path


def main() -> None:
    """Watch the parent, then run the module as `python -m` would."""
    # Appended, so that the engine's own packages come first, and only for these imports.
    sys.path.append(str(Path(__file__).resolve().parents[3]))
    from areal_lab.host import processes, shared_memory

    sys.path.pop()
    scratch = os.environ.get("AREAL_LAB_SCRATCH")
    segments = shared_memory.Segments()

    def clean_up() -> None:
        group = os.getpgid(0)
        segments.record(group)
        shared_memory.remove_segments(segments.found, group)
        if scratch:
            shutil.rmtree(scratch, ignore_errors=True)

    processes.on_parent_death(clean_up)
    processes.watch_parent()
    module, sys.argv[:] = sys.argv[1], sys.argv[1:]
    # alter_sys: processes that the server spawns find their main module by its name.
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
