"""Records of alarms and the history of steps that their rules read.

History of a run for rules: the newest step, and statistics of earlier steps.

    line of metrics.jsonl --add--> newest step | entropy of the first ones | moving mean rewards

Its size does not grow with the run.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, linear_regression
from typing import Final, Literal, TypeAlias

AlarmName: TypeAlias = Literal[
    "ratio",
    "drift",
    "weight_deviation",
    "entropy",
    "truncated",
    "stale_weights",
    "sampler_gap",
    "equal_rewards",
    "reward_drop",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about a run that rules know in addition to its metrics."""

    eta: float
    """Largest staleness bound that was in force so far, in versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Result of a rule for one step."""

    metric: str
    """Metric that decides."""
    value: float
    bound: float
    beyond: bool
    """True if the value is on the wrong side of the bound."""
    what: str
    """Value and bound in words."""
    cause: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """An alarm that was raised."""

    name: AlarmName
    since_step: int
    """The first of the steps beyond the bound that raised it."""
    raised_step: int
    """The step after which it was raised."""
    metric: str
    value: float
    """Value of the step that raised the alarm."""
    bound: float
    what: str
    cause: str
    remedy: str
    ended_step: int | None = None
    """The step after which it ended; None while it lasts."""

    def __str__(self) -> str:
        return (
            f"{self.name.replace('_', ' ')} since step {self.since_step}: {self.what}. "
            f"{self.cause} {self.remedy}"
        )


@dataclass(frozen=True, slots=True)
class Change:
    """An alarm that began or ended with this step."""

    kind: Literal["begun", "ended"]
    alarm: Alarm

    def __str__(self) -> str:
        if self.kind == "begun":
            return f"alarm: {self.alarm}"
        name = self.alarm.name.replace("_", " ")
        return f"alarm over at step {self.alarm.ended_step}: {name} (since {self.alarm.since_step})"


WINDOW: Final = 20
"""Training steps of a mean reward: one batch alone is too noisy."""
MEASUREMENTS: Final = 3
"""Held-out measurements of a mean reward."""
_FIRST: Final = 5
"""Steps whose mean entropy is the run's entropy at its start."""


class MovingMean:
    """Mean of the newest values, and the largest such mean so far."""

    def __init__(self, count: int) -> None:
        self._values: deque[float] = deque(maxlen=count)
        self.best: float | None = None

    def add(self, value: float) -> None:
        """Add the next value."""
        self._values.append(value)
        if (mean := self.mean) is not None:
            self.best = mean if self.best is None else max(self.best, mean)

    @property
    def mean(self) -> float | None:
        """Mean of the newest values; None before there are `count`."""
        return fmean(self._values) if len(self._values) == self._values.maxlen else None


class Trend:
    """Line through the newest values of a metric, by least squares."""

    def __init__(self, count: int) -> None:
        self._points: deque[tuple[float, float]] = deque(maxlen=count)

    def add(self, step: float, value: float) -> None:
        """Add the value of the next step; values that are not finite are left out."""
        if math.isfinite(value):
            self._points.append((step, value))

    def at(self, ahead: float) -> float | None:
        """Value of the line so many steps after the newest one; None before there are enough."""
        if len(self._points) < (self._points.maxlen or 0):
            return None
        steps, values = zip(*self._points, strict=True)
        slope, intercept = linear_regression(steps, values)
        return float(slope * (steps[-1] + ahead) + intercept)


class History:
    """The metrics of a run so far, in the order of its steps."""

    def __init__(self) -> None:
        self.facts = Facts(eta=0.0)
        self.newest: Mapping[str, float] = {}
        self.reward = MovingMean(WINDOW)
        self.held_out = MovingMean(MEASUREMENTS)
        self.weight_deviation = Trend(WINDOW)
        self._first_entropies: list[float] = []

    def add(self, metrics: Mapping[str, float], facts: Facts) -> None:
        """Add the next step."""
        self.newest, self.facts = metrics, facts
        if "entropy" in metrics and len(self._first_entropies) < _FIRST:
            self._first_entropies.append(metrics["entropy"])
        if "reward_mean" in metrics:
            self.reward.add(metrics["reward_mean"])
        if "weight_deviation" in metrics:
            self.weight_deviation.add(metrics["step"], metrics["weight_deviation"])
        if "held_out_reward" in metrics:
            self.held_out.add(metrics["held_out_reward"])

    @property
    def first_entropy(self) -> float | None:
        """Mean entropy of the first steps; None until they are over."""
        full = len(self._first_entropies) == _FIRST
        return fmean(self._first_entropies) if full else None
