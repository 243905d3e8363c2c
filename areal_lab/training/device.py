"""Tensors of a step on the trainer's device, without making the host wait for it.

Everything is computed on the host first (packing, counts) and copied. From pinned memory a copy to
a GPU does not wait; what comes back is read once per optimizer step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from areal_lab.data.batch import PackedBatch, PackedImages
from areal_lab.models.copies import to_device


def on_device(packed: PackedBatch, device: torch.device) -> PackedBatch:
    """The batch with its tensors on `device`."""
    moved = _moved(packed, device)
    if packed.images is not None:
        moved["images"] = packed.images._replace(**_moved(packed.images, device))
    return packed._replace(**moved)


def _moved(values: PackedBatch | PackedImages, device: torch.device) -> dict[str, Any]:
    return {
        name: to_device(value, device)
        for name, value in values._asdict().items()
        if isinstance(value, Tensor)
    }
