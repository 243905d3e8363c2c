"""Means with 95 % intervals over seeds, and intervals that include the model's own error.

Variance between and within groups, by analysis of variance (Fisher 1925).

value = group's mean + spread within the group        variance: between + within

correlation of two values of a group = between / (between + within)

Intervals that contain the model's own error, besides the randomness of the seeds.

    ln(predicted / measured) of other systems --model_error--> spread, groups
    one prediction, a value per seed          --with_model_error--> value, low, high
                                              --prediction--> the same, as it is shown to people

An interval over seeds says how well the simulated mean is known, and nothing of the difference
between a simulation and a cluster. That difference is estimated from predictions of other systems
that were measured, and is taken as log-normal around no error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
        """The interval as JSON output has it."""
        return {"mean": self.mean, "low": self.low, "high": self.high}


def estimate(values: Sequence[float]) -> Estimate:
    """Mean of independent values with Student's interval, `mean +- t s / sqrt(n)`.

    One value says nothing of its spread: its interval is infinite.

    Raises:
        ValueError: if there is no value.
    """
    values = list(values)  # an array has no truth value
    if not values:
        raise ValueError("no values to average; at least one was expected")
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, -math.inf, math.inf)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    half = student_t(count - 1) * math.sqrt(variance / count)
    return Estimate(mean, mean - half, mean + half)


def log_estimate(values: Sequence[float]) -> Estimate:
    """Mean of independent values > 0 with Student's interval of ln(value), a factor either way.

    The low end is above 0 however few and noisy the values are. One value says nothing of its
    spread: its interval is from 0 to infinity.

    Raises:
        ValueError: if there is no value, or one that is not above 0.
    """
    found = with_model_error(values, ModelError(spread=0.0, groups=1), share=0.95)
    return Estimate(found.value, found.low, found.high)


_RESAMPLED: Final = 1000
_AT_ONCE: Final = 1_000_000
"""Numbers of one block of resampling, which bounds its memory."""

Floats = NDArray[np.float64]


class Components(NamedTuple):
    """Components of variance; arrays if they are of many resamples."""

    between: Floats | float
    within: Floats | float

    @property
    def correlation(self) -> Floats | float:
        """Correlation of two values of one group, 0 to 1; nan if nothing varies."""
        with np.errstate(invalid="ignore"):
            return np.divide(self.between, np.add(self.between, self.within))


def components(counts: Floats, means: Floats, spreads: Floats) -> Components:
    r"""Components from the values' count, mean and standard deviation (ddof 1) in each group.

    $$ W = \frac{\sum (n_i - 1) s_i^2}{N - g}, \quad
    B = \frac{\sum n_i (m_i - m)^2}{g - 1}, \quad
    \sigma_{between}^2 = \frac{B - W}{n_0}, \quad
    n_0 = \frac{N - \sum n_i^2 / N}{g - 1} $$

    Args:
        counts: [..., groups] values in each group; those with one value have no spread.
        means: [..., groups].
        spreads: [..., groups]; ignored where the count is 1.
    """
    total, groups = counts.sum(axis=-1), counts.shape[-1]
    inside = np.where(counts > 1, (counts - 1) * spreads**2, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):  # nan if all groups have one value
        within = inside.sum(axis=-1) / (total - groups)
    middle = (counts * means).sum(axis=-1) / total
    squares = (counts * (means - middle[..., None]) ** 2).sum(axis=-1) / (groups - 1)
    size = (total - (counts**2).sum(axis=-1) / total) / (groups - 1)
    return Components(np.maximum(0.0, (squares - within) / size), within)


def summaries(groups: Sequence[Sequence[float]]) -> tuple[Floats, Floats, Floats]:
    """Count, mean and standard deviation of each group."""
    arrays = [np.asarray(group, np.float64) for group in groups]
    counts = np.array([len(one) for one in arrays], np.float64)
    means = np.array([one.mean() for one in arrays])
    spreads = np.array([one.std(ddof=1) if len(one) > 1 else 0.0 for one in arrays])
    return counts, means, spreads


def correlation_interval(counts: Floats, means: Floats, spreads: Floats) -> tuple[float, float]:
    """95 % interval of the correlation, from resampled groups (bootstrap, seed 1)."""
    generator, groups, found = np.random.default_rng(1), len(counts), []
    block = max(1, min(_RESAMPLED, _AT_ONCE // groups))
    for first in range(0, _RESAMPLED, block):
        chosen = generator.integers(0, groups, (min(block, _RESAMPLED - first), groups))
        found.append(components(counts[chosen], means[chosen], spreads[chosen]).correlation)
    low, high = np.nanquantile(np.concatenate(found), [0.025, 0.975]).tolist()
    return low, high


SHARE = 0.9
"""Share of measured values that an interval should contain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelError:
    """Error of predictions of systems that nothing was fitted to."""

    spread: float
    """Root mean square of ln(predicted / measured): 0.2 is a factor of 1.2 either way."""
    groups: int
    """Groups (system, model, GPU) that it was estimated from."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.spread) or self.spread < 0:
            raise ValueError(f"spread is {self.spread}, but must be >= 0 and finite")
        if self.groups < 1:
            raise ValueError(f"groups is {self.groups}, but must be >= 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A predicted value with the interval that should contain the measured one."""

    value: float
    low: float
    high: float

    def contains(self, measured: float) -> bool:
        """Return whether a measured value is within the interval."""
        return self.low <= measured <= self.high

    @property
    def factor(self) -> float:
        """Factor by which the measured value may be higher, or lower, at the interval's ends."""
        return self.high / self.value

    def times(self, factor: float) -> Prediction:
        """A multiple, of a factor >= 0."""
        return Prediction(value=self.value * factor, low=self.low * factor, high=self.high * factor)


