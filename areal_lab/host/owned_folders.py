"""Folders removed with the process that created them, or by a later one if it was killed.

make_owned_folder(parent) --> a folder with a locked file in it --> removed when the process exits
                                    killed: the lock is free   --> remove_abandoned_folders(parent)
"""

from __future__ import annotations

import atexit
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

_PREFIX = "areal_lab-"
_LOCK = ".alive"
_locks: dict[Path, int] = {}


def nearest_existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists; absolute."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def make_owned_folder(parent: Path, *, mode: int = 0o777) -> Path:
    """A fresh folder in `parent`, removed when this process exits normally.

    Args:
        mode: its permissions before the umask.
    """
    name = f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
    # Lock it before it gets the name that `remove_abandoned_folders` searches for.
    aside = parent / f".{name}"
    aside.mkdir(mode)
    lock = os.open(aside / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    folder = parent / name
    aside.rename(folder)
    _locks[folder] = lock
    atexit.register(remove_owned_folder, folder)
    return folder


def remove_owned_folder(folder: Path) -> None:
    """Remove the folder with everything in it. Idempotent."""
    shutil.rmtree(folder, ignore_errors=True)
    lock = _locks.pop(folder, None)
    if lock is not None:
        os.close(lock)


def remove_abandoned_folders(parent: Path, first: Callable[[Path], None] = lambda _: None) -> None:
    """Remove this user's folders in `parent` whose owner is dead.

    Args:
        first: called with each folder before its removal.
    """
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            if folder.lstat().st_uid != os.getuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR)
        except OSError:
            continue  # not an owned folder, or just being removed
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # its owner is alive
        else:
            first(folder)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
