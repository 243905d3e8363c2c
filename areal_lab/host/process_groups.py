"""Process groups, and the shared memory that killed ones leave behind. Linux.

Remove shared memory that a killed server leaves behind. Linux.

A server that is killed does not remove its segments and semaphores in /dev/shm. They are identified
by the memory maps of its processes, which must be read while these are alive. Files are identified
by inode, since a semaphore is mapped under a temporary name.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

_ENDED: Final = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def group_of(process: int) -> int | None:
    """Process group of a process; None if it has exited."""
    try:
        return os.getpgid(process)
    except ProcessLookupError:
        return None


def members(group: int) -> Iterator[psutil.Process]:
    """Running processes of a group; zombies do not count."""
    # Not process_iter, which reads a file of every process; servers that start are polled.
    for pid in psutil.pids():
        if group_of(pid) != group:
            continue
        try:
            process = psutil.Process(pid)
            ended = process.status() in _ENDED
        except psutil.NoSuchProcess:
            continue
        if not ended:
            yield process


SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Segments:
    """Shared memory that one server maps, without files that existed before.

    Create it before the server is started.
    """

    found: set[Path] = field(default_factory=set)
    _before: frozenset[Path] = field(default_factory=lambda: frozenset(_files().values()))

    def record(self, group: int) -> bool:
        """Add new segments and return whether there are any; cheap if there are none."""
        new = set(_files().values()) - self._before - self.found
        own = new & shared_segments(group) if new else new
        self.found.update(own)
        return bool(own)


def shared_segments(group: int) -> frozenset[Path]:
    """Files directly in /dev/shm that the processes of a process group map.

    Files in its folders do not count: they may be weights, which engines map as well.
    """
    found: set[Path] = set()
    files = _files()
    for process in members(group) if files else ():
        found |= _segments(process.pid, files)
    return frozenset(found)


def remove_segments(segments: Collection[Path], group: int) -> None:
    """Remove the segments that no process outside the group maps. Idempotent."""
    left = set(segments)
    files = {inode: file for inode, file in _files().items() if file in left}
    for process in psutil.pids() if files else ():
        if group_of(process) != group:
            left -= _segments(process, files)
    for segment in left:
        segment.unlink(missing_ok=True)


def _files() -> dict[int, Path]:
    if not SHARED_MEMORY.is_dir():
        return {}
    with os.scandir(SHARED_MEMORY) as entries:
        return {e.inode(): Path(e.path) for e in entries if e.is_file(follow_symlinks=False)}


def _segments(process: int, files: dict[int, Path]) -> set[Path]:
    """The files that a process maps; none if it has exited or is another user's."""
    try:
        maps = Path(f"/proc/{process}/maps").read_text(errors="replace")
    except OSError:
        return set()
    # address permissions offset device inode path
    lines = (line.split() for line in maps.splitlines() if f" {SHARED_MEMORY}/" in line)
    return {files[inode] for line in lines if (inode := int(line[4])) in files}
