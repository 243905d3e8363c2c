"""Points of several seeds as one: means with 95 % intervals, by learning rate, place, lag and loss.

    Point of every seed --of(lr, place, lag, loss)--> [Point, ...] --pooled(function)--> Estimate

A cosine is the ratio of means over seeds and not the mean of ratios, which noise in a denominator
would bias; its interval is that of the jackknife.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any, Final, TypeVar

from areal_lab.runlog.intervals import student_t
from reproductions.learning.gradients.bias_and_variance import Point
from simulator.stats.statistics import Estimate, estimate

_LEAST_NORM: Final = 1e-3
"""Of a squared norm that noise may have made negative, relative to the on-policy one."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Points:
    """All points of a study."""

    points: Sequence[Point]

    @property
    def rates(self) -> list[float]:
        """Learning rates, the largest first."""
        return sorted({point.lr for point in self.points}, reverse=True)

    @property
    def lags(self) -> list[int]:
        """Ascending."""
        return sorted({point.lag for point in self.points})

    @property
    def seeds(self) -> int:
        """How many."""
        return len({point.seed for point in self.points})

    def of(self, lr: float, place: str, lag: int, loss: str) -> list[Point]:
        """The points of a cell, by seed."""
        found = [
            point
            for point in self.points
            if (point.lr, point.place, point.lag, point.loss) == (lr, place, lag, loss)
        ]
        return sorted(found, key=lambda point: point.seed)

    def to_columns(self) -> dict[str, list[Any]]:
        """As JSON: one list for each field."""
        records = [point.to_json() for point in self.points]
        return {field.name: [one[field.name] for one in records] for field in fields(Point)}

    @classmethod
    def from_columns(cls, columns: Mapping[str, Sequence[Any]]) -> Points:
        """What `to_columns` wrote."""
        rows = zip(*columns.values(), strict=True)
        return cls([Point(**dict(zip(columns, row, strict=True))) for row in rows])


def mean_of(own: Sequence[Point], value: Callable[[Point], float]) -> Estimate:
    """Mean over seeds."""
    return estimate([value(point) for point in own])


def cosine(own: Sequence[Point]) -> Estimate:
    """Cosine of the mean gradient to the on-policy one, sampling noise removed; noise may take it
    beyond 1."""
    return jackknife(own, cosine_value)


def minibatch_cosine(own: Sequence[Point]) -> Estimate:
    """Of one minibatch: its part along the on-policy gradient over the root of its mean square."""
    return jackknife(own, minibatch_cosine_value)


def cosine_value(own: Sequence[Point]) -> float:
    """The cosine, from means over seeds."""
    return _ratio(own, lambda point: point.squared_norm)


def minibatch_cosine_value(own: Sequence[Point]) -> float:
    """The same of one minibatch."""
    return _ratio(own, lambda point: point.squared_norm + point.scale)


def gap(
    study: Points,
    cell: tuple[float, str],
    losses: tuple[str, str],
    value: Callable[[Sequence[Point]], float],
) -> Estimate:
    """First loss minus second, averaged over the lags above 0; both have the same samples.

    Args:
        cell: learning rate and place.
        value: of points of several seeds.
    """
    lags = [lag for lag in study.lags if lag > 0]
    one, other = ([study.of(*cell, lag, loss) for lag in lags] for loss in losses)

    def mean_gap(seeds: Sequence[int]) -> float:
        def of(by_lag: list[list[Point]]) -> float:
            return fmean(value([own[seed] for seed in seeds]) for own in by_lag)

        return of(one) - of(other)

    return jackknife(range(study.seeds), mean_gap)


def jackknife(items: Sequence[T], statistic: Callable[[Sequence[T]], float]) -> Estimate:
    """A statistic of all items, with the 95 % interval from leaving each out.

    Source: Efron and Tibshirani, An introduction to the bootstrap (1993), chapter 11.
    """
    value, count = statistic(items), len(items)
    if count == 1:
        return Estimate(value, -math.inf, math.inf)
    left = [statistic([*items[:out], *items[out + 1 :]]) for out in range(count)]
    middle = fmean(left)
    variance = (count - 1) / count * math.fsum((one - middle) ** 2 for one in left)
    half = student_t(count - 1) * math.sqrt(variance)
    return Estimate(value, value - half, value + half)


def _ratio(own: Sequence[Point], square: Callable[[Point], float]) -> float:
    mean_square = max(fmean(map(square, own)), _LEAST_NORM)
    return fmean(point.share for point in own) / math.sqrt(mean_square)
