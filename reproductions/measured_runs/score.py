"""Scores of predicted rows, each with an interval that contains the model's error.

    all predictions --residuals of other groups--> intervals of a row --> scores of all rows

A row that numbers were fitted to counts in no score and no residual.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias

from reproductions.measured_runs.families import MeasuredRuns
from reproductions.measured_runs.predict import Predicted
from simulator.run.result import SimulationResult
from simulator.stats.model_error import SHARE, Prediction, model_error, with_model_error

CLEAR_GAIN = 0.1
"""A measured gain that differs less from 1 has no sign to be right about."""
Residuals: TypeAlias = dict[str, list[float]]
"""ln(predicted / measured), by group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A measured number with its prediction."""

    measured: float
    predicted: Prediction

    @property
    def log_error(self) -> float:
        """ln(predicted / measured)."""
        return math.log(self.predicted.value / self.measured)

    @property
    def relative_error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted.value / self.measured - 1

    @property
    def covered(self) -> bool:
        """Whether the interval contains the measured number."""
        return self.predicted.contains(self.measured)

    @property
    def sign_is_right(self) -> bool | None:
        """Whether both say that asynchrony helps, or that it does not; None if that is unclear."""
        if abs(self.measured - 1) <= CLEAR_GAIN:
            return None
        return (self.measured > 1) == (self.predicted.value > 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A row: its step, and its gain over the synchronous row if it is asynchronous."""

    of: Predicted
    step_s: Number
    gain: Number | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Of all rows that nothing was fitted to."""

    gain_median: float
    """Of |ln(predicted / measured)|."""
    gain_largest: float
    signs: int
    """Gains that differ clearly from 1."""
    signs_right: int
    step_median: float
    """Of |predicted / measured - 1|."""
    step_largest: float
    gain_coverage: float
    """Share of gains within their interval."""
    step_coverage: float


def score(predicted: Sequence[Predicted], runs: MeasuredRuns) -> list[Scored]:
    """Every row with its intervals.

    Raises:
        ValueError: the rows are all of one group, so that no other tells the model's error.
    """
    baselines = {(one.family.id, one.row.id): one for one in predicted}

    def gain_of(one: Predicted) -> list[float]:
        baseline = baselines[one.family.id, one.family.baseline_of(one.row).id]
        return ratios(baseline, one, lambda result: result.step_s)

    free = [one for one in predicted if not one.is_fitted]
    steps = _residuals(
        (one, one.run.step_s.mean / runs.step_s(one.family, one.row)) for one in free
    )
    gains = _residuals(
        (one, _mean(gain_of(one)) / runs.gain(one.family, one.row))
        for one in free
        if one.row.mode == "asynchronous"
    )
    scored = []
    for one in predicted:
        group = one.family.group
        gain = None
        if one.row.mode == "asynchronous":
            gain = Number(
                measured=runs.gain(one.family, one.row),
                predicted=_interval(gain_of(one), gains, group),
            )
        values = [result.step_s for result in one.run.results]
        step_s = Number(
            measured=runs.step_s(one.family, one.row),
            predicted=_interval(values, steps, group),
        )
        scored.append(Scored(of=one, step_s=step_s, gain=gain))
    return scored


def summary(scored: Iterable[Scored]) -> Scores:
    """Scores of all rows that nothing was fitted to."""
    free = [one for one in scored if not one.of.is_fitted]
    gains = [one.gain for one in free if one.gain is not None]
    steps = [one.step_s for one in free]
    gain_errors = [abs(gain.log_error) for gain in gains]
    step_errors = [abs(step.relative_error) for step in steps]
    signs = [gain.sign_is_right for gain in gains if gain.sign_is_right is not None]
    return Scores(
        gain_median=median(gain_errors),
        gain_largest=max(gain_errors),
        signs=len(signs),
        signs_right=sum(signs),
        step_median=median(step_errors),
        step_largest=max(step_errors),
        gain_coverage=_mean([float(gain.covered) for gain in gains]),
        step_coverage=_mean([float(step.covered) for step in steps]),
    )


def ratios(
    above: Predicted, below: Predicted, value: Callable[[SimulationResult], float]
) -> list[float]:
    """One number of two rows, divided seed by seed."""
    pairs = zip(above.run.results, below.run.results, strict=True)
    return [value(one) / value(other) for one, other in pairs]


def _residuals(quotients: Iterable[tuple[Predicted, float]]) -> Residuals:
    found: Residuals = {}
    for one, quotient in quotients:
        found.setdefault(one.family.group, []).append(math.log(quotient))
    return found


def _interval(values: Sequence[float], residuals: Residuals, group: str) -> Prediction:
    """With the model's error on all other groups."""
    error = model_error(own for other, own in residuals.items() if other != group)
    return with_model_error(values, error, share=SHARE)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
