"""Folders that go with the process that made them, or else with the next one that looks.

make_owned_folder(place) --> a folder with a locked file in it --> removed at the process's end
                                   killed: the lock is free   --> remove_abandoned_folders(place)
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
    """The path, or the nearest folder above it that exists."""
    return next(place for place in (path, *path.parents) if place.exists())


def make_owned_folder(place: Path, *, mode: int = 0o777) -> Path:
    """A fresh folder below `place`, removed when this process ends normally.

    Args:
        mode: its permissions, less the umask.
    """
    name = f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
    # Locked before it gets the name under which others look for abandoned ones.
    aside = place / f".{name}"
    aside.mkdir(mode)
    lock = os.open(aside / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    folder = place / name
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


def remove_abandoned_folders(place: Path, first: Callable[[Path], None] = lambda _: None) -> None:
    """Remove this user's folders below `place` whose owner is dead.

    Args:
        first: done with each of them before.
    """
    for folder in place.glob(f"{_PREFIX}*"):
        try:
            if folder.lstat().st_uid != os.getuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR)
        except OSError:
            continue  # of another kind, or just being removed
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # its owner lives
        else:
            first(folder)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
