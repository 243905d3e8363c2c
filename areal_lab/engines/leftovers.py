"""Shared memory that a killed server would leave behind. Linux; loads the standard library only.

A server that is killed removes none of its segments and semaphores in /dev/shm. Which are its own
is told by what its processes map, so this looks while they live.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

_PROC = Path("/proc")
_SHARED_MEMORY = Path("/dev/shm")


def shared_segments(group: int) -> frozenset[Path]:
    """What the processes of a process group map directly in /dev/shm.

    Folders there are left alone: weights travel in them, and engines map those too.
    """
    found: set[Path] = set()
    for process in _processes():
        if _group(process) == group:
            found |= _segments(process)
    return frozenset(found)


def remove_segments(segments: Collection[Path], group: int) -> None:
    """Remove those that no process outside the group maps. Idempotent."""
    left = set(segments)
    for process in _processes() if left else ():
        if _group(process) != group:
            left -= _segments(process)
    for segment in left:
        segment.unlink(missing_ok=True)


def group_lives(group: int) -> bool:
    """Whether any process of the group has not ended; those that nobody has asked about have."""
    return any(_group(process) == group and not _ended(process) for process in _processes())


def _ended(process: int) -> bool:
    try:
        # 4711 (name) S ...; a name may hold blanks and parentheses
        state = (_PROC / str(process) / "stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return True
    return state in ("Z", "X")


def _processes() -> Iterator[int]:
    return (int(place.name) for place in _PROC.iterdir() if place.name.isdigit())


def _group(process: int) -> int | None:
    try:
        return os.getpgid(process)
    except ProcessLookupError:
        return None


def _segments(process: int) -> set[Path]:
    """Empty if the process is gone or another user's."""
    try:
        maps = (_PROC / str(process) / "maps").read_text(errors="replace")
    except OSError:
        return set()
    # address permissions offset device inode path; a path that was unlinked ends with (deleted)
    paths = {Path(parts[5]) for line in maps.splitlines() if len(parts := line.split(None, 5)) == 6}
    return {path for path in paths if path.parent == _SHARED_MEMORY and " " not in path.name}
