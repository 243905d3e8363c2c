"""What holds a run up, from where the time of its GPUs went.

shares of each pool's time, busy and idle by name --> limit
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from areal_lab.runlog.activity import (
    LOST,
    NOTHING_ADMITTED,
    ON_ITS_WAY,
    PAUSED,
    WAIT_BATCH,
    WAIT_REWARDS,
    WAIT_WEIGHTS,
)
from simulator.run.pools import GENERATE, MOVING_WEIGHTS

TRAIN_BOUND: Final = "train-bound"
GENERATION_BOUND: Final = "generation-bound"
STALENESS_BOUND: Final = "staleness-bound"
WEIGHT_UPDATES: Final = "weight updates"
REWARDS_AND_TOOLS: Final = "rewards and tools"
FAILURES: Final = "failures"

GENERATING: Final = ("decode", "prefill", "recompute", GENERATE)
"""What engines do that is generation."""
_FULL: Final = 0.9
"""Share of its time from which the trainer counts as always busy."""
WAITING: Final = 0.1
"""Share of the engines' time from which their waiting, not their speed, limits."""
CAUSES: Final[Mapping[str, str]] = {
    NOTHING_ADMITTED: STALENESS_BOUND,
    PAUSED: WEIGHT_UPDATES,
    WAIT_WEIGHTS: WEIGHT_UPDATES,
    WAIT_REWARDS: REWARDS_AND_TOOLS,
    ON_ITS_WAY: REWARDS_AND_TOOLS,
    LOST: FAILURES,
}
"""What stands behind each cause of idleness."""


def bottleneck(shares: Mapping[str, Mapping[str, float]]) -> str:
    """What holds a run up, from where its pools' time went.

    train-bound       the trainer works 90 % of the time or more
    weight updates    it does not, and waits for them longer than for batches
    failures          it does not, and loses more time to them than to either
    staleness-bound   it waits for batches, and engines wait 10 % or more: for new weights to start
                      more answers. Synchronous schedules are, where neither side fills the time
    generation-bound  it waits for batches, and engines hardly wait

    What engines wait for longest counts: rewards and tools, updates and failures can be it, too.
    Where the same GPUs do both, it is what takes the largest part of their time.

    Args:
        shares: of the time of each pool (`rollout` and `training`, or `all`) by what was done and
            by cause of idleness.
    """
    if "all" in shares:
        parts = largest_parts(shares["all"])
        return max(parts, key=lambda name: parts[name])
    training = shares["training"]
    if working(training) >= _FULL:
        return TRAIN_BOUND
    kept = {
        WEIGHT_UPDATES: updating(training),
        FAILURES: training.get(LOST, 0.0),
        WAIT_BATCH: training.get(WAIT_BATCH, 0.0),
    }
    longest = max((WAIT_BATCH, WEIGHT_UPDATES, FAILURES), key=lambda name: kept[name])
    if longest != WAIT_BATCH:
        return longest
    idle = _by_limit(shares["rollout"])
    limit = max(idle, key=lambda name: idle[name])
    return limit if idle[limit] >= WAITING else GENERATION_BOUND


def updating(training: Mapping[str, float]) -> float:
    """Share of the trainer's time that weights take: to export them and to wait for them."""
    return sum(training.get(name, 0.0) for name in (*MOVING_WEIGHTS, WAIT_WEIGHTS))


def working(training: Mapping[str, float]) -> float:
    """Share of the trainer's time that no wait, no failure and no weights take."""
    kept = training.get(WAIT_BATCH, 0.0) + training.get(LOST, 0.0)
    return 1 - updating(training) - kept


def largest_parts(shares: Mapping[str, float]) -> dict[str, float]:
    """Time of GPUs that generate and train in turn, by the limit that it stands for."""
    generating = sum(shares.get(name, 0.0) for name in GENERATING)
    parts = _by_limit(shares)
    moving = sum(shares.get(name, 0.0) for name in MOVING_WEIGHTS)
    training = 1 - generating - moving - sum(parts.values())
    parts[WEIGHT_UPDATES] += moving
    parts[GENERATION_BOUND] = generating
    parts[TRAIN_BOUND] = training
    return parts


def _by_limit(shares: Mapping[str, float]) -> dict[str, float]:
    """Idle shares added up by what stands behind them."""
    idle = dict.fromkeys(CAUSES.values(), 0.0)
    for cause, limit in CAUSES.items():
        idle[limit] += shares.get(cause, 0.0)
    return idle
