"""File positions at a checkpoint, and truncation of the run folder back to them.

    events.jsonl   |---- before the checkpoint ----|---- after it ----|
                                                positions     cut_back removes this

So a run that continues from the checkpoint logs each step once.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from areal_lab.control.events import Version
from areal_lab.host.durable import flush_file, replacing
from areal_lab.host.owned_folders import remove_tree
from areal_lab.models.checkpoint_files import (
    FIELDS,
    SAMPLES,
    TRAJECTORIES,
    step_files,
    step_of,
    temporary_entries,
)
from areal_lab.runlog.appended import read_appended

GROWING: Final = ("events.jsonl", "metrics.jsonl", "held_out.jsonl", "alarms.jsonl")
"""The files that a run appends to."""
_TRAINED: Final = b'"type":"TrainStepDone"'
_PART_BYTES: Final = 1 << 20


def positions(folder: Path) -> dict[str, int]:
    """Return the size in bytes of each growing file that exists."""
    return {name: (folder / name).stat().st_size for name in GROWING if (folder / name).is_file()}


def flush_growing(folder: Path) -> None:
    """Wait until everything written to the growing files is on the disk."""
    for name in positions(folder):
        flush_file(folder / name)


def cut_back(folder: Path, to: Mapping[str, int], version: Version) -> None:
    """Remove what a run wrote after a checkpoint.

    Each file is replaced by a shorter one, so a reader that has it open sees the old content.

    Args:
        folder: run folder.
        to: `positions` at the checkpoint; growing files without a position are removed.
        version: version of the checkpoint; samples of later steps are removed. There are no later
            checkpoints (`newest_checkpoint`).

    Raises:
        ValueError: a file is shorter than at the checkpoint, or not lines of JSON. Nothing is cut.
    """
    now = positions(folder)
    for name, size in to.items():
        if now.get(name, 0) < size:
            raise ValueError(
                f"{folder / name} has {now.get(name, 0)} bytes, but had {size} at the checkpoint "
                f"of version {version}: its end was lost, so the run cannot continue from there"
            )
        if size:
            _check_lines(folder / name, size, version)
    for name in now:
        if name not in to:
            (folder / name).unlink()
        elif now[name] > to[name]:
            _shorten(folder / name, to[name])
    for endings in (SAMPLES, (FIELDS,)):
        for step, path in step_files(folder, *endings).items():
            if step > version:
                path.unlink()
    for path in temporary_entries(folder):  # half-written when the run was killed
        remove_entry(path)


def set_aside(folder: Path) -> Path:
    """Move the files of a run into a new subfolder, such as `attempt-1`; returns its path."""
    aside = next(path for n in itertools.count(1) if not (path := folder / f"attempt-{n}").exists())
    aside.mkdir()
    for name in (*GROWING, "summary.json", TRAJECTORIES, "model", "best"):
        if os.path.lexists(folder / name):
            (folder / name).rename(aside / name)
    (folder / TRAJECTORIES).mkdir()
    return aside


def trained_steps(run: Path) -> int:
    """Return the largest training step that any file of a run mentions; 0 without any."""
    lines = [_last_of(run / "metrics.jsonl", "step"), _last_of(run / "held_out.jsonl", "version")]
    # The samples of a step are written when it starts.
    samples = max(step_files(run, *SAMPLES), default=1) - 1
    return max(*lines, samples, _steps_in_log(run / "events.jsonl"), _linked_step(run / "model"))


def _linked_step(link: Path) -> int:
    """Return the step of the checkpoint that a link names, even if the checkpoint is missing."""
    return (step_of(link.readlink().name) or 0) if link.is_symlink() else 0


def _last_of(path: Path, name: str) -> int:
    """Return the largest value of a field in a JSONL file; unreadable lines are skipped."""
    found = 0
    if path.is_file():
        for line in read_appended(path).lines:
            try:
                found = max(found, int(json.loads(line)[name]))
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
                continue
    return found


def _steps_in_log(path: Path) -> int:
    if not path.is_file():
        return 0
    found, before = 0, b""
    with path.open("rb") as file:
        while part := file.read(_PART_BYTES):
            found += (before + part).count(_TRAINED)
            before = (before + part)[1 - len(_TRAINED) :]
    return found


def remove_entry(path: Path) -> None:
    """Remove a folder, a file, or a link without its target."""
    remove_tree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _check_lines(path: Path, size: int, version: Version) -> None:
    """Refuse a file whose first `size` bytes are not lines of JSON."""
    left, line = size, b"\n"
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            left -= len(line)
            try:
                json.loads(line)
            except (ValueError, RecursionError) as error:
                if left < 0:
                    break
                raise ValueError(
                    f"line {number} of {path} is not JSON, so the run cannot continue: "
                    f"{str(error) or 'it is nested too deeply'}; nothing was changed"
                ) from error
            if left <= 0:
                break
    if left or not line.endswith(b"\n"):
        raise ValueError(
            f"{path} has no line break at byte {size}, but had one at the checkpoint of version "
            f"{version}: it was replaced, so the run cannot continue from there"
        )


def _shorten(path: Path, size: int) -> None:
    with path.open("rb") as source, replacing(path, flush=True) as target:
        left = size
        while left:
            left -= target.write(source.read(min(left, 1 << 20)))
