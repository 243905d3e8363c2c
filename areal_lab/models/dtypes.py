"""Which type matrix products are computed in: one rule for the trainer and every engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from areal_lab.host.cpu import native_bfloat16

if TYPE_CHECKING:
    import torch


def dtype_name(name: str, *, native: bool) -> Literal["float32", "bfloat16"]:
    """The name of a type; `auto` is bfloat16 where the device has instructions for it.

    On a CPU that only emulates bfloat16 it is three times slower than float32.

    Args:
        native: whether the device has them.

    Raises:
        ValueError: if the name is not `auto`, `float32` or `bfloat16`.
    """
    match name:
        case "float32" | "bfloat16":
            return name
        case "auto":
            return "bfloat16" if native else "float32"
    raise ValueError(f"dtype is {name!r}, but must be auto, float32 or bfloat16")


def has_bfloat16(device: str) -> bool:
    """Whether `auto` is bfloat16 on this machine's `device`: on every GPU, without asking it, so
    that a process that only sends weights there needs no GPU itself."""
    return device.partition(":")[0] == "cuda" or native_bfloat16()


def compute_dtype(name: str = "auto", device: str = "cpu") -> torch.dtype:
    """Type that matrix products are computed in on this machine's `device`, see `dtype_name`."""
    import torch  # not above: who only starts servers does without

    found = dtype_name(name, native=has_bfloat16(device))
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[found]
