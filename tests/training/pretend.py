"""A device that is not there, with real values: its tensors are computed on the CPU, guarded.

mixed devices     an error, as on a GPU; only copies may mix, and scalars of the CPU join
host waits        counted by the line that caused them: values read back, sizes that depend on
                  values, and copies between host and device that do not say `non_blocking`
"""

from __future__ import annotations

import math
import sys
import time
import traceback
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

NAME = "pretend"
_aten: Any = torch.ops.aten
_COPIES = {_aten._to_copy.default, _aten.copy_.default}
_READS = {
    _aten._local_scalar_dense.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten.equal.default,
    _aten._unique2.default,
}


def register() -> torch.device:
    """Make the device known; before the first backward pass of a process."""
    if torch._C._get_privateuse1_backend_name() != NAME:
        _setup_privateuseone_for_python_backend(NAME, backend_module=_Device())
        torch.__future__.set_swap_module_params_on_conversion(True)
    return torch.device(NAME, 0)


def register_fake() -> torch.device:
    """Make the device known for fake tensors, which have no values; instead of `register`."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Nothing)
    torch._C._set_only_lift_cpu_tensors(True)
    return torch.device(NAME, 0)


CALLS: Counter[str] = Counter()
"""Calls of events, NVTX and memory statistics, by name."""
RANGES: list[str] = []
"""Names of the NVTX ranges, in the order of their begin."""


class Event:
    """An event of a device that runs 1 s behind the host's clock: not complete before a wait."""

    behind_s = 1.0

    def __init__(self, *, enable_timing: bool = False) -> None:
        assert enable_timing, "only such events have times"
        self.at_s = math.nan
        self.complete = False

    def record(self) -> None:
        CALLS["record"] += 1
        self.at_s = time.time() + self.behind_s
        _recorded.append(self)

    def synchronize(self) -> None:
        CALLS["synchronize"] += 1
        if not self.complete:
            _wait("Event.synchronize")
        _complete()

    def elapsed_time(self, end: Event) -> float:
        assert self.complete, "torch raises an error"
        assert end.complete, "torch raises an error"
        return (end.at_s - self.at_s) * 1e3


_recorded: list[Event] = []


def _complete() -> None:
    for event in _recorded:
        event.complete = True
    _recorded.clear()


class _NVTX:
    """The part of `torch.cuda.nvtx` that is used."""

    depth = 0

    def range_push(self, name: str) -> None:
        CALLS["range_push"] += 1
        RANGES.append(name)
        self.depth += 1

    def range_pop(self) -> None:
        CALLS["range_pop"] += 1
        self.depth -= 1
        assert self.depth >= 0, "a range ends that did not begin"


class _Device(_DummyBackendModule):
    """What torch asks of a device, also to compute activations again, and what `torch.cuda` has."""

    Event = Event
    nvtx = _NVTX()

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16]

    @staticmethod
    def get_device_name(device: torch.device) -> str:
        assert device.type == NAME
        return "NVIDIA H100 80GB HBM3"

    @staticmethod
    def reset_peak_memory_stats(_device: torch.device) -> None:
        CALLS["reset_peak_memory_stats"] += 1

    @staticmethod
    def max_memory_allocated(_device: torch.device) -> int:
        return 3 << 30

    @staticmethod
    def max_memory_reserved(_device: torch.device) -> int:
        return 4 << 30


class _Nothing:
    """What torch asks of a device: that it is not there, so that it makes nothing on it."""

    @staticmethod
    def is_available() -> bool:
        return False


class PretendTensor(Tensor):
    """A CPU tensor that says it is on the device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> PretendTensor:
        """Wrap a CPU tensor."""
        made: Any = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
            requires_grad=False,
        )
        made.inner = inner
        return made

    def data_ptr(self) -> int:
        """Where the values are; what a wrapper says of itself is 0."""
        return self.inner.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute on the CPU."""
        return compute(func, args, kwargs or {})


WAITS: Counter[str] = Counter()
"""Times that the host waited, by line."""


class PretendMode(TorchDispatchMode):
    """Factories that name the device make its tensors."""

    def __enter__(self) -> Any:
        """Forget what was counted."""
        WAITS.clear()
        CALLS.clear()
        RANGES.clear()
        self._lifted = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        """Restore."""
        torch._C._set_only_lift_cpu_tensors(self._lifted)
        return super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute on the CPU."""
        return compute(func, args, kwargs or {})


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on what is inside, and wrap what it makes."""
    tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
    inside = [t for t in tensors if isinstance(t, PretendTensor)]
    outside = [t for t in tensors if not isinstance(t, PretendTensor) and t.dim()]
    asked = kwargs.get("device")
    asks_here = asked is not None and torch.device(asked).type == NAME
    asks_there = asked is not None and not asks_here
    if func in _COPIES:
        crosses = (
            bool(inside) and (asks_there or bool(outside))
            if func is _aten._to_copy.default
            else bool(inside) and len(inside) < len(tensors)
        ) or (asks_here and not inside)
        non_blocking = kwargs.get("non_blocking", False) or (
            func is _aten.copy_.default and len(args) > 2 and args[2]
        )
        if crosses and not non_blocking:
            _wait(func)
    elif inside and outside:
        raise RuntimeError(f"{func} mixes {NAME} and {outside[0].device}")
    elif (inside and func in _READS) or (
        inside and func is _aten.index.Tensor and any(map(_is_mask, args[1]))
    ):
        _wait(func)
    wrapper_of = {id(t.inner): t for t in inside}
    unwrap = lambda t: t.inner if isinstance(t, PretendTensor) else t  # noqa: E731
    plain, named = tree_map(unwrap, (args, kwargs))
    if asked is not None:
        named["device"] = torch.device("cpu")
    result = func(*plain, **named)
    target_here = asks_here or (bool(inside) and not asks_there)
    if func is _aten.copy_.default:
        target_here = isinstance(args[0], PretendTensor)
    if not target_here:
        return result

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        known = wrapper_of.get(id(value))
        return PretendTensor(value) if known is None else known

    return tree_map(wrap, result)


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.bool


def _wait(func: Any) -> None:
    _complete()  # what was queued before is done
    here = next(
        (
            frame
            for frame in reversed(traceback.extract_stack(sys._getframe(1)))
            if "areal_lab" in frame.filename
        ),
        None,
    )
    WAITS[f"{here.filename}:{here.lineno} {func}" if here else str(func)] += 1
