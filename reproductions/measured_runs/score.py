"""Scores of predicted rows, each with an interval that contains the model's error.

    all predictions --residuals of other groups--> intervals of a row --> scores of all rows

A row that numbers were fitted to counts in no score and no residual.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType
from typing import Final, TypeAlias

from reproductions.measured_runs.families import MeasuredRuns
from reproductions.measured_runs.predict import Predicted
from simulator.config.load import load_simulation
from simulator.config.schema import SimulationConfig
from simulator.report.lags import Lag, lags_of
from simulator.report.measured_errors import (
    DRAFTS,
    LARGEST,
    STATES,
    Kind,
    Residual,
    kind_of,
    known_error,
)
from simulator.run.result import SimulationResult
from simulator.stats.statistics import Prediction, prediction

CLEAR_GAIN = 0.1
"""A measured gain that differs less from 1 has no sign to be right about."""
NEW_KINDS: Final[Mapping[str, Callable[[Predicted], bool]]] = MappingProxyType(
    {
        "GB200": lambda one: one.family.settings["cluster.gpu"] == "GB200",
        "layers with states": lambda one: STATES in _kind(one).parts,
        "drafted tokens": lambda one: DRAFTS in _kind(one).parts,
        "weights of more than 300 GB": lambda one: LARGEST in _kind(one).parts,
        "campaigns of 2026 (Miles, Marin)": lambda one: one.family.system in {"Miles", "Marin"},
    }
)
"""Kinds of runs that are left out whole: what intervals say of the first such run."""
_Known: TypeAlias = tuple[Predicted, Residual]


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


def score(
    predicted: Sequence[Predicted],
    runs: MeasuredRuns,
    unknown: Callable[[Predicted], bool] = lambda _: False,
) -> list[Scored]:
    """Every row with its intervals.

    Args:
        unknown: rows whose errors no interval knows, such as those of a new kind.

    Raises:
        ValueError: the rows are all of one group, so that no other tells the model's error.
    """
    baselines = {(one.family.id, one.row.id): one for one in predicted}

    def gain_of(one: Predicted) -> list[float]:
        baseline = baselines[one.family.id, one.family.baseline_of(one.row).id]
        return ratios(baseline, one, lambda result: result.step_s)

    free = [one for one in predicted if not one.is_fitted]
    steps = _step_residuals(free, runs)
    gains = [
        _residual(one, _mean(gain_of(one)) / runs.gain(one.family, one.row))
        for one in free
        if one.row.mode == "asynchronous"
    ]
    scored = []
    for one in predicted:
        gain = None
        if one.row.mode == "asynchronous":
            gain = Number(
                measured=runs.gain(one.family, one.row),
                predicted=_interval(gain_of(one), one, gains, unknown, ratio=True),
            )
        values = [result.step_s for result in one.run.results]
        step_s = Number(
            measured=runs.step_s(one.family, one.row),
            predicted=_interval(values, one, steps, unknown),
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


def left_out_whole(
    predicted: Sequence[Predicted], runs: MeasuredRuns
) -> list[dict[str, str | int]]:
    """How many steps and gains of each new kind are within intervals that know none of its rows."""
    found: list[dict[str, str | int]] = []
    for name, is_new in NEW_KINDS.items():
        if not any(map(is_new, predicted)) or all(map(is_new, predicted)):
            continue
        rows = [
            one for one in score(predicted, runs, is_new) if is_new(one.of) and not one.of.is_fitted
        ]
        gains = [one.gain for one in rows if one.gain is not None]
        found.append(
            {
                "kind": name,
                "steps": len(rows),
                "steps inside": sum(one.step_s.covered for one in rows),
                "gains": len(gains),
                "gains inside": sum(one.covered for one in gains),
            }
        )
    return found


def lags_with_error(
    of: Predicted, predicted: Sequence[Predicted], runs: MeasuredRuns
) -> dict[str, Lag] | None:
    """Simulated lags of a row with the model's error on all other groups; None without an interval
    (`simulator.report.lags`), or without another group."""
    free = [one for one in predicted if not one.is_fitted]
    known = [own for _, own in _step_residuals(free, runs) if own.group != of.family.group]
    if not known:
        return None
    results = of.run.results
    return lags_of(
        _config(of),
        [{name: pool.idle for name, pool in one.pools.items()} for one in results],
        [one.staleness() for one in results],
        known_error(_kind(of), known).error,
    )


def _config(one: Predicted) -> SimulationConfig:
    return load_simulation(None, {**one.family.settings, **one.row.settings})


def _kind(one: Predicted) -> Kind:
    return kind_of(_config(one))


def _step_residuals(free: Sequence[Predicted], runs: MeasuredRuns) -> list[_Known]:
    return [_residual(one, one.run.step_s.mean / runs.step_s(one.family, one.row)) for one in free]


def _residual(one: Predicted, quotient: float) -> _Known:
    fitted = tuple(each.fit.setting for each in one.fitted if each.fit.mode in ("", one.row.mode))
    return one, Residual(_kind(one), one.family.group, math.log(quotient), fitted)


def _interval(
    values: Sequence[float],
    of: Predicted,
    known: Sequence[_Known],
    unknown: Callable[[Predicted], bool],
    *,
    ratio: bool = False,
) -> Prediction:
    """With the model's error on all other groups."""
    group = of.family.group
    others = [own for one, own in known if own.group != group and not unknown(one)]
    if not others:
        raise ValueError(f"no row of another group than {group} tells the model's error")
    error = known_error(_kind(of), others, ratio=ratio).error
    return prediction(values, error)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
