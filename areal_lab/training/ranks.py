"""Communication of a training step with the other trainer processes, as a record of functions.

A step does not use a process group: for a single process, every function returns its argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor


def _same(value: Any) -> Any:
    return value


def _whole_here(module: Any, *, offload: bool = False) -> Any:  # noqa: ARG001 - all is here
    if module.param_dtype != torch.float32:
        raise ValueError(
            f"actor.param_dtype is {module.param_dtype}, but only trainer processes make working "
            "copies of weights; leave it out where a model trains in this process"
        )
    return module


def _alone(value: Any) -> list[Any]:
    return [value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The processes that train together. Every function must be called by all of them.

    Groups are divided among the data ranks. Where a layer or a sequence is divided too, several
    ranks compute the same groups: they are one data rank, and what they give counts once.
    """

    rank: int = 0
    count: int = 1
    data_rank: int = 0
    data_count: int = 1
    """Also the factor of a share of the loss: gradients are averaged over the ranks, and the shares
    of the data ranks are to be summed."""
    most: Callable[[int], int] = _same
    """Largest of the numbers that the ranks give."""
    total: Callable[[Tensor], Tensor] = _same
    """Sum of the tensors that the data ranks give, on every rank."""
    whole: Callable[[Tensor], Tensor] = _same
    """A sharded tensor in one piece, on every rank."""
    collect: Callable[[Any], list[Any]] = _alone
    """Gather the value of each data rank, in order, on rank 0; nothing on the others."""
    announce: Callable[[Any], Any] = _same
    """Send the value of rank 0 to every rank."""

    shard: Callable[..., object] = _whole_here
    """Divide the parameters of a `PackedPolicy` or `PackedValues` among the ranks, in place; before
    its optimizer. `offload=True` keeps them in main memory while they do not compute."""

    @property
    def first(self) -> bool:
        """True if this rank writes files and replies."""
        return self.rank == 0


ALONE: Final = Ranks()
"""One process."""
