"""A part of the vocabulary, where several processes divide the output embedding among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyPart:
    """Which rows of the output embedding are here, and how the processes that have the others are
    reached. All of them call with the same tokens."""

    first: int
    """Token of the first row."""
    vocabulary: int
    """Tokens of all parts."""
    gather: Callable[[Tensor], Tensor]
    """Tensors of one shape from every part, stacked in one order, on each of them."""
    add_up: Callable[[Tensor], object]
    """Replace tensors of one shape by their sum, in place, on each of them."""

    def own(self, targets: Tensor) -> Tensor:
        """Targets counted from the first token of this part; those of others are outside of it."""
        return targets - self.first
