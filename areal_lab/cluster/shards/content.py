"""The bytes of one shard: in memory, or in a file without a name.

Such a file is gone with the process that opened it, even if that is killed.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Protocol

import numpy as np

Bytes = bytes | memoryview


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
        self._view = memoryview(np.empty(size_bytes, np.uint8))

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

    def read(self, start: int, end: int) -> bytes:
        """Read them from the file."""
        data = os.pread(self._file.fileno(), end - start, start)
        assert len(data) == end - start  # less than 2 GiB at once, of a file that we filled
        return data

    def close(self) -> None:
        """Give the room back; idempotent."""
        self._file.close()
