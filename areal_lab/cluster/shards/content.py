"""The bytes of one shard: in memory, or in a file without a name.

Such a file is gone with the process that opened it, even if that is killed.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np

Bytes: TypeAlias = "bytes | memoryview"


class Content(Protocol):
    """Bytes that are written once and then read in ranges, by several threads."""

    blocking: bool
    """Whether reading and writing may wait for a disk: an event loop leaves them to a thread."""

    def write(self, start: int, data: Bytes) -> None:
        """Write bytes from `start` on."""
        ...

    def read(self, start: int, end: int) -> Bytes:
        """Bytes `[start, end)`."""
        ...


class InMemory:
    """Bytes in the memory of this process."""

    blocking = False

    def __init__(self, size_bytes: int) -> None:
        self._view = np.empty(size_bytes, np.uint8).data

    def write(self, start: int, data: Bytes) -> None:
        """Copy them."""
        self._view[start : start + len(data)] = data

    def read(self, start: int, end: int) -> memoryview:
        """A view of them, without a copy."""
        return self._view[start:end].toreadonly()


class InFile:
    """Bytes in a file without a name."""

    blocking = True

    def __init__(self, folder: Path, size_bytes: int) -> None:
        """Reserve room.

        Raises:
            OSError: there is none.
        """
        # Unbuffered: read and written by position.
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - see close
        try:
            os.posix_fallocate(self._file.fileno(), 0, max(1, size_bytes))
        except BaseException:
            self._file.close()
            raise

    def write(self, start: int, data: Bytes) -> None:
        """Write them into the file."""
        left = memoryview(data)
        while left:
            written = os.pwrite(self._file.fileno(), left, start)
            start, left = start + written, left[written:]

    def read(self, start: int, end: int) -> memoryview:
        """Read them from the file."""
        return read_range(self._file.fileno(), start, end)

    def close(self) -> None:
        """Give the room back; idempotent."""
        self._file.close()


def read_range(file: int, start: int, end: int) -> memoryview:
    """Bytes `[start, end)` of an open file.

    Raises:
        OSError: it ends before.
    """
    data = memoryview(bytearray(end - start))
    at = 0
    while at < len(data):
        count = os.preadv(file, [data[at:]], start + at)
        if not count:
            raise OSError(f"the file ends at byte {start + at:,}, before {end:,}")
        at += count
    return data
