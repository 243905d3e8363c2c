"""Where a run's weights travel: shared memory if that has room, else the run folder. No torch.

The root belongs to the pipeline's process and goes when that ends; if it is killed, the next run
removes it (`owned_folders`).
"""

from __future__ import annotations

import atexit
import os
import shutil
from pathlib import Path

from areal_lab.host.owned_folders import (
    make_owned_folder,
    remove_abandoned_folders,
    remove_owned_folder,
)
from areal_lab.host.shared_memory import SHARED_MEMORY

ROOM_FACTOR = 2.5
"""Shared memory must have room for this many sets of weights: one that waits for engines to end
what they run, one being written, and half of one to spare."""


def choose_weights_root(run_dir: Path, size_bytes: int, *, sets: float = ROOM_FACTOR) -> Path:
    """A fresh folder for weights of this size: in shared memory if it has room for so many `sets`
    of them, else the run's.

    It is removed when this process ends normally. Folders of processes that were killed are
    removed here, by the next run.
    """
    if in_memory(SHARED_MEMORY):
        remove_abandoned_folders(SHARED_MEMORY)
        if shutil.disk_usage(SHARED_MEMORY).free >= sets * size_bytes:
            return make_owned_folder(SHARED_MEMORY)
    root = run_dir / "weights"
    root.mkdir(parents=True, exist_ok=True)
    atexit.register(remove_weights_root, root)
    return root


def remove_weights_root(root: Path) -> None:
    """Remove the folder with everything in it. Idempotent."""
    remove_owned_folder(root)


def in_memory(place: Path) -> bool:
    """Whether files there live in memory, so that syncing them to a disk means nothing."""
    return place.is_dir() and os.access(place, os.W_OK) and place.is_relative_to(SHARED_MEMORY)