def model_error(residuals: Iterable[Sequence[float]]) -> ModelError:
    r"""Spread of the model's error, from its residuals on measured systems.

    $$ s^2 = \frac{1}{G} \sum_g \frac{1}{n_g} \sum_{i=1}^{n_g} r_{gi}^2, \quad
    r = \ln(\text{predicted} / \text{measured}) $$

    Rows of one system share their errors, so each group counts once, however many rows it has. The
    mean is not subtracted: a bias of other systems is an error to expect, not one to correct.

    Args:
        residuals: ln(predicted / measured), a sequence per group; empty groups are left out.
    """
    squares = [math.fsum(r * r for r in group) / len(group) for group in residuals if group]
    if not squares:
        raise ValueError("no residual; the model's error needs at least one measured system")
    return ModelError(spread=math.sqrt(math.fsum(squares) / len(squares)), groups=len(squares))


def with_model_error(
    values: Sequence[float], error: ModelError, *, share: float = SHARE
) -> Prediction:
    r"""The mean of `values`, and the interval that contains a measured value in `share` of cases.

    $$ \ln m \pm t_\nu \sqrt{s^2 + v}, \quad
    \nu = \frac{(s^2 + v)^2}{s^4 / G + v^2 / (n - 1)} $$

    with the model's spread s from G groups, and the variance v of the mean of ln(value) over n
    seeds (Welch, Biometrika 34, 1947, for two variances that are estimated separately). With s = 0
    it is the interval over seeds, with equal values that of the model.

    Args:
        values: the predicted number of each seed, all > 0.
        error: of the model, from other systems.
        share: of measured values that the interval should contain.
    """
    if not values:
        raise ValueError("no values to average; at least one was expected")
    if min(values) <= 0:
        raise ValueError(f"a predicted value is {min(values)}, but must be > 0")
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Prediction(value=mean, low=0.0, high=math.inf)
    logs = [math.log(value) for value in values]
    center = math.fsum(logs) / count
    of_model = error.spread**2
    of_seeds = math.fsum((one - center) ** 2 for one in logs) / (count - 1) / count
    total = of_model + of_seeds
    if total == 0:
        return Prediction(value=mean, low=mean, high=mean)
    # By shares of the total: the square of a small variance would be 0.
    model_share, seeds_share = of_model / total, of_seeds / total
    degrees = 1 / (model_share**2 / error.groups + seeds_share**2 / (count - 1))
    half = student_t(max(1, math.floor(degrees + 1e-9)), share) * math.sqrt(total)
    return Prediction(value=mean, low=mean * math.exp(-half), high=mean * math.exp(half))


def prediction(values: Sequence[float], error: ModelError, *, share: float = SHARE) -> Prediction:
    """The mean of `values` with the interval that is shown: a factor either way.

    The half-widths over the seeds alone and of the model alone are added in quadrature, as
    logarithms. So it grows with both, which `with_model_error` does not: there, a small error of
    the model adds degrees of freedom to few noisy seeds. One value has the interval of the model's
    error alone, for the seeds' is unknown.

    Args:
        values: the predicted number of each seed, all > 0.
        error: of the model, from other systems.
        share: of measured values that the interval should contain.
    """
    several = list(values) * 2 if len(values) == 1 else values
    seeds = with_model_error(several, ModelError(spread=0.0, groups=1), share=share)
    model = with_model_error([1.0, 1.0], error, share=share)
    half = math.hypot(math.log(seeds.factor), math.log(model.factor))
    mean = seeds.value
    return Prediction(value=mean, low=mean * math.exp(-half), high=mean * math.exp(half))
