"""Imported by every Python of the engine's CPU environment before anything else.

torchvision    SGLang imports it for every model. Its wheel is for CUDA; with a CPU torch the import
               works only if two operators exist. They are declared here but not implemented, as
               no language model calls them.
LoRA           requests pinned memory for fast copies to a GPU. A CPU torch has none and raises an
               error; here it returns ordinary memory.
attention      loops over the requests of a batch; here one call takes all of them
               (`batched_attention`).
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_kept: list[Any] = []
"""Libraries, kept alive: torch drops their declarations when they are collected."""


def _declare_operators() -> None:
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


def _ignore_pinning() -> None:
    import torch

    def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def without(*args: Any, **named: Any) -> Any:
            named.pop("pin_memory", None)
            return make(*args, **named)

        return without

    setattr(torch.Tensor, "pin_memory", lambda tensor, *_: tensor)  # noqa: B010 - as those below
    for name in ("tensor", "zeros"):
        setattr(torch, name, unpinned(getattr(torch, name)))


def _batch_attention(module: ModuleType) -> None:
    # Next to this file, which only the engine's Python has on its path.
    importlib.import_module("batched_attention").replace_loops(module)


_BEFORE: dict[str, Callable[[], None]] = {
    "torchvision": _declare_operators,
    "sglang.srt.lora.backend.torch_backend": _ignore_pinning,
}
"""Actions at the first import of a module. Running them now would import torch into processes
that do not need it."""
_AFTER: dict[str, Callable[[ModuleType], None]] = {
    "sglang.srt.layers.attention.torch_native_backend": _batch_attention,
}
"""Actions right after the first import of a module, with the module."""


class _Actions(importlib.abc.MetaPathFinder):
    """Runs an action when a module is imported."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,  # noqa: ARG002 - as importlib calls it
    ) -> importlib.machinery.ModuleSpec | None:
        if (act := _BEFORE.pop(fullname, None)) is not None:
            act()
        if (then := _AFTER.pop(fullname, None)) is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_act(module: ModuleType) -> None:
                execute(module)
                then(module)

            setattr(spec.loader, "exec_module", execute_and_act)  # noqa: B010 - as those above
        return spec


sys.meta_path.insert(0, _Actions())
