"""Compile the kernels of log-probs for an H100, on a machine without one; print what they need.

Each line: variant, registers of a thread, bytes spilled, bytes of shared memory, and loads and
stores of logits that are narrower than 16 bytes.
"""

from __future__ import annotations

from typing import Any

from areal_lab.functional.logprobs import fused
from tests.kernels import compiled_for_h100

_TYPES = {"mask": "*i1", "logits": "*bf16", "out": "*bf16"}
# Tiles have a multiple of 128 columns.
_INTEGERS = ("columns", "logits_stride", "out_stride", "mask_row_stride", "mask_column_stride")
_RESTRICTIONS = {"all": {}, "mask": {"masked": True}, "cutoff": {"cut": True}}


def main() -> None:
    """Compile every variant."""
    for name, given in _RESTRICTIONS.items():
        constants = {"block_columns": fused.BLOCK_COLUMNS, "masked": False, "cut": False, **given}
        _report(f"sums/{name}", fused.sums_kernel, constants)
        for entropy in (False, True):
            _report(
                f"gradient/{name}", fused.gradient_kernel, {**constants, "with_entropy": entropy}
            )
    _report(
        "sums/float32",
        fused.sums_kernel,
        {"block_columns": fused.BLOCK_COLUMNS, "masked": False, "cut": False},
        logits="*fp32",
    )


def _report(name: str, kernel: Any, constants: dict[str, Any], **types: str) -> None:
    constants = {"mask_column_stride": 1, **constants}  # as Triton specializes a 1
    for part, given in (("mask", "masked"), ("cutoff", "cut"), ("factors", "with_entropy")):
        if not constants.get(given, True):
            constants[part] = None
    of_arguments = {
        argument: "i32" if argument in _INTEGERS else _TYPES.get(argument, "*fp32")
        for argument in kernel.arg_names
    }
    found = compiled_for_h100(kernel, {**of_arguments, **types}, constants, num_warps=fused.WARPS)
    numbers = (found.registers, found.spilled_bytes, found.shared_bytes, found.narrow)
    print(name, *numbers, flush=True)


if __name__ == "__main__":
    main()
