"""What holds a candidate up, from where the time of its GPUs went.

Trials (one per seed) --> shares of the pools --> limit
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from areal_lab.control.activity import (
    LOST,
    NOTHING_ADMITTED,
    ON_ITS_WAY,
    PAUSED,
    WAIT_BATCH,
    WAIT_REWARDS,
    WAIT_WEIGHTS,
)
from simulator.plan_trial import Trial
from simulator.pools import GENERATE, MOVING_WEIGHTS

TRAIN_BOUND: Final = "train-bound"
GENERATION_BOUND: Final = "generation-bound"
STALENESS_BOUND: Final = "staleness-bound"
WEIGHT_UPDATES: Final = "weight updates"
REWARDS_AND_TOOLS: Final = "rewards and tools"
FAILURES: Final = "failures"

_GENERATING: Final = ("decode", "prefill", "recompute", GENERATE)
_FULL: Final = 0.9
"""Share of its time from which the trainer counts as always busy."""
_WAITING: Final = 0.1
"""Share of the engines' time from which their waiting, not their speed, limits."""
_CAUSES: Final[Mapping[str, str]] = {
    NOTHING_ADMITTED: STALENESS_BOUND,
    PAUSED: WEIGHT_UPDATES,
    WAIT_WEIGHTS: WEIGHT_UPDATES,
    WAIT_REWARDS: REWARDS_AND_TOOLS,
    ON_ITS_WAY: REWARDS_AND_TOOLS,
    LOST: FAILURES,
}


def limit_of(trials: Sequence[Trial]) -> str:
    """What holds a candidate up, from where its pools' time went, mean over the seeds.

    train-bound       the trainer works 90 % of the time or more
    weight updates    it does not, and waits for them longer than for batches
    staleness-bound   it waits for batches, and engines wait 10 % or more: for new weights to start
                      more answers. Synchronous schedules are, where neither side fills the time
    generation-bound  it waits for batches, and engines hardly wait

    Where the same GPUs do both, it is what takes the largest part of their time.
    """
    if "all" in trials[0].busy:
        return _largest_part(trials)
    training, engines = _mean_shares(trials, "training"), _mean_shares(trials, "rollout")
    updating = sum(training.get(name, 0.0) for name in (*MOVING_WEIGHTS, WAIT_WEIGHTS))
    waiting = training.get(WAIT_BATCH, 0.0)
    if 1 - updating - waiting >= _FULL:
        return TRAIN_BOUND
    if updating > waiting:
        return WEIGHT_UPDATES
    idle = _by_limit(engines)
    limit = max(idle, key=lambda name: idle[name])
    return limit if idle[limit] >= _WAITING else GENERATION_BOUND


def trainer_share(trials: Sequence[Trial]) -> float:
    """Share of the time in which GPUs that train do so."""
    pool = "all" if "all" in trials[0].busy else "training"
    busy = [
        sum(
            share
            for name, share in trial.busy[pool].items()
            if name not in MOVING_WEIGHTS and name not in _GENERATING
        )
        for trial in trials
    ]
    return sum(busy) / len(busy)


def engine_share(trials: Sequence[Trial]) -> float:
    """Share of the time in which GPUs that generate do so."""
    pool = "all" if "all" in trials[0].busy else "rollout"
    busy = [sum(trial.busy[pool].get(name, 0.0) for name in _GENERATING) for trial in trials]
    return sum(busy) / len(busy)


def _largest_part(trials: Sequence[Trial]) -> str:
    shares = _mean_shares(trials, "all")
    generating = sum(shares.get(name, 0.0) for name in _GENERATING)
    idle = _by_limit(shares)
    moving = sum(shares.get(name, 0.0) for name in MOVING_WEIGHTS)
    training = 1 - generating - moving - sum(idle.values())
    parts = dict(idle)
    parts[WEIGHT_UPDATES] += moving
    parts[GENERATION_BOUND] = generating
    parts[TRAIN_BOUND] = training
    return max(parts, key=lambda name: parts[name])


def _by_limit(shares: Mapping[str, float]) -> dict[str, float]:
    """Idle shares added up by what stands behind them."""
    idle = dict.fromkeys(_CAUSES.values(), 0.0)
    for cause, limit in _CAUSES.items():
        idle[limit] += shares.get(cause, 0.0)
    return idle


def _mean_shares(trials: Sequence[Trial], pool: str) -> dict[str, float]:
    """Busy and idle shares of a pool by name, mean over the seeds."""
    shares: dict[str, float] = {}
    for trial in trials:
        for name, share in (*trial.busy[pool].items(), *trial.idle[pool].items()):
            shares[name] = shares.get(name, 0.0) + share / len(trials)
    return shares
