"""Fit positive parameters: to many measured values by least squares, or one to one by its root."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
ROOT_TOLERANCE: Final = 1e-3
"""Largest |gap| of a root."""
_MOST_TRIALS: Final = 20
_NEAR_TRIALS: Final = 5


class Fit(NamedTuple):
    """Fitted parameters, and how well they do."""

    values: tuple[float, ...]
    relative_error: Values
    """Relative error of each point: predicted / measured - 1."""

    @property
    def error(self) -> float:
        """Mean absolute relative error."""
        return float(np.abs(self.relative_error).mean())


def fit_positive(
    predict: Callable[[Sequence[float]], Sequence[float] | Values],
    start: Sequence[float],
    measured: Sequence[float] | Values,
    *,
    tolerance: float = 1e-7,
    max_steps: int = 200,
) -> Fit:
    """Parameters whose predictions have the least squared relative error (Levenberg-Marquardt).

    The search is over logarithms: parameters stay positive, and their units do not matter. One
    that the points would have negative goes to almost zero.

    Args:
        predict: parameters to one prediction per point.
        start: first guess, > 0.
        measured: what is to be predicted, > 0.
        tolerance: stop when no parameter changes by more than this share.
        max_steps: maximum number of steps.
    """
    wanted = np.asarray(measured, np.float64)
    logs = np.log(_positive("start", start))
    _positive("measured", wanted)
    if wanted.size < logs.size:
        raise ValueError(
            f"{wanted.size} points cannot determine {logs.size} parameters; give at least as many"
        )

    def errors(at: Values) -> Values:
        return np.asarray(predict([float(one) for one in np.exp(at)]), np.float64) / wanted - 1

    now, damping, nudge = errors(logs), 1e-2, 1e-6
    for _ in range(max_steps):
        slopes = np.stack(
            [(errors(logs + nudge * one) - now) / nudge for one in np.eye(logs.size)], axis=1
        )
        curvature, downhill = slopes.T @ slopes, -slopes.T @ now
        while True:
            # The smallest number keeps a parameter without influence from dividing by zero.
            brake = np.diag(damping * np.diag(curvature) + 1e-14)
            step = np.clip(np.linalg.solve(curvature + brake, downhill), -1, 1)
            then = errors(logs + step)
            if then @ then <= now @ now or damping > 1e12:
                break
            damping *= 4
        if then @ then > now @ now:
            break
        logs, now, damping = logs + step, then, max(damping / 3, 1e-9)
        if np.abs(step).max() < tolerance:
            break
    return Fit(tuple(float(one) for one in np.exp(logs)), now)


def _positive(name: str, values: Sequence[float] | Values) -> Values:
    array = np.asarray(values, np.float64)
    if array.size == 0:
        raise ValueError(f"{name} is empty; there is nothing to fit")
    bad = array[~(np.isfinite(array) & (array > 0))]
    if bad.size:
        raise ValueError(f"{name} holds {bad[0]}, but every value must be finite and > 0")
    return array


class Root(NamedTuple):
    """The value at which a gap is 0, or the end of the range at which it is smallest."""

    value: float
    reached: bool
    """False at an end of the range."""


def positive_root(gap: Callable[[float], float], low: float, high: float) -> Root:
    """Find where a gap is 0 between `low` and `high`, both > 0.

    The search is over the logarithm, by the Illinois rule: a secant that keeps the root between its
    ends (Dowell and Jarratt, BIT 11, 1971). It stops at `ROOT_TOLERANCE`.

    Args:
        gap: value to gap, which grows or falls everywhere; such as ln(predicted / measured).
    """
    ends = [math.log(low), math.log(high)]
    gaps = [gap(low), gap(high)]
    if gaps[0] * gaps[1] > 0:
        nearest = min((0, 1), key=lambda end: abs(gaps[end]))
        return Root(math.exp(ends[nearest]), reached=False)
    kept = None
    middle = ends[0]
    for _ in range(_MOST_TRIALS):
        middle = (ends[0] * gaps[1] - ends[1] * gaps[0]) / (gaps[1] - gaps[0])
        found = gap(math.exp(middle))
        if abs(found) < ROOT_TOLERANCE:
            break
        replaced = 0 if found * gaps[0] > 0 else 1
        ends[replaced], gaps[replaced] = middle, found
        if kept == 1 - replaced:
            gaps[kept] /= 2
        kept = 1 - replaced
    return Root(math.exp(middle), reached=True)


def root_near(
    gap: Callable[[float], float],
    start: float,
    nearer: Callable[[float, float], float],
    low: float,
    high: float,
) -> Root:
    """Find where a gap is 0 with few trials, if its form is nearly known; else `positive_root`.

    Args:
        gap: as `positive_root`.
        start: first trial.
        nearer: from a trial and its gap, the value at which the gap would be 0 by the form.
        low: end of the range, > 0.
        high: other end.
    """
    tried = start
    for _ in range(_NEAR_TRIALS):
        found = gap(tried)
        if abs(found) < ROOT_TOLERANCE and low <= tried <= high:
            return Root(tried, reached=True)
        tried = nearer(tried, found)
        if not low <= tried <= high:
            break
    return positive_root(gap, low, high)
