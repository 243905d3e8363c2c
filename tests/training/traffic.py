"""Bytes that computations move between memory and processor, and launches, counted without a GPU.

    Traffic          operations of torch, also on fake tensors
    KernelTraffic    loads and stores of Triton kernels in its interpreter

Each operation reads its inputs once and writes its outputs once, as eager kernels of a GPU do.
Matrix products and attention are launches, but their bytes are not counted: they are priced by
their arithmetic.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten: Any = torch.ops.aten
_PRODUCTS = {
    "mm",
    "addmm",
    "addmm_",
    "bmm",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_fused_attention_overrideable_backward",
}
_NOTHING = {
    "detach",
    "device",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_unsafe_view",
}
"""Operations that launch no kernel."""
_WRITE_ONLY = {"copy_", "fill_", "zero_"}
_INDEXED = {"gather", "index", "index_select", "embedding"}
"""Operations that read as much as they return."""


class Traffic(TorchDispatchMode):
    """Counts launches and bytes by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.moved: Counter[str] = Counter()

    @property
    def bytes(self) -> int:
        """Bytes of all operations."""
        return self.moved.total()

    def launched(self, name: str, *tensors: Tensor) -> None:
        """Count a kernel that reads or writes each of these once."""
        self.launches[name] += 1
        self.moved[name] += sum(_size(one) for one in tensors)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.__name__.split(".")[0]
        if not function.is_view and name not in _NOTHING:
            self.launches[name] += 1
            if name not in _PRODUCTS:
                self.moved[name] += _bytes(function, name, args, kwargs or {}, result)
        return result


def _bytes(function: Any, name: str, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    written = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
    total = sum(_size(one) for one in written)
    if name in _INDEXED:
        return 2 * total
    given = dict(zip((one.name for one in function._schema.arguments), args, strict=False))
    for argument in function._schema.arguments:
        value = {**given, **kwargs}.get(argument.name)
        overwritten = argument.alias_info is not None and argument.alias_info.is_write
        if overwritten and (argument.is_out or name in _WRITE_ONLY):
            continue
        total += sum(_size(one) for one in tree_leaves(value) if isinstance(one, Tensor))
    return total


def _size(tensor: Tensor) -> int:
    """Bytes of a tensor in memory; an expanded axis has one entry."""
    entries = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        entries *= length if stride else min(length, 1)
    return entries * tensor.element_size()


class KernelTraffic:
    """Counts bytes that kernels load and store while they are interpreted."""

    def __init__(self, monkeypatch: Any) -> None:
        from triton.runtime import interpreter  # not installed everywhere

        self.loaded = self.stored = 0
        builder: Any = interpreter.InterpreterBuilder
        load, store = builder.create_masked_load, builder.create_masked_store

        def counted_load(self_: Any, pointers: Any, mask: Any, *more: Any) -> Any:
            found = load(self_, pointers, mask, *more)
            self.loaded += int(mask.data.sum()) * found.data.itemsize
            return found

        def counted_store(self_: Any, pointers: Any, value: Any, mask: Any, *more: Any) -> Any:
            self.stored += int(mask.data.sum()) * value.data.itemsize
            return store(self_, pointers, value, mask, *more)

        monkeypatch.setattr(builder, "create_masked_load", counted_load)
        monkeypatch.setattr(builder, "create_masked_store", counted_store)

    @property
    def bytes(self) -> int:
        """Bytes in both directions."""
        return self.loaded + self.stored
