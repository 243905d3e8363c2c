"""Model calls per response of agents: a geometric distribution with a spike at its cap.

    k = min(geometric(p), most)        P(one more turn) = 1 - p, until the agent is stopped
    mean = (1 - (1 - p)^most) / p

Published means: 10.9 turns in SWE-Bench and 6.3 in BFCL (arXiv:2511.02230, 2026-05). Turns do not
depend on the tokens of a response, which are divided among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

_HALVINGS = 60
"""Of the interval of `ending`."""


@dataclass(frozen=True)
class TurnCounts:
    """Numbers of turns with a given mean."""

    mean: float
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.mean <= self.most:
            raise ValueError(
                f"the mean number of turns is {self.mean}, but must be from 1 to the largest one "
                f"({self.most})"
            )

    @cached_property
    def ending(self) -> float:
        """Probability that a turn is the last one, before the cap."""
        if self.mean == 1:
            return 1.0
        if self.mean == self.most:
            return 0.0
        low, high = 0.0, 1.0  # the mean falls from `most` to 1
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if _mean(middle, self.most) > self.mean else (low, middle)
        return (low + high) / 2

    @property
    def capped(self) -> float:
        """Share of responses that the cap ends."""
        return (1 - self.ending) ** (self.most - 1)

    def draw(self, generator: np.random.Generator, size: int) -> NDArray[np.int64]:
        """Turns of `size` responses."""
        if self.ending == 0:
            return np.full(size, self.most, np.int64)
        return np.minimum(generator.geometric(self.ending, size), self.most).astype(np.int64)


def _mean(ending: float, most: int) -> float:
    return float(-np.expm1(most * np.log1p(-ending)) / ending) if ending < 1 else 1.0
