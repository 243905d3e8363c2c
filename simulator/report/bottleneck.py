"""Find the bottleneck of a run from the time of its GPUs by state.

shares of each pool's time, busy and idle by name --> bottleneck
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
    WAIT_CONTROLLER,
    WAIT_RANKS,
    WAIT_REWARDS,
    WAIT_WEIGHTS,
)
from simulator.run.controller import NOTHING_TO_HANDLE
from simulator.run.pools import CONTROLLER, GENERATE, MOVING_WEIGHTS, WAIT_HYBRID

TRAIN_BOUND: Final = "train-bound"
GENERATION_BOUND: Final = "generation-bound"
STALENESS_BOUND: Final = "staleness-bound"
WEIGHT_UPDATES: Final = "weight updates"
REWARDS_AND_TOOLS: Final = "rewards and tools"
FAILURES: Final = "failures"
CONTROLLER_BOUND: Final = "controller"
OTHER_RANKS: Final = "other ranks"

GENERATING: Final = ("decode", "prefill", "recompute", GENERATE)
"""Activities of engines that are generation."""
_FULL: Final = 0.9
"""Share of time from which the trainer counts as always busy."""
WAITING: Final = 0.1
"""Share of the engines' time from which waiting, not speed, is the bottleneck."""
CAUSES: Final[Mapping[str, str]] = {
    NOTHING_ADMITTED: STALENESS_BOUND,
    PAUSED: WEIGHT_UPDATES,
    WAIT_WEIGHTS: WEIGHT_UPDATES,
    WAIT_REWARDS: REWARDS_AND_TOOLS,
    ON_ITS_WAY: REWARDS_AND_TOOLS,
    LOST: FAILURES,
    WAIT_CONTROLLER: CONTROLLER_BOUND,
    WAIT_RANKS: OTHER_RANKS,
}
"""The bottleneck behind each cause of idleness."""


def bottleneck(shares: Mapping[str, Mapping[str, float]]) -> str:
    """The bottleneck of a run, from the shares of its pools' time.

    controller        the controller is busy 90 % of the time or more
    train-bound       else, the trainer works 90 % of the time or more
    weight updates    else, it waits for weights, or for hybrid GPUs, longer than for batches
    failures          else, it loses more time to failures than to either; so controller (for its
                      batch to be sent) and other ranks (SPMD: for theirs to be complete)
    staleness-bound   else, engines wait 10 % or more for new weights before they may start more
                      responses; also synchronous schedules in which neither side is always busy
    generation-bound  else, engines rarely wait

    If engines wait longer for rewards and tools, updates or failures, that is the bottleneck. If
    all GPUs that train also generate, it is the part that takes the largest share of their time.

    Args:
        shares: shares of the time of each pool (`rollout`, `hybrid` and `training`, or `all`), by
            activity and by cause of idleness.
    """
    if handling(shares) >= _FULL:
        return CONTROLLER_BOUND
    if (both := alternating(shares)) is not None:
        parts = largest_parts(both)
        return max(parts, key=lambda name: parts[name])
    training = shares["training"]
    if working(training) >= _FULL:
        return TRAIN_BOUND
    kept = {
        WEIGHT_UPDATES: updating(training),
        FAILURES: training.get(LOST, 0.0),
        CONTROLLER_BOUND: training.get(WAIT_CONTROLLER, 0.0),
        OTHER_RANKS: training.get(WAIT_RANKS, 0.0),
        WAIT_BATCH: training.get(WAIT_BATCH, 0.0),
    }
    causes = (WAIT_BATCH, WEIGHT_UPDATES, FAILURES, CONTROLLER_BOUND, OTHER_RANKS)
    longest = max(causes, key=lambda name: kept[name])
    if longest != WAIT_BATCH:
        return longest
    idle = _by_limit(engines_of(shares))
    limit = max(idle, key=lambda name: idle[name])
    return limit if idle[limit] >= WAITING else GENERATION_BOUND


def handling(shares: Mapping[str, Mapping[str, float]]) -> float:
    """Share of its time in which the controller is busy; 0 if there is none."""
    controller = shares.get(CONTROLLER, {})
    return 1 - controller.get(NOTHING_TO_HANDLE, 0.0) if controller else 0.0


def alternating(
    shares: Mapping[str, Mapping[str, float]],
) -> Mapping[str, float] | None:
    """The pool of GPUs that generate and train, if no others train."""
    return None if "training" in shares else shares.get("all", shares.get("hybrid"))


def engines_of(shares: Mapping[str, Mapping[str, float]]) -> Mapping[str, float]:
    """The pool of engines: those that only generate, or hybrid ones if there are no others."""
    return shares["rollout"] if "rollout" in shares else shares["hybrid"]


def updating(training: Mapping[str, float]) -> float:
    """Share of the trainer's time for exporting weights and waiting for updates."""
    names = (*MOVING_WEIGHTS, WAIT_WEIGHTS, WAIT_HYBRID)
    return sum(training.get(name, 0.0) for name in names)


def working(training: Mapping[str, float]) -> float:
    """Share of the trainer's time without waiting, failures and weights."""
    causes = (WAIT_BATCH, LOST, WAIT_CONTROLLER, WAIT_RANKS)
    return 1 - updating(training) - sum(training.get(name, 0.0) for name in causes)


def largest_parts(shares: Mapping[str, float]) -> dict[str, float]:
    """Shares of the time of GPUs that generate and train, by bottleneck."""
    generating = sum(shares.get(name, 0.0) for name in GENERATING)
    parts = _by_limit(shares)
    moving = sum(shares.get(name, 0.0) for name in MOVING_WEIGHTS)
    training = 1 - generating - moving - sum(parts.values())
    parts[WEIGHT_UPDATES] += moving
    parts[GENERATION_BOUND] = generating
    parts[TRAIN_BOUND] = training
    return parts


def _by_limit(shares: Mapping[str, float]) -> dict[str, float]:
    """Idle shares, summed by bottleneck."""
    idle = dict.fromkeys(CAUSES.values(), 0.0)
    for cause, limit in CAUSES.items():
        idle[limit] += shares.get(cause, 0.0)
    return idle
