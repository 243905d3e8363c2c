r"""Intervals of lags: how far they move if generation is faster or slower beside training.

    shares of time --balance--> rho --closed form--> lag at rho / f and rho f --> interval

$$ \rho = \frac{\text{busy share of the trainer}}{\text{busy share of the engines}}, \quad
f = \exp(t_\nu \sqrt{2}\, s) $$

rho is samples that the engines could generate over samples that the trainer could take, and s the
known error of seconds per step. A step is as long as the slower of the two sides, so each is as
uncertain as a step; their errors count as independent. The lag moves as `mean_staleness_bounded`
does: little while the trainer waits, up to eta where it stops waiting. Where GPUs generate and
train in turn, and with one step of overlap, the schedule gives the lag, whatever the balance: the
interval is that of the seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

from areal_lab.capacity import mean_staleness_bounded
from areal_lab.control.schedule import OnNewWeights
from areal_lab.runlog.activity import NOTHING_ADMITTED, WAIT_BATCH
from simulator.assembly.build import limits_of
from simulator.assembly.engines import engines_of
from simulator.config.schema import SimulationConfig
from simulator.run.one_seed import in_closed_form
from simulator.stats.statistics import Estimate, ModelError, Prediction, estimate, prediction

Idle: TypeAlias = Mapping[str, Mapping[str, float]]
"""Idle shares of one seed by pool and cause."""
NUMBERS: Final = MappingProxyType({"mean": 0.0, "p95": 1.0})
"""Numbers of the lag of first tokens that have an interval, with versions that are added to their
moves in quadrature: a percentile is a whole number, and has no closed form. It moves as the mean,
and by up to one more where eq. 3 stops binding and lags spread."""


class Lag(NamedTuple):
    """A number of the lag of first tokens, in versions."""

    range: Prediction
    """With the 90 % interval, model's error included."""
    seeds: Estimate
    """Over the seeds alone."""


def lags_of(
    config: SimulationConfig,
    idle: Sequence[Idle],
    staleness: Sequence[Mapping[str, float]],
    error: ModelError,
) -> dict[str, Lag] | None:
    """`NUMBERS` with their intervals; None where no closed form says what moves the lag.

    Args:
        config: of the run, which is valid.
        idle: of each seed.
        staleness: of each seed (`SimulationResult.staleness`).
        error: of seconds per step.
    """
    mean = math.fsum(one["head_mean"] for one in staleness) / len(staleness)
    by_schedule = _by_schedule(config)
    ends = (mean, mean) if by_schedule else _ends(config, idle, error)
    if ends is None:
        return None
    moves = max(0.0, mean - ends[0]), max(0.0, ends[1] - mean)
    found = {}
    for name, whole in NUMBERS.items():
        seeds = estimate([one[f"head_{name}"] for one in staleness])
        half = seeds.half_width if math.isfinite(seeds.half_width) else 0.0
        low, high = (math.hypot(half, move, 0.0 if by_schedule else whole) for move in moves)
        value = seeds.mean
        found[name] = Lag(
            Prediction(value=value, low=max(0.0, value - low), high=value + high), seeds
        )
    return found


def balance(idle: Idle) -> float:
    """rho: samples that the engines could generate over those that the trainer could take."""
    trainer = 1 - idle["training"].get(WAIT_BATCH, 0.0)
    engines = 1 - idle["rollout"].get(NOTHING_ADMITTED, 0.0)
    return trainer / engines if min(trainer, engines) > 0 else 1.0


def _by_schedule(config: SimulationConfig) -> bool:
    """Return whether the lag is the same at any balance."""
    schedule = config.schedule.policy
    one_step = schedule.on_new_weights is OnNewWeights.FINISH_BATCH
    return config.cluster.colocated or not schedule.overlaps or one_step


def _ends(
    config: SimulationConfig, idle: Sequence[Idle], error: ModelError
) -> tuple[float, float] | None:
    """The mean lag in closed form with the slowest and the fastest engines beside the trainer."""
    schedule = config.schedule.policy
    limits = limits_of(config, ranks=2 if config.controller.kind == "spmd" else 1)
    scales = config.scaling.rule(config.scaling.startup_s) is not None
    if schedule.bound is not None or not in_closed_form(limits, changes=scales):
        return None
    in_flight = engines_of(config).prompts_in_flight

    def lag(rho: float) -> float:
        return mean_staleness_bounded(
            in_flight=in_flight,
            batch_size=limits.batch_groups,
            eta=schedule.eta,
            rate_ratio=rho,
        ).lag

    rho = math.exp(math.fsum(math.log(balance(one)) for one in idle) / len(idle))
    of_both = ModelError(spread=math.sqrt(2) * error.spread, groups=error.groups)
    factor = prediction([1.0], of_both).factor
    return lag(rho / factor), lag(rho * factor)


def lag_span(low: float, high: float) -> str:
    """An interval of lags, such as `1.35 to 4`."""
    return " to ".join(f"{end:.2f}".rstrip("0").rstrip(".") for end in (low, high))
