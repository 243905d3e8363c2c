"""Example of one slow group under any batch order: eq. 3 does not bound the age of a group.

    group 0   starts with the first, ends last
    others    end immediately

Eq. 3 counts groups. While group 0 runs, every step trains on younger groups and admits as many
again, so the count stays within its bound, and the age of group 0 grows by one version a step. What
follows depends on the batch order alone. Nothing has a duration here: a step is a row.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from areal_lab.control import events as ev
from areal_lab.control.coordinator import Coordinator
from areal_lab.control.limits import Limits
from areal_lab.control.order import BatchOrder
from areal_lab.control.schedule import asynchronous

STRAGGLER: ev.GroupId = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerStep:
    """Actions of the coordinator at one version while group 0 still runs, or when it ends."""

    version: ev.Version
    """Version of the trainer before the step."""
    may_start: float
    """Maximum groups that eq. 3 lets the run start until now: `(version + 1 + eta) B`."""
    started: int
    """Groups started until now, without dropped ones; never more than `may_start`."""
    trained: tuple[ev.GroupId, ...]
    """Batch of the step; empty if training waits for group 0."""
    dropped: bool
    """True if group 0 is dropped."""
    lag: int
    """Age of group 0 in versions: its lag if this step trained on it."""


def straggler_steps(
    order: BatchOrder, *, eta: float, batch_groups: int = 1, steps: int = 4
) -> list[StragglerStep]:
    """Run the coordinator while group 0 runs for `steps` training steps, and one more.

    Args:
        steps: training steps during which group 0 runs; it ends before the one after them.

    Returns:
        One row per version. The list ends with the step that trains on group 0, waits for it, or
        drops it.
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
    """Perform actions immediately; a training step ends when `step` is called."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._events: deque[ev.Event] = deque([ev.RunStarted((0,))])
        self._version: ev.Version = 0
        self.batch: tuple[ev.GroupId, ...] = ()
        self.dropped = False

    def end_straggler(self) -> None:
        """End group 0, with tokens of every version, before the running step ends."""
        self._events.appendleft(ev.GroupFinished(STRAGGLER, 0, self._version))

    def step(self, version: ev.Version) -> StragglerStep:
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
            self._events.append(ev.TrainStepDone(version + 1))
        return row

    def _perform_all(self) -> None:
        while self._events:
            for action in self._coordinator.handle(self._events.popleft()):
                self._perform(action)

    def _perform(self, action: ev.Action) -> None:
        match action:
            case ev.StartGroup() if action.group != STRAGGLER:
                self._events.append(ev.GroupFinished(action.group, action.version, action.version))
            case ev.Train():
                self.batch = action.groups
            case ev.PushWeights():
                self._version = action.version
                self._events.append(ev.WeightsPushed(action.version))
            case ev.Drop():
                self.dropped = self.dropped or action.group == STRAGGLER
            case _:
                pass
