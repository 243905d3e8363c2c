"""Replacement for SGLang's compiled kernels, which have no CPU package.

On a CPU without AMX every layer of SGLang uses plain torch; only imports of names and one indexing
operation remain. Any other name can be imported and raises an error when called.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

__version__ = "0.0.0+shim"


def assign_req_to_token_pool_cpu(  # noqa: PLR0917 - as SGLang calls it
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,  # noqa: ARG001 - the row length, which the tensor knows
) -> None:
    """Write the slots of each request's new tokens into its row: `row[start:end] = slots`."""
    taken = 0
    rows, starts, ends = (t.tolist() for t in (req_pool_indices, start_offset, end_offset))
    for row, start, end in zip(rows, starts, ends, strict=True):
        slots = out_cache_loc[taken : taken + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        taken += end - start


def __getattr__(name: str) -> Any:
    # The import system looks up dunder names.
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is needed, but the CPU build has no kernels")

    return missing


_FUSED = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)
"""Operators that models look up when they are imported: without them SGLang has no processor for
images of any Qwen, because it imports all of those together. Declared, not implemented: the
models that call them (Qwen3.5) do not run on a CPU without AMX."""
_library = torch.library.Library("sgl_kernel", "FRAGMENT")
for _name in _FUSED:
    _library.define(f"{_name}(Tensor x) -> Tensor")


class _NoCudaRuntime:
    """Successful no-ops for CUDA runtime calls that SGLang makes even on a CPU (routed experts)."""

    def cudaHostRegister(self, *_: object) -> int:  # noqa: N802 - CUDA's name
        return 0

    def cudaHostUnregister(self, *_: object) -> int:  # noqa: N802 - CUDA's name
        return 0


torch.cuda.cudart = _NoCudaRuntime
