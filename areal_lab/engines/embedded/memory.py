"""Give the memory of weights back to the device, and take it again.

    weights  held --release--> gone --take--> there, but empty --new weights--> of a version

What is released is lost: the engine generates again once it got new weights.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from areal_lab.host.memory import return_freed_memory

RELEASED: Final = "released"
"""Reported as the version of an engine whose weights were released, until it gets new ones."""


class WeightMemory:
    """The memory of a model's parameters; its buffers, which no update carries, stay."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._shapes: list[torch.Size] | None = None

    @property
    def there(self) -> bool:
        """Whether parameters have memory."""
        return self._shapes is None

    def release(self) -> None:
        """Free the parameters; tied ones stay tied."""
        if self._shapes is not None:
            return
        parameters = list(self._model.parameters())
        self._shapes = [parameter.shape for parameter in parameters]
        for parameter in parameters:
            parameter.data = parameter.data.new_empty(0)
        give_back(parameters[0].device)

    def take(self) -> None:
        """Allocate the parameters again, with whatever values the memory has."""
        if self._shapes is None:
            return
        for parameter, shape in zip(self._model.parameters(), self._shapes, strict=True):
            parameter.data = parameter.data.new_empty(shape)
        self._shapes = None


def give_back(device: torch.device) -> None:
    """Return freed memory to the system, which allocators keep otherwise."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return_freed_memory()
