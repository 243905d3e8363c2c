"""Imported by every Python of the engine's CPU environment before anything else.

SGLang imports torchvision whatever the model. Its wheel is for CUDA; beside a CPU torch it imports
only if the two operators that it describes to torch exist. They are declared, not implemented: no
language model calls them.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_kept: list[Any] = []
"""torch forgets what a library declared when the library is collected."""


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Finds nothing; declares the operators when torchvision is asked for.

    Not at once: that would import torch into processes that do without.
    """

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - as importlib calls it
        target: ModuleType | None = None,  # noqa: ARG002 - as importlib calls it
    ) -> None:
        if fullname != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(library)


sys.meta_path.insert(0, _BeforeTorchvision())
