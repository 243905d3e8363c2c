"""Schedules as data: when generation may run ahead, and how new weights reach running responses.

schedule             eta   new weights            while training
synchronous          0     nothing runs           generation is idle
one_step_overlap     1     wait for whole batch   generates the next batch with one version
asynchronous(eta)    eta   interrupt or drain     generates
partial_rollout      0     (paused already)       paused; unfinished responses are carried over
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal, get_args

from areal_lab.capacity import admissible, check_eta
from areal_lab.control.events import Version


class OnNewWeights(StrEnum):
    """What happens to running responses when the trainer has new weights."""

    INTERRUPT = "interrupt"
    """Pause, load, continue the partial responses under the new weights (AReaL)."""
    DRAIN = "drain"
    """Start no more groups, wait until the running responses end, load (AReaL, Figure 6b)."""
    FINISH_BATCH = "finish_batch"
    """As `DRAIN`, but first start the rest of the current batch: one version per batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How generation and training interleave. Create one with the functions below."""

    name: str
    eta: float
    """Staleness bound of eq. 3 in versions; a fraction f means at most f of a batch ahead."""
    on_new_weights: OnNewWeights
    carry_over: bool = False
    """Pause generation when a batch is complete and carry unfinished responses over the update."""

    def __post_init__(self) -> None:
        check_eta(self.eta)

    @property
    def eta_is_fixed(self) -> bool:
        """Whether another eta would make it another schedule."""
        return self.name in FIXED_ETA

    @property
    def overlaps(self) -> bool:
        """Whether generation continues while the trainer works."""
        return self.eta > 0 and not self.carry_over

    @property
    def takes_turns(self) -> bool:
        """Whether generation stands still from a batch until its weights are loaded, at any eta
        that a person may ask for: then engines and trainer can share devices."""
        return self.carry_over or (self.eta_is_fixed and self.eta == 0)

    @property
    def interrupts(self) -> bool:
        """Whether responses are interrupted, and finished under new weights."""
        return self.eta > 0 and self.on_new_weights is OnNewWeights.INTERRUPT

    def admissible_groups(self, version: Version, batch_groups: int) -> float:
        """Groups that may have been started while the engines hold `version`: eq. 3."""
        return admissible(version, batch_size=batch_groups, eta=self.eta)


def synchronous() -> Schedule:
    """Generate a batch, train on it, push the weights, repeat."""
    return Schedule(name="synchronous", eta=0, on_new_weights=OnNewWeights.INTERRUPT)


def one_step_overlap() -> Schedule:
    """Generate batch k + 1 with the weights of version k - 1 or k while batch k is trained on."""
    return Schedule(name="one_step_overlap", eta=1, on_new_weights=OnNewWeights.FINISH_BATCH)


def asynchronous(eta: float, *, interruptible: bool = True) -> Schedule:
    """Always generate, at most `eta` versions ahead; 0 gives exactly the synchronous result."""
    on_new_weights = OnNewWeights.INTERRUPT if interruptible else OnNewWeights.DRAIN
    return Schedule(name="asynchronous", eta=eta, on_new_weights=on_new_weights)


def partial_rollout(eta: float = math.inf) -> Schedule:
    """Synchronous, but with extra groups: unfinished responses continue after the update.

    Source: Kimi k1.5 (arXiv:2501.12599), section 2.6.2.
    """
    return Schedule(
        name="partial_rollout", eta=eta, on_new_weights=OnNewWeights.INTERRUPT, carry_over=True
    )


ScheduleName = Literal["synchronous", "one_step_overlap", "asynchronous", "partial_rollout"]
SCHEDULES: Final[tuple[ScheduleName, ...]] = get_args(ScheduleName)
"""Names of the schedules above."""


def schedule_named(name: str, *, eta: float, interruptible: bool = True) -> Schedule:
    """The schedule of this name.

    Args:
        name: one of `SCHEDULES`.
        eta: staleness bound; ignored by schedules with a fixed eta.
        interruptible: as for `asynchronous`, and ignored by the others.

    Raises:
        ValueError: if the name is unknown, listing the known ones, or eta is invalid.
    """
    match name:
        case "synchronous":
            return synchronous()
        case "one_step_overlap":
            return one_step_overlap()
        case "asynchronous":
            return asynchronous(eta, interruptible=interruptible)
        case "partial_rollout":
            return partial_rollout(eta)
    raise ValueError(f"schedule is {name!r}, but must be one of {', '.join(SCHEDULES)}")


FIXED_ETA: Final = {
    name: made.eta
    for name in SCHEDULES
    if (made := schedule_named(name, eta=1)).eta == schedule_named(name, eta=2).eta
}
"""Schedules that ignore the eta they are given, and the eta they have."""
