"""One group that does not end, under any batch order: why eq. 3 bounds the age of no group.

    group 0   starts with the first, ends last
    others    end at once

Eq. 3 counts groups. While group 0 runs, every step trains on younger groups and admits as many
again, so the count stays within its bound, and the age of group 0 grows by one version a step. What
follows depends on the batch order alone. Nothing has a duration here: a step is a row.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from areal_lab.control.coordinator import Coordinator
from areal_lab.control.events import (
    Action,
    Drop,
    Event,
    GroupFinished,
    GroupId,
    PushWeights,
    RunStarted,
    StartGroup,
    Train,
    TrainStepDone,
    Version,
    WeightsPushed,
)
from areal_lab.control.limits import Limits
from areal_lab.control.order import BatchOrder
from areal_lab.control.schedule import asynchronous

STRAGGLER: GroupId = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerStep:
    """What the coordinator does at one version while group 0 still runs, or when it ends."""

    version: Version
    """Of the trainer, before the step."""
    may_start: float
    """Most groups that eq. 3 lets the run start until now: `(version + 1 + eta) B`."""
    started: int
    """Groups started until now, without dropped ones; never more than `may_start`."""
    trained: tuple[GroupId, ...]
    """The batch of the step; empty if training waits for group 0."""
    dropped: bool
    """Whether group 0 is given up."""
    lag: int
    """Age of group 0 in versions: its lag if this step trained on it."""


def straggler_steps(
    order: BatchOrder, *, eta: float, batch_groups: int = 1, steps: int = 4
) -> list[StragglerStep]:
    """Run the coordinator while group 0 runs for `steps` training steps, and one more.

    Args:
        order: the batch order.
        eta: staleness bound of eq. 3, in versions.
        batch_groups: B, groups per training step.
        steps: training steps during which group 0 runs; it ends before the one after them.

    Returns:
        A row per version. The list ends with the step that trains on group 0, that waits for it, or
        in which it is dropped.

    Raises:
        ValueError: eta is below 0 or infinite, an order's bound is below eta, or a count below 1.
    """
    if steps < 1:
        raise ValueError(f"steps is {steps}, but must be >= 1")
    if eta == float("inf"):
        raise ValueError("eta is infinite, which admits groups without end; give a number")
    schedule = asynchronous(eta)
    limits = Limits(
        batch_groups=batch_groups,
        max_in_flight=int(schedule.admissible_groups(steps + 1, batch_groups)) + 1,
        schedule=schedule,
        order=order,
    )
    world = _World(Coordinator(limits))
    rows: list[StragglerStep] = []
    for version in range(steps + 1):
        if version == steps and not world.dropped:
            world.end_straggler()
        row = world.step(version)
        rows.append(row)
        if not row.trained or row.dropped or STRAGGLER in row.trained:
            break
    return rows


class _World:
    """Performs actions at once; a training step ends when it is asked for."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._events: deque[Event] = deque([RunStarted((0,))])
        self._version: Version = 0
        self.batch: tuple[GroupId, ...] = ()
        self.dropped = False

    def end_straggler(self) -> None:
        """Group 0 ends, with tokens of every version, before the step that runs."""
        self._events.appendleft(GroupFinished(STRAGGLER, 0, self._version))

    def step(self, version: Version) -> StragglerStep:
        """Perform until nothing is left to do, and end the step that then runs."""
        self._perform_all()
        counts = self._coordinator.counts
        row = StragglerStep(
            version=version,
            may_start=self._coordinator.limits.schedule.admissible_groups(
                version, self._coordinator.limits.batch_groups
            ),
            started=counts.started,
            trained=self.batch,
            dropped=self.dropped,
            lag=version,
        )
        if self.batch:
            self.batch = ()
            self._events.append(TrainStepDone(version + 1))
        return row

    def _perform_all(self) -> None:
        while self._events:
            for action in self._coordinator.handle(self._events.popleft()):
                self._perform(action)

    def _perform(self, action: Action) -> None:
        match action:
            case StartGroup() if action.group != STRAGGLER:
                self._events.append(GroupFinished(action.group, action.version, action.version))
            case Train():
                self.batch = action.groups
            case PushWeights():
                self._version = action.version
                self._events.append(WeightsPushed(action.version))
            case Drop():
                self.dropped = self.dropped or action.group == STRAGGLER
            case _:
                pass
