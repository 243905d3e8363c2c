"""Means with 95 % intervals by Student's t, and running means; the standard library only."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev
from typing import TypeVar

CONFIDENCE = 0.95
_Pair = TypeVar("_Pair", bound=Hashable)


@dataclass(frozen=True, slots=True)
class MeanInterval:
    """A mean with its uncertainty."""

    mean: float
    n: int
    """Number of averaged problems, or runs."""
    ci95: float | None
    """Half width of a 95 % interval; None for a single one."""


def mean_interval(problem_means: Sequence[float]) -> MeanInterval:
    r"""Mean over problems and the half width of its 95 % Student t interval.

    $$ h = t_{0.975, n-1} \max(s / \sqrt{n}, 1 / n) $$

    Samples of one problem are correlated, so they are averaged first and n counts problems. Near a
    mean of 1 (or 0) all problem means agree and s is uninformative: the interval is then as wide as
    one problem with the opposite reward would make it, close to Wilson's. For rewards in [0, 1].
    """
    n = len(problem_means)
    if n == 0:
        raise ValueError("a mean over problems needs at least one problem")
    mean = fmean(problem_means)
    if n == 1:
        return MeanInterval(mean, n, None)
    standard_error = max(stdev(problem_means) / math.sqrt(n), 1 / n)
    return MeanInterval(mean, n, student_t(n - 1) * standard_error)


def interval_of_runs(values: Sequence[float]) -> MeanInterval:
    r"""Mean of independent runs, such as seeds, and the half width of its 95 % t interval.

    $$ h = t_{0.975, n-1}\, s / \sqrt{n} $$

    Two runs give a width of 9 s, three of 2.5 s, five of 1.2 s.
    """
    n = len(values)
    if n == 0:
        raise ValueError("a mean over runs needs at least one run")
    if n == 1:
        return MeanInterval(values[0], 1, None)
    return MeanInterval(fmean(values), n, student_t(n - 1) * stdev(values) / math.sqrt(n))


def paired_interval(
    values: Mapping[_Pair, float], baseline: Mapping[_Pair, float]
) -> MeanInterval | None:
    """Mean difference of paired runs, such as those with the same seed, with its interval.

    Runs with the same seed see the same problems in the same order, so their difference is more
    precise than the difference of two means. Runs without a partner are left out; None without any
    pair.
    """
    pairs = [value - baseline[one] for one, value in values.items() if one in baseline]
    return interval_of_runs(pairs) if pairs else None


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of the last `window` values at each place; of fewer at the beginning."""
    return [fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


@cache
def student_t(degrees: int, share: float = CONFIDENCE) -> float:
    """The t with P(|T| < t) = `share` for a Student variable T with this many degrees of freedom.

    Bisection on the distribution function, which has a closed form for whole degrees of freedom:
    Abramowitz and Stegun, Handbook of Mathematical Functions (1964), 26.7.3 and 26.7.4.
    """
    if degrees < 1:
        raise ValueError(f"degrees is {degrees}, but must be >= 1")
    if not 0 < share < 1:
        raise ValueError(f"share is {share}, but must be between 0 and 1")
    low, high = 0.0, math.pi / 2  # theta = atan(t / sqrt(degrees))
    for _ in range(60):
        middle = (low + high) / 2
        if _central_probability(middle, degrees) < share:
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
