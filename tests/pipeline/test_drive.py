"""The shell performs what the coordinator decides: order, errors, stop. No time passes here."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import get_args

import pytest

from areal_lab.control import events as ev
from areal_lab.control.coordinator import Coordinator, Limits
from areal_lab.control.frontier import Frontier
from areal_lab.control.order import bounded_lag, oldest_finished_first
from areal_lab.control.schedule import Schedule, asynchronous, synchronous
from areal_lab.pipeline.drive import UserRequest, _drop, drive


@dataclass
class Log:
    """All events and actions, in order."""

    entries: list[ev.Event | ev.Action] = field(default_factory=list)

    def event(self, event: ev.Event) -> None:
        self.entries.append(event)

    def action(self, action: ev.Action) -> None:
        self.entries.append(action)


@dataclass
class ToyMachine:
    """Generates, trains and pushes in a few turns of the event loop; checks each call."""

    turns_per_group: int = 3
    fail_at_step: int | None = None
    filtered: frozenset[ev.GroupId] = frozenset()
    engine_version: ev.Version = 0
    announced: ev.Version = 0
    paused: bool = False
    by_hand: bool = False
    kept: set[ev.GroupId] = field(default_factory=set)
    trained: list[tuple[ev.GroupId, ...]] = field(default_factory=list)
    dropped: list[ev.GroupId] = field(default_factory=list)
    saved: list[ev.Version] = field(default_factory=list)

    async def generate_group(self, start: ev.StartGroup) -> ev.GroupFinished | ev.GroupFiltered:
        head = self.engine_version
        for _ in range(self.turns_per_group + start.group % 2):
            await asyncio.sleep(0)
            while self.paused:
                await asyncio.sleep(0)
        if start.group in self.filtered:
            return ev.GroupFiltered(start.group, "test")
        self.kept.add(start.group)
        return ev.GroupFinished(start.group, head, self.engine_version)

    async def train(self, train: ev.Train) -> ev.TrainStepDone:
        if train.version + 1 == self.fail_at_step:
            raise RuntimeError("the trainer broke")
        self.kept -= set(train.groups)
        self.trained.append(train.groups)
        for _ in range(4):
            await asyncio.sleep(0)
        return ev.TrainStepDone(train.version + 1)

    def prepare_save(self, frontier: Frontier) -> None:
        assert all(one.group < frontier.next_group for one in frontier.open)

    async def save(self, version: ev.Version) -> None:
        self.saved.append(version)

    def announce_push(self, version: ev.Version) -> None:
        assert version > self.engine_version
        self.announced = version

    async def interrupt(self, *, by_hand: bool) -> None:
        assert not self.paused
        self.paused, self.by_hand = True, by_hand

    async def push_weights(self, version: ev.Version) -> None:
        await asyncio.sleep(0)
        assert version == self.announced
        self.engine_version = version

    async def resume(self) -> None:
        assert self.paused
        self.paused = False

    async def drop_group(self, group: ev.GroupId) -> None:
        self.kept.discard(group)
        self.dropped.append(group)


def limits(schedule: Schedule, train_steps: int | None = 5) -> Limits:
    return Limits(
        batch_groups=4,
        max_in_flight=8,
        train_steps=train_steps,
        save_every_steps=0,
        schedule=schedule,
        order=oldest_finished_first(),
    )


def run_toy(
    machine: ToyMachine, schedule: Schedule, *, train_steps: int | None = 5, stop_after: int = 0
) -> tuple[ev.Finish, Log]:
    """Drive the machine; ask it to stop when `stop_after` steps were trained (0: never)."""
    log = Log()

    async def go() -> ev.Finish:
        events: asyncio.Queue[ev.Event] = asyncio.Queue()

        async def stop_later() -> None:
            while len(machine.trained) < stop_after:
                await asyncio.sleep(0)
            events.put_nowait(ev.StopRequested())

        stopper = asyncio.create_task(stop_later()) if stop_after else None
        coordinator = Coordinator(limits(schedule, train_steps))
        finish = await drive(coordinator, machine, ev.RunStarted((0,)), events, log)
        if stopper is not None:
            await stopper
        return finish

    return asyncio.run(go()), log


def test_a_run_trains_every_group_once_and_ends_with_all_engines_running() -> None:
    machine = ToyMachine()
    finish, _ = run_toy(machine, asynchronous(2))
    assert finish.reason == "complete"
    assert sorted(g for batch in machine.trained for g in batch) == list(range(20))
    assert machine.kept == set()
    assert machine.engine_version == 5
    assert not machine.paused
    assert machine.saved == [5]


def test_filtered_groups_are_replaced() -> None:
    machine = ToyMachine(filtered=frozenset({1, 6}))
    run_toy(machine, asynchronous(1))
    trained = sorted(g for batch in machine.trained for g in batch)
    assert trained == [g for g in range(22) if g not in (1, 6)]


def test_interrupt_comes_before_push_and_push_before_resume() -> None:
    _, log = run_toy(ToyMachine(), asynchronous(4))
    order = [
        type(e) for e in log.entries if isinstance(e, ev.Interrupt | ev.PushWeights | ev.Resume)
    ]
    assert ev.Interrupt in order  # else this run would show nothing
    for index, kind in enumerate(order):
        if kind is ev.Interrupt:
            assert order[index + 1] is ev.PushWeights
        if kind is ev.Resume:
            assert order[index - 1] is ev.PushWeights


def test_requests_are_answered_and_only_those_that_can_be_done_are_events() -> None:
    machine, log = ToyMachine(), Log()
    answers: list[str | None] = []

    async def go() -> ev.Finish:
        events: asyncio.Queue[ev.Event | UserRequest] = asyncio.Queue()
        resting = 50

        async def ask() -> None:
            while not machine.trained:
                await asyncio.sleep(0)
            for request in (ev.EtaRequested(-1), ev.EtaRequested(4), ev.PauseRequested()):
                events.put_nowait(UserRequest(request, answers.append))
            for _ in range(resting):
                await asyncio.sleep(0)
            assert machine.paused
            assert machine.by_hand
            seen = len(log.entries)
            for _ in range(resting):
                await asyncio.sleep(0)
            assert len(log.entries) == seen  # it came to rest
            events.put_nowait(UserRequest(ev.ResumeRequested(), answers.append))

        asking = asyncio.create_task(ask())
        coordinator = Coordinator(limits(asynchronous(2)))
        finish = await drive(coordinator, machine, ev.RunStarted((0,)), events, log)
        await asking
        return finish

    assert asyncio.run(go()).reason == "complete"
    assert answers[0] is not None
    assert "eta is -1" in answers[0]
    assert answers[1:] == [None, None, None]
    requests = [e for e in log.entries if isinstance(e, get_args(ev.Request))]
    assert requests == [ev.EtaRequested(4), ev.PauseRequested(), ev.ResumeRequested()]
    assert sorted(g for batch in machine.trained for g in batch) == list(range(20))
    assert not machine.paused


def test_eta_zero_is_the_synchronous_schedule() -> None:
    logs = [run_toy(ToyMachine(), s)[1].entries for s in (synchronous(), asynchronous(0))]
    assert logs[0] == logs[1]


def test_the_first_error_reaches_the_caller_and_nothing_hangs() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        run_toy(ToyMachine(fail_at_step=3), asynchronous(2))
    assert [str(e) for e in caught.value.exceptions] == ["the trainer broke"]


def test_a_stop_saves_and_accounts_for_every_group() -> None:
    machine = ToyMachine()
    finish, log = run_toy(machine, asynchronous(2), train_steps=None, stop_after=3)
    assert finish.reason == "stopped"
    assert machine.saved == [len(machine.trained)]
    started = {a.group for a in log.entries if isinstance(a, ev.StartGroup)}
    trained = {g for batch in machine.trained for g in batch}
    dropped = {a.group for a in log.entries if isinstance(a, ev.Drop)}
    assert started == trained | dropped
    assert not trained & dropped
    assert machine.dropped == [a.group for a in log.entries if isinstance(a, ev.Drop)]


@dataclass
class SlowToEnd(ToyMachine):
    """Group 2 is slow, and so is its end when it is canceled; each attempt has the same name."""

    running: set[ev.GroupId] = field(default_factory=set)

    async def generate_group(self, start: ev.StartGroup) -> ev.GroupFinished | ev.GroupFiltered:
        assert start.group not in self.running, "its earlier attempt has ended"
        self.running.add(start.group)
        head = self.engine_version
        try:
            slow = start.group == 2 and start.version == 0
            for _ in range(500 if slow else 3):
                await asyncio.sleep(0)
        finally:
            try:
                for _ in range(5):
                    await asyncio.sleep(0)
            finally:
                self.running.discard(start.group)
        self.kept.add(start.group)
        return ev.GroupFinished(start.group, head, self.engine_version)


@pytest.mark.parametrize("interruptible", [True, False])
def test_a_recycled_group_starts_again_after_its_earlier_attempt_has_ended(
    *, interruptible: bool
) -> None:
    machine, log = SlowToEnd(), Log()
    schedule = asynchronous(4, interruptible=interruptible)
    order = bounded_lag(0, "recycle")

    async def go() -> ev.Finish:
        events: asyncio.Queue[ev.Event | UserRequest] = asyncio.Queue()
        own = Limits(batch_groups=2, max_in_flight=6, train_steps=6, schedule=schedule, order=order)
        return await drive(Coordinator(own), machine, ev.RunStarted((0,)), events, log)

    assert asyncio.run(go()).reason == "complete"
    recycled = [a.group for a in log.entries if isinstance(a, ev.Drop)]
    assert {a.reason for a in log.entries if isinstance(a, ev.Drop)} == {ev.RECYCLED}
    assert 2 in recycled
    assert sorted(g for batch in machine.trained for g in batch) == list(range(12))
    # One end for each attempt that was not dropped.
    ends = [e.group for e in log.entries if isinstance(e, ev.GroupFinished)]
    assert not machine.kept
    for group in set(recycled):
        starts = sum(isinstance(a, ev.StartGroup) and a.group == group for a in log.entries)
        assert starts == recycled.count(group) + 1
        assert ends.count(group) <= starts


def test_the_events_of_an_attempt_that_was_recycled_are_discarded() -> None:
    other = UserRequest(ev.StopRequested())

    async def left(reason: str) -> list[ev.Event | UserRequest]:
        events: asyncio.Queue[ev.Event | UserRequest] = asyncio.Queue()
        for event in (ev.GroupFinished(1, 0, 0), other, ev.SamplesEnded(2, 1), ev.TrainStepDone(1)):
            events.put_nowait(event)
        events.put_nowait(ev.GroupFinished(2, 0, 0))
        await _drop(ToyMachine(), ev.Drop(2, reason), None, events)
        return [events.get_nowait() for _ in range(events.qsize())]

    kept = [ev.GroupFinished(1, 0, 0), other, ev.TrainStepDone(1)]
    assert asyncio.run(left(ev.RECYCLED)) == kept
    assert len(asyncio.run(left("run ended"))) == 5
