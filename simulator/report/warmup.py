"""Check that the warm-up is long enough for the lags to become stationary.

versions ahead      ____________ eta, or the limit of the engines
                   /
                 /
warm-up ..... |/....... averages ....... |     too early: averages underestimate lags
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from simulator.config.schema import SimulationConfig
from simulator.run.result import SimulationResult

_CLEARLY: Final = 3.0
"""Standard errors by which the lag of the second half of the steps must exceed the first's."""
_WORTH: Final = 0.1
"""Relative growth of the lag from which there is a warning."""
_LEAST_STEPS: Final = 4
"""Fewest steps of which two halves can be compared."""


def warmup_warnings(config: SimulationConfig, results: Sequence[SimulationResult]) -> Iterator[str]:
    """One line if the warm-up has too few steps.

    No warning for whole runs, nor without a staleness bound, where lags never become stationary.
    """
    workload, eta = config.workload, config.schedule.versions_ahead
    if workload.whole_run or math.isinf(eta):
        return
    if growth := _growth(results):
        if workload.answers.drift_per_step == 0:
            first, second = growth
            yield (
                f"lags still grow after the {workload.warmup_steps} steps of warm-up (first token: "
                f"{first:.2f} versions in the first half of the averaged steps, {second:.2f} in "
                "the second), so averages are too small; raise workload.warmup_steps and "
                "workload.steps"
            )
    elif workload.warmup_steps < eta + 1:
        yield (
            f"workload.warmup_steps is {workload.warmup_steps}, but should be >= "
            f"{math.ceil(eta) + 1}, because it takes that many steps to run {eta:g} versions "
            f"ahead; otherwise lags may be too small; raise warmup_steps and steps"
        )


def _growth(results: Sequence[SimulationResult]) -> tuple[float, float] | None:
    """Lag of first tokens in each half of the averaged steps, if the second is clearly larger."""
    lags = np.mean([one.columns["head_lag"][one.warmup_steps :] for one in results], axis=0)
    if len(lags) < _LEAST_STEPS:
        return None
    halves = np.array_split(lags, 2)
    first, second = (float(half.mean()) for half in halves)
    error = math.sqrt(sum(float(half.var()) / len(half) for half in halves))
    grows = second - first > max(_CLEARLY * error, _WORTH * second)
    return (first, second) if grows else None
