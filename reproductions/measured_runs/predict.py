"""Predict a family: fit its numbers to the synchronous row, then simulate every row.

    settings of family <- of row <- fitted numbers --simulate--> Predicted (a run per row)

What systems share is in the cost model, from published measurements of its terms; nothing is fitted
to several families.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from reproductions.measured_runs.families import (
    PARTS,
    Family,
    Fit,
    Measured,
    MeasuredRuns,
    Settings,
)
from reproductions.measured_runs.parts import part
from simulator.assembly.simulate import replicate
from simulator.config.load import load_simulation
from simulator.config.schema import SimulationConfig
from simulator.run.result import Replicated

TOLERANCE = 1e-3
"""Largest |ln(simulated / measured)| of a fitted part."""
MOST_TRIALS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is simulated."""

    seeds: int
    overrides: Settings
    """Steps and warm-up of a quick run; empty takes those of the rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What the runs of a family share."""

    family: Family
    sizes: Sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A number that was fitted, or the end of its range that comes nearest."""

    fit: Fit
    value: float
    reached: bool
    """Whether the part is as long as measured; False at the end of the range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """A row with its simulation."""

    family: Family
    row: Measured
    run: Replicated
    fitted: Sequence[Fitted]

    @property
    def is_fitted(self) -> bool:
        """Whether the step or a part of it was fitted to this row, and all of it was reached."""
        if self.row is not self.family.synchronous or not self.fitted:
            return False
        return all(one.reached for one in self.fitted)

    @property
    def step_is_fitted(self) -> bool:
        """Whether the whole step was, and not only parts of it."""
        return self.is_fitted and any(one.fit.part == "step" for one in self.fitted)


def predict(family: Family, runs: MeasuredRuns, sizes: Sizes) -> list[Predicted]:
    """All rows of a family, the fitted one first.

    Raises:
        ValueError: a row cannot be simulated with its settings.
    """
    context = Context(family=family, sizes=sizes)
    fitted: list[Fitted] = []
    for fit in family.fits:
        fitted.append(_solve(fit, context, fitted, _target_s(fit, family, runs)))
    return [
        Predicted(family=family, row=row, run=_simulate(row, context, fitted), fitted=fitted)
        for row in family.rows
    ]


def configured(row: Measured, context: Context, fitted: Sequence[Fitted]) -> SimulationConfig:
    """The config of a row: later settings replace earlier ones."""
    settings = {
        "name": row.id,
        "seeds": context.sizes.seeds,
        **context.family.settings,
        **row.settings,
        **context.sizes.overrides,
        **{one.fit.setting: one.value for one in fitted if one.fit.mode in ("", row.mode)},
    }
    return load_simulation(None, settings)


def _simulate(row: Measured, context: Context, fitted: Sequence[Fitted]) -> Replicated:
    return replicate(configured(row, context, fitted), processes=1)


def _solve(fit: Fit, context: Context, before: Sequence[Fitted], measured_s: float) -> Fitted:
    """The number with which the synchronous row's part is as long as measured."""

    def gap(value: float) -> float:
        tried = [*before, Fitted(fit=fit, value=value, reached=True)]
        run = _simulate(context.family.synchronous, context, tried)
        return math.log(run.estimate(part(fit.part)).mean / measured_s)

    return _root(fit, gap)


def _root(fit: Fit, gap: Callable[[float], float]) -> Fitted:
    """Where the gap is 0, between the ends of the range; by the Illinois rule on ln(value).

    Source: Dowell and Jarratt, BIT 11 (1971), a secant that keeps the root between its ends.
    """
    ends = [math.log(fit.low), math.log(fit.high)]
    gaps = [gap(fit.low), gap(fit.high)]
    if gaps[0] * gaps[1] > 0:
        nearest = min((0, 1), key=lambda end: abs(gaps[end]))
        return Fitted(fit=fit, value=math.exp(ends[nearest]), reached=False)
    kept = None
    middle = ends[0]
    for _ in range(MOST_TRIALS):
        middle = (ends[0] * gaps[1] - ends[1] * gaps[0]) / (gaps[1] - gaps[0])
        found = gap(math.exp(middle))
        if abs(found) < TOLERANCE:
            break
        replaced = 0 if found * gaps[0] > 0 else 1
        ends[replaced], gaps[replaced] = middle, found
        if kept == 1 - replaced:
            gaps[kept] /= 2
        kept = 1 - replaced
    return Fitted(fit=fit, value=math.exp(middle), reached=True)


def _target_s(fit: Fit, family: Family, runs: MeasuredRuns) -> float:
    if fit.part == "step":
        return runs.step_s(family, family.synchronous)
    return family.synchronous.measured[PARTS[fit.part]]


def measured_parts(row: Measured) -> Mapping[str, float]:
    """Printed seconds of a row's parts, by part."""
    return {name: row.measured[of] for name, of in PARTS.items() if of in row.measured}
