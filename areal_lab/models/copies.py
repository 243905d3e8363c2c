"""Memory of a device: copies that do not block the host, and its limit for a process.

From pinned memory a copy to a GPU is queued, and later work on the same stream runs after it; torch
reuses the pinned memory when the copy is done.
"""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to `device`; the tensor itself if it is already there."""
    if tensor.device.type == device.type:
        return tensor
    return _staged(tensor, device).to(device, non_blocking=True)


def copy_into(target: Tensor, source: Tensor) -> None:
    """Overwrite `target`, which may be on another device and of another type."""
    if source.device.type != "cpu" or target.device.type == "cpu":
        target.copy_(source)
    else:
        # Convert the type first: fewer bytes are staged, and the device needs no room for both.
        target.copy_(_staged(source.to(target.dtype), target.device), non_blocking=True)


def _staged(tensor: Tensor, device: torch.device) -> Tensor:
    # Pinned memory requires CUDA; without it torch stages the copy, and still does not wait.
    return tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor


def limit_process_memory(device: str, fraction: float) -> None:
    """Let torch allocate at most this part of a GPU's memory in this process, which then runs out
    of memory rather than another process on the GPU. Does nothing on a CPU, and for 1.
    """
    if device != "cpu" and fraction < 1:
        torch.get_device_module(device).set_per_process_memory_fraction(fraction)
