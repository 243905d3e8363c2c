"""Where a run's weights travel: shared memory if that has room, else the run folder. No torch.

The root belongs to the pipeline's process. It goes when that process ends; if it is killed, the
next run finds the root's lock free and removes it.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import secrets
import shutil
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
ROOM_FACTOR = 2.5
"""Shared memory must have room for this many sets of weights: one that waits for engines to end
what they run, one being written, and half of one to spare."""

_PREFIX = "areal_lab-"
_LOCK = ".alive"
_locks: dict[Path, int] = {}


def choose_weights_root(run_dir: Path, size_bytes: int, *, sets: float = ROOM_FACTOR) -> Path:
    """A fresh folder for weights of this size: in shared memory if it has room for so many `sets`
    of them, else the run's.

    It is removed when this process ends normally. Folders of processes that were killed are
    removed here, by the next run: a lock on a file inside tells the living from the dead.
    """
    if in_memory(SHARED_MEMORY):
        remove_abandoned_roots(SHARED_MEMORY)
        if shutil.disk_usage(SHARED_MEMORY).free >= sets * size_bytes:
            return _make_locked_root(SHARED_MEMORY)
    root = run_dir / "weights"
    root.mkdir(parents=True, exist_ok=True)
    atexit.register(remove_weights_root, root)
    return root


def remove_weights_root(root: Path) -> None:
    """Remove the folder with everything in it. Idempotent."""
    shutil.rmtree(root, ignore_errors=True)
    lock = _locks.pop(root, None)
    if lock is not None:
        os.close(lock)


def remove_abandoned_roots(place: Path) -> None:
    """Remove the roots below `place` whose owner is dead."""
    for root in place.glob(f"{_PREFIX}*"):
        try:
            lock = os.open(root / _LOCK, os.O_RDWR)
        except OSError:
            continue  # another user's, or just being removed
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # its owner lives
        else:
            shutil.rmtree(root, ignore_errors=True)
        finally:
            os.close(lock)


def _make_locked_root(place: Path) -> Path:
    name = f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
    # Locked before it gets the name under which others look for abandoned ones.
    aside = place / f".{name}"
    aside.mkdir()
    lock = os.open(aside / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    root = place / name
    aside.rename(root)
    _locks[root] = lock
    atexit.register(remove_weights_root, root)
    return root


def in_memory(place: Path) -> bool:
    """Whether files there live in memory, so that syncing them to a disk means nothing."""
    return place.is_dir() and os.access(place, os.W_OK) and place.is_relative_to(SHARED_MEMORY)
