"""Schedules as data: when generation may run ahead and how many groups may start.

Number of groups that may start now: eq. 3, the engines' limit, and the end of the run.

All counts are prompt groups. *Started* is the count of eq. 3: groups that run, wait for training,
or were trained on. Groups that a filter rejects or an order drops are subtracted and replaced;
after a recovery at `version` the count starts at `version * batch_groups`. The arithmetic is in
`areal_lab.capacity`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Literal, get_args

from areal_lab.capacity import admissible, check_eta
from areal_lab.capacity import lag_bound as lag_bound_of
from areal_lab.control.drift import DriftBound
from areal_lab.control.events import Version

MAX_DRIFT: Final = 0.08
"""Drift in nats above which cells of learning rate, minibatches and eta lose reward with decoupled
PPO, and below which they do not (`reproductions.learning.where_staleness_hurts`)."""
SAFE_DRIFT: Final = {"decoupled": MAX_DRIFT, "naive": 0.05}
"""The same by objective; naive PPO clips around the policy that sampled."""


class OnNewWeights(StrEnum):
    """Effect of new weights on running responses."""

    INTERRUPT = "interrupt"
    """Pause, load, continue the partial responses under the new weights (AReaL)."""
    DRAIN = "drain"
    """Start no more groups, wait until the running responses end, load (AReaL, Figure 6b)."""
    FINISH_BATCH = "finish_batch"
    """As `DRAIN`, but first start the rest of the current batch: one version per batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Order in which generation and training interleave. Create one with the functions below."""

    name: str
    eta: float
    """Staleness bound of eq. 3 in versions; a fraction f means at most f of a batch ahead."""
    on_new_weights: OnNewWeights
    carry_over: bool = False
    """Pause generation when a batch is complete and carry unfinished responses over the update."""
    bound: DriftBound | None = None
    """Bounds that set eta after each training step; None leaves it as it is."""

    def __post_init__(self) -> None:
        check_eta(self.eta)

    @property
    def largest_eta(self) -> float:
        """Largest eta that this schedule sets by itself."""
        return self.eta if self.bound is None else self.bound.max_eta

    @property
    def eta_is_fixed(self) -> bool:
        """True if another eta would define another schedule."""
        return self.name in FIXED_ETA

    @property
    def overlaps(self) -> bool:
        """True if generation continues while the trainer works."""
        return self.largest_eta > 0 and not self.carry_over

    @property
    def takes_turns(self) -> bool:
        """True if generation pauses from a batch until its weights are loaded, at any eta that a
        person may request: then engines and trainer can share devices.
        """
        return self.carry_over or (self.eta_is_fixed and self.eta == 0)

    @property
    def interrupts(self) -> bool:
        """True if responses are interrupted, and finished under new weights."""
        return self.largest_eta > 0 and self.on_new_weights is OnNewWeights.INTERRUPT

    def admissible_groups(self, version: Version, batch_groups: int) -> float:
        """Groups that may have been started while the engines have `version`: eq. 3."""
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


def bounded_drift(bound: DriftBound, *, interruptible: bool = True) -> Schedule:
    """Asynchronous, as many versions ahead as the measured drift permits (`control.drift`)."""
    on_new_weights = OnNewWeights.INTERRUPT if interruptible else OnNewWeights.DRAIN
    return Schedule(
        name="bounded_drift", eta=bound.min_eta, on_new_weights=on_new_weights, bound=bound
    )


ScheduleName = Literal[
    "synchronous", "one_step_overlap", "asynchronous", "partial_rollout", "bounded_drift"
]
SCHEDULES: Final[tuple[ScheduleName, ...]] = get_args(ScheduleName)
"""Names of the schedules above."""


def schedule_named(
    name: str, *, eta: float, interruptible: bool = True, bound: DriftBound | None = None
) -> Schedule:
    """Return the schedule of this name.

    Args:
        name: one of `SCHEDULES`.
        eta: staleness bound in versions; for `bounded_drift` the largest one.
        interruptible: for `asynchronous` and `bounded_drift`.
        bound: for `bounded_drift`, its `max_eta` aside; None takes the default.
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
        case "bounded_drift":
            bound = replace(bound or DriftBound(max_drift=MAX_DRIFT), max_eta=eta)
            return bounded_drift(bound, interruptible=interruptible)
    raise ValueError(f"schedule is {name!r}, but must be one of {', '.join(SCHEDULES)}")


FIXED_ETA: Final = {
    name: made.eta
    for name in SCHEDULES
    if (made := schedule_named(name, eta=1)).largest_eta == schedule_named(name, eta=2).largest_eta
}
"""Schedules that ignore a given eta, with their own."""


def start_limit(
    schedule: Schedule, *, version: Version, batch_groups: int, train_steps: int | None
) -> float:
    """Groups that may have been started while the engines have `version`; may be infinite.

    Eq. 3 (`Schedule.admissible_groups`), but at most the groups that the run trains on: a run of
    `train_steps` batches has no unused group at its end.
    """
    run_groups = math.inf if train_steps is None else train_steps * batch_groups
    return min(schedule.admissible_groups(version, batch_groups), run_groups)


def whole_batches(started: int, batch_groups: int) -> int:
    """Round `started` up to whole batches: the limit when only the current batch is completed."""
    return -(-started // batch_groups) * batch_groups


def lag_bound(schedule: Schedule) -> float:
    """Largest lag of `strict_start_order`, in versions, which `bounded_lag` must allow."""
    return lag_bound_of(schedule.largest_eta)
