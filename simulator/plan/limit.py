"""What holds a candidate up, and how busy its sides are, in the mean over its seeds.

Trials (one per seed) --> shares of the pools --> limit
"""

from __future__ import annotations

from collections.abc import Sequence

from simulator.plan.trial import Trial
from simulator.report.bottleneck import GENERATING, bottleneck
from simulator.run.pools import MOVING_WEIGHTS


def limit_of(trials: Sequence[Trial]) -> str:
    """What `simulator.report.bottleneck` says of the mean over the seeds."""
    return bottleneck({pool: _mean_shares(trials, pool) for pool in trials[0].busy})


def trainer_share(trials: Sequence[Trial]) -> float:
    """Share of the time in which GPUs that train do so."""
    pool = "all" if "all" in trials[0].busy else "training"
    busy = [
        sum(
            share
            for name, share in trial.busy[pool].items()
            if name not in MOVING_WEIGHTS and name not in GENERATING
        )
        for trial in trials
    ]
    return sum(busy) / len(busy)


def engine_share(trials: Sequence[Trial]) -> float:
    """Share of the time in which GPUs that generate do so."""
    pool = "all" if "all" in trials[0].busy else "rollout"
    busy = [sum(trial.busy[pool].get(name, 0.0) for name in GENERATING) for trial in trials]
    return sum(busy) / len(busy)


def _mean_shares(trials: Sequence[Trial], pool: str) -> dict[str, float]:
    """Busy and idle shares of a pool by name, mean over the seeds."""
    shares: dict[str, float] = {}
    for trial in trials:
        for name, share in (*trial.busy[pool].items(), *trial.idle[pool].items()):
            shares[name] = shares.get(name, 0.0) + share / len(trials)
    return shares
