"""Shared memory that a killed server would leave behind. Linux.

A server that is killed removes none of its segments and semaphores in /dev/shm. Which are its own
is told by what its processes map, so this looks while they live. Files are told by their inodes:
a semaphore is mapped under a first name that is gone by the time others can open it.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from areal_lab.host.processes import group_of, members

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
    for process in members(group) if files else ():
        found |= _segments(process.pid, files)
    return frozenset(found)


def remove_segments(segments: Collection[Path], group: int) -> None:
    """Remove those that no process outside the group maps. Idempotent."""
    left = set(segments)
    files = {inode: file for inode, file in _files().items() if file in left}
    for process in psutil.pids() if files else ():
        if group_of(process) != group:
            left -= _segments(process, files)
    for segment in left:
        segment.unlink(missing_ok=True)


def _files() -> dict[int, Path]:
    """Files, not folders, directly in shared memory, by inode."""
    if not SHARED_MEMORY.is_dir():
        return {}
    with os.scandir(SHARED_MEMORY) as entries:
        return {e.inode(): Path(e.path) for e in entries if e.is_file(follow_symlinks=False)}


def _segments(process: int, files: dict[int, Path]) -> set[Path]:
    """Those of the files that a process maps; none if it is gone or another user's."""
    try:
        maps = Path(f"/proc/{process}/maps").read_text(errors="replace")
    except OSError:
        return set()
    # address permissions offset device inode path
    lines = (line.split() for line in maps.splitlines() if f" {SHARED_MEMORY}/" in line)
    return {files[inode] for line in lines if (inode := int(line[4])) in files}
