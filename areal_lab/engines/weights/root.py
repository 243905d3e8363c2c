"""The folder for a run's weights: in shared memory if that has room, else in the run folder.

It belongs to the pipeline's process and is removed at its end; if the process is killed, the next
run removes it (`owned_folders`). Imports no torch.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from areal_lab.host.owned_folders import (
    make_owned_folder,
    remove_abandoned_folders,
    remove_owned_folder,
)
from areal_lab.host.process_groups import SHARED_MEMORY

ROOM_FACTOR = 2.5
"""Sets of weights that must fit into shared memory: one that engines have yet to load, one being
written, and half of one as a reserve."""

_PRIVATE = 0o700


def choose_weights_root(
    run_dir: Path, size_bytes: int, *, sets: float = ROOM_FACTOR, local: bool = True
) -> Path:
    """Create a folder for weights of this size: in shared memory if `sets` of them fit, else in the
    run folder.

    It is removed when this process ends normally. Folders of killed processes are removed here, by
    the next run. With `local`, all readers are on this machine, and only this user can read it;
    otherwise it is in the run folder, which other machines see.
    """
    if local and in_memory(SHARED_MEMORY):
        remove_abandoned_folders(SHARED_MEMORY)
        if shutil.disk_usage(SHARED_MEMORY).free >= sets * size_bytes:
            return make_owned_folder(SHARED_MEMORY, mode=_PRIVATE)
    run_dir.mkdir(parents=True, exist_ok=True)
    remove_abandoned_folders(run_dir)
    return make_owned_folder(run_dir, mode=_PRIVATE if local else 0o777)


def remove_weights_root(root: Path) -> None:
    """Remove the folder with everything in it. Idempotent."""
    remove_owned_folder(root)


def in_memory(place: Path) -> bool:
    """Return whether files there are in memory, so that syncing them to a disk is pointless."""
    return place.is_dir() and os.access(place, os.W_OK) and place.is_relative_to(SHARED_MEMORY)
