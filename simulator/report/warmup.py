"""Whether averages are of a pipeline that has filled, or that still runs ahead further and further.

versions ahead      ____________ eta, or as far as the engines can keep ahead
                   /
                 /
warm-up ..... |/....... averages ....... |     too early: lags come out too small
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from simulator.config.schema import SimulationConfig
from simulator.run.result import SimulationResult

_CLEARLY: Final = 3.0
"""Standard errors by which the second half of the measured steps must be older than the first."""
_WORTH: Final = 0.1
"""Growth of the lag, relative, from which it is worth a word."""
_LEAST_STEPS: Final = 4
"""Measured steps from which two halves can be compared."""


def filling_warnings(
    config: SimulationConfig, results: Sequence[SimulationResult]
) -> Iterator[str]:
    """A line if the steps of warm-up are too few.

    None for runs that are simulated whole, and none without a bound: such a pipeline never fills.
    """
    workload, eta = config.workload, config.schedule.versions_ahead
    if workload.whole_run or math.isinf(eta):
        return
    if growth := _growth(results):
        if workload.answers.drift_per_step == 0:
            first, second = growth
            yield (
                f"lags still grow after the {workload.warmup_steps} steps of warm-up (first token: "
                f"{first:.2f} versions in the first half of the measured steps, {second:.2f} in "
                "the second), so that averages are of a pipeline that fills; raise "
                "workload.warmup_steps and workload.steps"
            )
    elif workload.warmup_steps < eta + 1:
        yield (
            f"workload.warmup_steps is {workload.warmup_steps}, but a pipeline that may run "
            f"{eta:g} versions ahead needs {math.ceil(eta) + 1} steps or more to do so, and lags "
            f"may come out too small; raise warmup_steps and steps"
        )


def _growth(results: Sequence[SimulationResult]) -> tuple[float, float] | None:
    """Lag of first tokens in either half of the measured steps, if the second is clearly older."""
    lags = np.mean([one.columns["head_lag"][one.warmup_steps :] for one in results], axis=0)
    if len(lags) < _LEAST_STEPS:
        return None
    halves = np.array_split(lags, 2)
    first, second = (float(half.mean()) for half in halves)
    error = math.sqrt(sum(float(half.var()) / len(half) for half in halves))
    grows = second - first > max(_CLEARLY * error, _WORTH * second)
    return (first, second) if grows else None
