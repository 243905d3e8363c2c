"""GPU time by state: the sum over the processes of a pool.

Activities and causes of idleness have the names of `areal_lab.runlog.activity`, which computes the
same from the log of a run; here they are counted without a log.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from areal_lab.runlog.activity import (
    LOST,
    NOTHING_ADMITTED,
    PAUSED_FOR_TRAINING,
    TRAINERS_TURN,
    WAIT_CONTROLLER,
    WAIT_REWARDS,
)
from simulator.costs.switch import TO_GENERATION, TO_TRAINING
from simulator.costs.training_timing import OUTSIDE

CONTROLLER = "controller"
"""The pool of one process without GPUs."""
GENERATE = "generate"
LOAD = "load weights"
EXPORT = "export weights"
STARTING = "starting"
"""State of an engine that joins while the run continues."""
WAIT_HYBRID = "waiting for hybrid GPUs"
"""GPUs that only train wait until those that also generate have switched."""
MOVING_WEIGHTS = frozenset({LOAD, EXPORT, *TO_TRAINING, *TO_GENERATION})
"""States that move weights or other state: busy, but neither generating nor training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShares:
    """Shares of the time of a pool of GPUs; busy and idle sum to 1."""

    gpus: float
    """The mean, where engines join and leave."""
    seconds: float
    """Seconds of each GPU."""
    busy: Mapping[str, float] = field(default_factory=dict)
    """Shares by activity, largest first."""
    idle: Mapping[str, float] = field(default_factory=dict)
    """Shares by cause, largest first."""

    @property
    def utilization(self) -> float:
        """Share spent generating or training; moving weights, logs, validation and checkpoints are
        neither.

        A training step counts as busy throughout, including its pipeline bubbles and the wait for
        the slowest rank; `busy` lists their shares.
        """
        neither = MOVING_WEIGHTS | OUTSIDE
        return sum(share for name, share in self.busy.items() if name not in neither)

    @property
    def idle_share(self) -> float:
        """Share spent waiting."""
        return sum(self.idle.values())


def pool_shares(
    gpus: float, seconds: float, by_state: Mapping[str, float], idle_causes: Iterable[str]
) -> PoolShares:
    """A pool's shares, from the summed seconds of its processes."""
    total = sum(by_state.values())
    causes = frozenset(idle_causes)
    shares = {
        name: value / total
        for name, value in sorted(by_state.items(), key=lambda item: (-item[1], item[0]))
        if value > 0
    }
    return PoolShares(
        gpus=gpus,
        seconds=seconds,
        busy={name: share for name, share in shares.items() if name not in causes},
        idle={name: share for name, share in shares.items() if name in causes},
    )


def split(seconds: float, by: Mapping[str, float]) -> dict[str, float]:
    """Split `seconds` in the proportions of `by`; all `GENERATE` if `by` is empty."""
    total = sum(by.values())
    if total <= 0:
        return {GENERATE: seconds}
    return {name: seconds * part / total for name, part in by.items() if part > 0}


def shared_gpus(
    engines: Mapping[str, float], trainer: Mapping[str, float], idle_causes: Iterable[str]
) -> dict[str, float]:
    """Shares of GPUs that alternate between generation and training, from both sides' shares.

    Engines count as idle while the trainer works, is lost or gets its batch from the controller;
    that time is subtracted from the idle causes that it appears under.
    """
    causes = frozenset(idle_causes) - {LOST, WAIT_CONTROLLER}
    working = {name: share for name, share in trainer.items() if name not in causes}
    both = dict(engines)
    left = sum(working.values())
    causes_while_training = (TRAINERS_TURN, PAUSED_FOR_TRAINING, NOTHING_ADMITTED, WAIT_REWARDS)
    for cause in (*causes_while_training, *(name for name in engines if name in causes)):
        taken = min(left, both.get(cause, 0.0))
        if taken > 0:
            both[cause] -= taken
            left -= taken
    for name, share in working.items():
        both[name] = both.get(name, 0.0) + share
    return both
