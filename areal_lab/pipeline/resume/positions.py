"""Where the growing files of a run are at a checkpoint, and the way back to it.

    events.jsonl   |---- before the checkpoint ----|---- after it ----|
                                                positions     cut_back removes this

So a run that continues from the checkpoint has no step twice.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from areal_lab.control.events import Version
from areal_lab.host.durable import flush_file, replace_flushed

GROWING: Final = ("events.jsonl", "metrics.jsonl", "held_out.jsonl", "alarms.jsonl")
"""The files that a run appends to."""


def positions(folder: Path) -> dict[str, int]:
    """Bytes of each growing file now; those that do not exist are left out."""
    return {name: (folder / name).stat().st_size for name in GROWING if (folder / name).is_file()}


def flush_growing(folder: Path) -> None:
    """Wait until everything written to the growing files is on the disk."""
    for name in positions(folder):
        flush_file(folder / name)


def cut_back(folder: Path, to: Mapping[str, int], version: Version) -> None:
    """Remove what a run wrote after a checkpoint.

    Each file is replaced by its beginning, so that a reader that has it open sees the old content.

    Args:
        folder: of the run.
        to: `positions` at the checkpoint; files that are not in it are removed.
        version: of the checkpoint; samples and checkpoints of later steps are removed.

    Raises:
        ValueError: if a file is shorter than at the checkpoint: it was damaged. Nothing is cut.
    """
    now = positions(folder)
    for name, size in to.items():
        if now.get(name, 0) < size:
            raise ValueError(
                f"{folder / name} has {now.get(name, 0)} bytes, but had {size} at the checkpoint "
                f"of version {version}: its end was lost, so the run cannot continue from there"
            )
        if size and not _ends_a_line(folder / name, size):
            raise ValueError(
                f"{folder / name} has no end of a line at byte {size}, as it had at the checkpoint "
                f"of version {version}: it was replaced, so the run cannot continue from there"
            )
    for name in now:
        if name not in to:
            (folder / name).unlink()
        elif now[name] > to[name]:
            _shorten(folder / name, to[name])
    for path in [*(folder / "trajectories").glob("step-*"), *folder.glob("checkpoints/step-*")]:
        if step_of(path) > version:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in [*folder.glob("trajectories/.step-*"), *folder.glob("checkpoints/.step-*")]:
        # Half written at the kill.
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def step_of(path: Path) -> Version:
    """The step of `step-00012`, `step-00012.jsonl` and the like."""
    return int(path.name.removeprefix("step-").split(".", 1)[0])


def _ends_a_line(path: Path, size: int) -> bool:
    with path.open("rb") as file:
        file.seek(size - 1)
        return file.read(1) == b"\n"


def _shorten(path: Path, size: int) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with path.open("rb") as source, temporary.open("wb") as target:
        left = size
        while left:
            left -= target.write(source.read(min(left, 1 << 20)))
        target.flush()
        os.fsync(target.fileno())
    replace_flushed(temporary, path)
