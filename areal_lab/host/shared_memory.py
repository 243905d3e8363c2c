"""Shared memory that a killed server would leave behind. Linux; loads the standard library only.

A server that is killed removes none of its segments and semaphores in /dev/shm. Which are its own
is told by what its processes map, so this looks while they live. Files are told by their inodes:
a semaphore is mapped under a first name that is gone by the time others can open it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

_PROC = Path("/proc")
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Segments:
    """What one server has been seen to map, less what was there before it.

    Made before the server is started.
    """

    found: set[Path] = field(default_factory=set)
    _before: frozenset[Path] = field(default_factory=lambda: frozenset(_files().values()))

    def look(self, group: int) -> bool:
        """Add what is new, and say whether anything is; costs next to nothing if nothing is."""
        new = set(_files().values()) - self._before - self.found
        its_own = new & shared_segments(group) if new else new
        self.found.update(its_own)
        return bool(its_own)


def shared_segments(group: int) -> frozenset[Path]:
    """What the processes of a process group map directly in /dev/shm.

    Folders there are left alone: weights travel in them, and engines map those too.
    """
    found: set[Path] = set()
    files = _files()
    for process in _processes() if files else ():
        if _group(process) == group:
            found |= _segments(process, files)
    return frozenset(found)


def remove_segments(segments: Collection[Path], group: int) -> None:
    """Remove those that no process outside the group maps. Idempotent."""
    left = set(segments)
    files = {inode: file for inode, file in _files().items() if file in left}
    for process in _processes() if files else ():
        if _group(process) != group:
            left -= _segments(process, files)
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


def _files() -> dict[int, Path]:
    """Files, not folders, directly in shared memory, by inode."""
    if not SHARED_MEMORY.is_dir():
        return {}
    with os.scandir(SHARED_MEMORY) as entries:
        return {e.inode(): Path(e.path) for e in entries if e.is_file(follow_symlinks=False)}


def _segments(process: int, files: dict[int, Path]) -> set[Path]:
    """Those of the files that a process maps; none if it is gone or another user's."""
    try:
        maps = (_PROC / str(process) / "maps").read_text(errors="replace")
    except OSError:
        return set()
    # address permissions offset device inode path
    lines = (line.split() for line in maps.splitlines() if f" {SHARED_MEMORY}/" in line)
    return {files[inode] for line in lines if (inode := int(line[4])) in files}
