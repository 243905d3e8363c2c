"""The steps of a run that rules look at: the newest one, and what has to be remembered.

    line of metrics.jsonl --add--> newest step | entropy of the first ones | moving mean rewards

Its size does not grow with the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import fmean
from typing import Final

from areal_lab.metrics.alarm import Facts

WINDOW: Final = 20
"""Training steps of a mean reward: one batch alone is too noisy."""
MEASUREMENTS: Final = 3
"""Held-out measurements of a mean reward."""
_FIRST: Final = 5
"""Steps whose mean entropy is the run's entropy at its start."""


class MovingMean:
    """The mean of the newest values, and the largest that it has been."""

    def __init__(self, count: int) -> None:
        self._values: deque[float] = deque(maxlen=count)
        self.best: float | None = None
        """Largest mean so far; None before there are `count` values."""

    def add(self, value: float) -> None:
        """The next value."""
        self._values.append(value)
        if (mean := self.mean) is not None:
            self.best = mean if self.best is None else max(self.best, mean)

    @property
    def mean(self) -> float | None:
        """Mean of the newest values; None before there are `count`."""
        return fmean(self._values) if len(self._values) == self._values.maxlen else None


class History:
    """The metrics of a run so far, in the order of its steps."""

    def __init__(self) -> None:
        self.facts = Facts(eta=0.0)
        """As of the newest step."""
        self.newest: Mapping[str, float] = {}
        """Metrics of the newest step."""
        self.reward = MovingMean(WINDOW)
        """Of training batches."""
        self.held_out = MovingMean(MEASUREMENTS)
        self._first_entropies: list[float] = []

    def add(self, metrics: Mapping[str, float], facts: Facts) -> None:
        """The next step."""
        self.newest, self.facts = metrics, facts
        if "entropy" in metrics and len(self._first_entropies) < _FIRST:
            self._first_entropies.append(metrics["entropy"])
        if "reward_mean" in metrics:
            self.reward.add(metrics["reward_mean"])
        if "held_out_reward" in metrics:
            self.held_out.add(metrics["held_out_reward"])

    @property
    def first_entropy(self) -> float | None:
        """Mean entropy of the first steps; None until they are over."""
        full = len(self._first_entropies) == _FIRST
        return fmean(self._first_entropies) if full else None
