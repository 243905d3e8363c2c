"""Means with their 95 % intervals, from independent repetitions of one simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from areal_lab.runlog.intervals import student_t


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and the interval that holds the true one in 95 of 100 studies."""

    mean: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Distance from the mean to either end; infinite for a single repetition."""
        return (self.high - self.low) / 2

    def to_json(self) -> dict[str, float]:
        """As the output contract has it."""
        return {"mean": self.mean, "low": self.low, "high": self.high}


def estimate(values: Sequence[float]) -> Estimate:
    """Mean of independent values with Student's interval, `mean +- t s / sqrt(n)`.

    One value says nothing of its spread: its interval is infinite.

    Raises:
        ValueError: if there is no value.
    """
    if not values:
        raise ValueError("no values to average; at least one was expected")
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, -math.inf, math.inf)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    half = student_t(count - 1) * math.sqrt(variance / count)
    return Estimate(mean, mean - half, mean + half)
