"""Which type matrix products are computed in: one rule for the trainer and the embedded engine."""

from __future__ import annotations

from typing import Final

import torch

from areal_lab.host.cpu import native_bfloat16

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def compute_dtype(name: str = "auto", device: str = "cpu") -> torch.dtype:
    """Type that matrix products are computed in.

    `auto` is bfloat16 where the device has instructions for it and float32 elsewhere: on a CPU that
    only emulates bfloat16 it is three times slower than float32.

    Raises:
        ValueError: if the name is not `auto`, `float32` or `bfloat16`.
    """
    if name in _DTYPES:
        return _DTYPES[name]
    if name != "auto":
        raise ValueError(f"dtype is {name!r}, but must be auto, float32 or bfloat16")
    if torch.device(device).type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    return torch.bfloat16 if native_bfloat16() else torch.float32
