"""Predict a family: fit its numbers to the synchronous row, then simulate every row.

    settings of family <- of row <- fitted numbers --simulate--> Predicted (a run per row)

What systems share is in the cost model, from published measurements of its terms; nothing is fitted
to several families.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reproductions.measured_runs.families import (
    PARTS,
    Family,
    Fit,
    Measured,
    MeasuredRuns,
    Settings,
)
from simulator.assembly.simulate import replicate
from simulator.config.load import load_simulation
from simulator.config.schema import SimulationConfig
from simulator.report.step_parts import part
from simulator.run.result import Replicated
from simulator.stats.least_squares import positive_root


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

    found = positive_root(gap, fit.low, fit.high)
    return Fitted(fit=fit, value=found.value, reached=found.reached)


def _target_s(fit: Fit, family: Family, runs: MeasuredRuns) -> float:
    if fit.part == "step":
        return runs.step_s(family, family.synchronous)
    return family.synchronous.measured[PARTS[fit.part]]


def measured_parts(row: Measured) -> Mapping[str, float]:
    """Printed seconds of a row's parts, by part."""
    return {name: row.measured[of] for name, of in PARTS.items() if of in row.measured}
