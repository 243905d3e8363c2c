"""Means with their 95 % intervals, from independent repetitions of one simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

CONFIDENCE = 0.95


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


@cache
def student_t(degrees: int) -> float:
    """The t that a Student variable of so many degrees of freedom exceeds, in size, in 5 of 100.

    Bisection on the distribution function, which has a closed form for whole degrees of freedom:
    Abramowitz and Stegun, Handbook of Mathematical Functions (1964), 26.7.3 and 26.7.4.

    Raises:
        ValueError: if there is no degree of freedom.
    """
    if degrees < 1:
        raise ValueError(f"degrees is {degrees}, but must be >= 1")
    low, high = 0.0, math.pi / 2  # theta = atan(t / sqrt(degrees))
    for _ in range(60):
        middle = (low + high) / 2
        if _central_probability(middle, degrees) < CONFIDENCE:
            low = middle
        else:
            high = middle
    return math.tan((low + high) / 2) * math.sqrt(degrees)


def _central_probability(theta: float, degrees: int) -> float:
    """Probability of |T| < tan(theta) sqrt(degrees)."""
    cosine, odd = math.cos(theta), degrees % 2
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(odd, degrees - 1, 2):
        total += term
        term *= cosine * cosine * (power + 1) / (power + 2)
    if odd:
        return 2 / math.pi * (theta + math.sin(theta) * total)
    return math.sin(theta) * total
