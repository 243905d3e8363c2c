"""Files that survive a power failure: written aside, flushed to the disk, renamed."""

from __future__ import annotations

import os
from pathlib import Path


def flush_file(path: Path) -> None:
    """Wait until the content of a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    """Wait until a folder is on the disk with everything in it."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            flush_file(Path(parent) / name)
        flush_file(Path(parent))


def replace_flushed(temporary: Path, path: Path) -> None:
    """Rename a file or folder that was flushed; the new name is on the disk at the return."""
    os.replace(temporary, path)
    flush_file(path.parent)
