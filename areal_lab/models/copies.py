"""Copies from the host to a device that do not make the host wait for them.

From pinned memory a copy to a GPU is queued, and what is computed later on the same stream comes
after it; torch reuses the pinned memory when the copy is done.
"""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on `device`; the tensor itself if it is there."""
    if tensor.device.type == device.type:
        return tensor
    return _staged(tensor, device).to(device, non_blocking=True)


def copy_into(target: Tensor, source: Tensor) -> None:
    """Overwrite `target`, which may be on another device and of another type."""
    if source.device.type != "cpu" or target.device.type == "cpu":
        target.copy_(source)
    else:
        # The type first: fewer bytes are staged, and the device needs no room for both.
        target.copy_(_staged(source.to(target.dtype), target.device), non_blocking=True)


def _staged(tensor: Tensor, device: torch.device) -> Tensor:
    # Pinned memory is a matter of CUDA; without it torch stages the copy, and still does not wait.
    return tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor
