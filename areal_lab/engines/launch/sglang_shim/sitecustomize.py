"""Imported by every Python of the engine's CPU environment before anything else.

torchvision    SGLang imports it whatever the model. Its wheel is for CUDA; beside a CPU torch it
               imports only if the two operators that it describes to torch exist. They are
               declared, not implemented: no language model calls them.
LoRA           asks for pinned memory, from which copies to a GPU are faster. A CPU torch has none
               and refuses; here it gives ordinary memory.
"""

from __future__ import annotations

import functools
import importlib.abc
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_kept: list[Any] = []
"""torch forgets what a library declared when the library is collected."""


def _declare_operators() -> None:
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


def _pin_nothing() -> None:
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


_BEFORE: dict[str, Callable[[], None]] = {
    "torchvision": _declare_operators,
    "sglang.srt.lora.backend.torch_backend": _pin_nothing,
}
"""What to do when a module is first asked for. Not at once: that would import torch into processes
that do without."""


class _Before(importlib.abc.MetaPathFinder):
    """Finds nothing; acts when a module is asked for."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - as importlib calls it
        target: ModuleType | None = None,  # noqa: ARG002 - as importlib calls it
    ) -> None:
        if (act := _BEFORE.pop(fullname, None)) is not None:
            act()


sys.meta_path.insert(0, _Before())
