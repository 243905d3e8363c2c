"""Run by an engine's own Python: end with the parent, and be the server's module.

    python -P in_engine.py MODULE arguments...

The engine's environment has no `areal_lab`, so the two files that are needed of it, which import
the standard library alone, are loaded by their place. `-P` keeps this folder off the module path,
where its `client` and `protocol` would hide others.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import shutil
import sys
from pathlib import Path
from types import ModuleType


def main() -> None:
    """Watch the parent, then run the module as `python -m` would."""
    host = Path(__file__).resolve().parents[2] / "host"
    processes = _load(host / "processes.py")
    shared_memory = _load(host / "shared_memory.py")
    scratch = os.environ.get("AREAL_LAB_SCRATCH")
    segments = shared_memory.Segments()

    def clean_up() -> None:
        group = os.getpgid(0)
        segments.look(group)
        shared_memory.remove_segments(segments.found, group)
        if scratch:
            shutil.rmtree(scratch, ignore_errors=True)

    processes.on_parent_death(clean_up)
    processes.watch_parent()
    module, sys.argv[:] = sys.argv[1], sys.argv[1:]
    # alter_sys: processes that the server spawns find their main module by its name.
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _load(place: Path) -> ModuleType:
    name = f"areal_lab_{place.stem}"
    spec = importlib.util.spec_from_file_location(name, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where its dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
