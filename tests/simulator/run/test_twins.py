"""The pipeline under a virtual clock and the simulator, given the same durations, do the same.

pipeline.drive, asyncio, stub performer -----------+
                                                   +-> the same events and actions, same times
simulator.run.event_loop, simpy, toy engine -------+
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from areal_lab.control import events as ev
from areal_lab.control.coordinator import Coordinator
from areal_lab.control.frontier import Frontier
from areal_lab.control.order import (
    BatchOrder,
    bounded_lag,
    oldest_finished_first,
    strict_start_order,
)
from areal_lab.control.schedule import (
    SCHEDULES,
    Schedule,
    asynchronous,
    partial_rollout,
    schedule_named,
    synchronous,
)
from areal_lab.pipeline.drive import UserRequest, drive
from areal_lab.runlog.records import ActionRecord, EventRecord
from simulator.costs.weight_sync import WeightSync
from simulator.run.responses import Draws
from simulator.run.system import System
from tests.simulator.engine.toy_engine import toy_engines
from tests.simulator.run.toy_system import Latencies, PerToken, lognormal, run_with_log, toy_system
from tests.simulator.run.virtual_loop import run_virtually

TOKEN_S = 1e-4
"""So short that no two answers end at one moment, where the order would be left to chance."""
SEED = 7


@dataclass
class StubPerformer:
    """Sleeps for the durations of the system; the pipeline does the rest."""

    system: System
    slots: int | None
    sample_ended: Callable[[ev.GroupId], None] = lambda _: None
    places: dict[ev.EngineId, asyncio.Semaphore] = field(default_factory=dict)
    lengths: dict[ev.GroupId, list[int]] = field(default_factory=dict)
    tokens: dict[ev.GroupId, Counter[ev.Version]] = field(default_factory=dict)
    """Tokens of each group by their version."""
    version: ev.Version = 0
    pause_due: bool = False
    pausing: asyncio.Event = field(default_factory=asyncio.Event)
    running: asyncio.Event = field(default_factory=asyncio.Event)
    loaded: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.draws = Draws(self.system, SEED)
        self.running.set()
        self.loaded.set()

    async def generate_group(self, start: ev.StartGroup) -> ev.GroupFinished:
        drawn = self.draws.of(start.group)
        self.lengths[start.group] = drawn.lengths
        self.tokens[start.group] = Counter()
        versions = await asyncio.gather(*(self._sample(start, tokens) for tokens in drawn.lengths))
        if drawn.rewards_s is not None:
            await asyncio.sleep(max(drawn.rewards_s))
        head, tail = min(v[0] for v in versions), max(v[-1] for v in versions)
        return ev.GroupFinished(start.group, head, tail)

    @asynccontextmanager
    async def _place(self, engine: ev.EngineId) -> AsyncIterator[None]:
        if self.slots is None:
            yield
            return
        async with self.places.setdefault(engine, asyncio.Semaphore(self.slots)):
            yield

    async def _sample(self, start: ev.StartGroup, tokens: int) -> list[ev.Version]:
        """The versions of one answer's tokens."""
        loop = asyncio.get_running_loop()
        versions: list[ev.Version] = []
        done, told = 0.0, 0
        async with self._place(start.engine):
            while done < tokens:
                await self.running.wait()
                version, begun_s = self.version, loop.time()
                try:
                    async with asyncio.timeout((tokens - done) * TOKEN_S):
                        await self.pausing.wait()
                    done += (loop.time() - begun_s) / TOKEN_S
                except TimeoutError:
                    done = tokens
                if (more := math.floor(done + 1e-9) - told) > 0:
                    told += more
                    self.tokens[start.group][version] += more
                    versions.append(version)
        self.sample_ended(start.group)
        return versions

    async def train(self, train: ev.Train) -> ev.TrainStepDone:
        lengths = [
            self.system.workload.prompt_tokens + tokens
            for group in train.groups
            for tokens in self.lengths.pop(group)
        ]
        await asyncio.sleep(self.system.training.step(lengths, minibatches=1).seconds)
        await self.loaded.wait()
        await asyncio.sleep(self.system.weights.export_s)
        return ev.TrainStepDone(train.version + 1, *self._measured(train))

    def _measured(self, train: ev.Train) -> Sequence[float]:
        of_batch = Counter[ev.Version]()
        for group in train.groups:
            of_batch += self.tokens.pop(group)
        if self.system.limits.schedule.bound is None:
            return ()
        lags = sum((train.version - one) * count for one, count in of_batch.items())
        return self.draws.measured(lags / of_batch.total())

    def prepare_save(self, frontier: Frontier) -> None:
        assert all(one.group < frontier.next_group for one in frontier.open)

    async def save(self, version: ev.Version) -> None:
        assert version > self.version or self.loaded.is_set()
        await asyncio.sleep(0)

    def announce_push(self, version: ev.Version) -> None:
        assert version == self.version + 1 or version > self.version
        self.loaded.clear()

    async def interrupt(self, *, by_hand: bool) -> None:
        """With a push at once: engines go on until the push has been noticed."""
        self.pause_due = True
        if by_hand or self.loaded.is_set():
            self._pause()

    def _pause(self) -> None:
        self.pause_due = False
        self.running.clear()
        self.pausing.set()

    async def push_weights(self, version: ev.Version) -> None:
        await asyncio.sleep(self.system.weights.delay_s)
        if self.pause_due:
            self._pause()
        await asyncio.sleep(self.system.weights.load_s)
        self.version = version
        self.loaded.set()

    async def resume(self) -> None:
        self.pausing.clear()
        self.running.set()

    async def drop_group(self, group: ev.GroupId) -> None:
        self.lengths.pop(group, None)


@dataclass
class Clocked:
    """Every event and action of the pipeline's event loop, with its time."""

    entries: list[tuple[float, ev.Event | ev.Action]] = field(default_factory=list)

    def event(self, event: ev.Event) -> None:
        self.entries.append((asyncio.get_running_loop().time(), event))

    def action(self, action: ev.Action) -> None:
        self.entries.append((asyncio.get_running_loop().time(), action))


def run_pipeline(system: System, slots: int | None) -> list[tuple[float, ev.Event | ev.Action]]:
    told = Clocked()

    async def go() -> ev.Finish:
        events: asyncio.Queue[ev.Event | UserRequest] = asyncio.Queue()

        async def ask() -> None:
            for at_s, request in system.requests:
                await asyncio.sleep(at_s - asyncio.get_running_loop().time())
                events.put_nowait(UserRequest(request))

        asking = asyncio.create_task(ask())
        started = ev.RunStarted(tuple(range(system.engines)))
        coordinator, performer = Coordinator(system.limits), StubPerformer(system, slots)
        if system.limits.group_slots > 1:
            performer.sample_ended = lambda group: events.put_nowait(ev.SamplesEnded(group, 1))
        finish = await drive(coordinator, performer, started, events, told)
        asking.cancel()
        return finish

    run_virtually(go())
    return told.entries


def run_simulator(system: System) -> list[tuple[float, ev.Event | ev.Action]]:
    _, log = run_with_log(system, SEED)
    return [
        (record.t_s, record.event if isinstance(record, EventRecord) else record.action)
        for record in log.records
        if isinstance(record, EventRecord | ActionRecord)
    ]


def twin_system(
    schedule: Schedule,
    order: BatchOrder,
    slots: int | None,
    *,
    rewards: bool,
    group_slots: int = 1,
) -> System:
    system = toy_system(
        schedule,
        batch=4,
        in_flight=7,
        group_slots=group_slots,
        steps=15,
        complete=True,
        order=order,
        samples=3,
        lengths=lognormal(1e6),
        make_engine=toy_engines(TOKEN_S, slots),
        training=PerToken(1e-5),
        weights=WeightSync(export_s=3.3, delay_s=2.6, load_s=7.1),
    )
    if rewards:
        slow = Latencies(lambda generator, size: generator.exponential(9.0, size))
        system = replace(system, reward=slow)
    return system


@pytest.mark.parametrize("slots", [None, 4])
@pytest.mark.parametrize("rewards", [False, True])
@pytest.mark.parametrize(
    ("schedule", "order"),
    [
        *[(schedule_named(name, eta=4), oldest_finished_first()) for name in SCHEDULES],
        (asynchronous(0), oldest_finished_first()),
        (asynchronous(1), strict_start_order()),
        (asynchronous(2), bounded_lag(2)),
        (asynchronous(4), bounded_lag(1, "drop")),
        (asynchronous(4), bounded_lag(1, "recycle")),
        (asynchronous(4, interruptible=False), bounded_lag(1, "recycle")),
        (asynchronous(4, interruptible=False), oldest_finished_first()),
        (asynchronous(math.inf), oldest_finished_first()),
        (partial_rollout(), oldest_finished_first()),
    ],
    ids=lambda value: f"{value.name}-{getattr(value, 'eta', value)}"[:28],
)
def test_the_pipeline_and_the_simulator_do_the_same_at_the_same_time(
    schedule: Schedule, order: BatchOrder, slots: int | None, *, rewards: bool
) -> None:
    system = twin_system(schedule, order, slots, rewards=rewards)
    real, simulated = run_pipeline(system, slots), run_simulator(system)
    assert [entry for _, entry in simulated] == [entry for _, entry in real]
    assert [t_s for t_s, _ in simulated] == pytest.approx([t_s for t_s, _ in real], rel=1e-9)
    assert simulated[-1][0] > 100


@pytest.mark.parametrize("slots", [None, 4])
@pytest.mark.parametrize("rewards", [False, True])
@pytest.mark.parametrize(
    ("schedule", "order"),
    [
        (asynchronous(0), oldest_finished_first()),
        (asynchronous(2), bounded_lag(2)),
        (asynchronous(4), bounded_lag(1, "drop")),
        (asynchronous(4), bounded_lag(1, "recycle")),
        (asynchronous(4, interruptible=False), bounded_lag(1, "recycle")),
        (asynchronous(4, interruptible=False), oldest_finished_first()),
        (partial_rollout(), oldest_finished_first()),
    ],
    ids=lambda value: f"{value.name}-{getattr(value, 'eta', value)}"[:28],
)
def test_the_twins_free_the_slot_of_a_sample_at_the_same_time(
    schedule: Schedule, order: BatchOrder, slots: int | None, *, rewards: bool
) -> None:
    system = twin_system(schedule, order, slots, rewards=rewards, group_slots=3)
    real, simulated = run_pipeline(system, slots), run_simulator(system)
    assert [entry for _, entry in simulated] == [entry for _, entry in real]
    assert [t_s for t_s, _ in simulated] == pytest.approx([t_s for t_s, _ in real], rel=1e-9)
    ended = sum(one.samples for _, one in real if isinstance(one, ev.SamplesEnded))
    finished = sum(isinstance(one, ev.GroupFinished) for _, one in real)
    assert ended >= 3 * finished > 0


REQUESTS = (
    (40.5, ev.EtaRequested(1.5)),
    (61.25, ev.PauseRequested()),
    (62.5, ev.PauseRequested()),
    (97.25, ev.ResumeRequested()),
    (100.5, ev.EtaRequested(-1)),
    (120.5, ev.EtaRequested(6)),
    (151.5, ev.PauseRequested()),
    (153.25, ev.EtaRequested(0)),
    (153.5, ev.ResumeRequested()),
)


@pytest.mark.parametrize("rewards", [False, True])
@pytest.mark.parametrize(
    "schedule",
    [asynchronous(3), asynchronous(3, interruptible=False), partial_rollout()],
    ids=lambda schedule: f"{schedule.name}-{schedule.on_new_weights}",
)
def test_the_twins_do_the_same_when_they_are_asked_for_the_same(
    schedule: Schedule, *, rewards: bool
) -> None:
    system = twin_system(schedule, oldest_finished_first(), 4, rewards=rewards)
    # A system refuses what it can know in advance; a run is also asked for nonsense.
    possible = tuple(one for one in REQUESTS if one[1] != ev.EtaRequested(-1))
    real = run_pipeline(Unchecked(system, REQUESTS), 4)
    simulated = run_simulator(replace(system, requests=possible))
    assert [entry for _, entry in simulated] == [entry for _, entry in real]
    assert [t_s for t_s, _ in simulated] == pytest.approx([t_s for t_s, _ in real], rel=1e-9)
    kinds = {type(entry) for _, entry in simulated}
    assert {ev.PauseRequested, ev.ResumeRequested, ev.EtaRequested} <= kinds
    assert ev.Interrupt(by_hand=True) in [entry for _, entry in simulated]


class Unchecked:
    """A system that is asked for anything."""

    def __init__(self, system: System, requests: tuple[tuple[float, ev.Event], ...]) -> None:
        self._system, self.requests = system, requests

    def __getattr__(self, name: str) -> object:
        return getattr(self._system, name)


def test_the_twins_are_interrupted_and_drop_groups_where_they_should() -> None:
    def kinds(schedule: Schedule, order: BatchOrder) -> set[type]:
        entries = run_simulator(twin_system(schedule, order, 4, rewards=False))
        return {type(entry) for _, entry in entries}

    assert ev.Interrupt in kinds(asynchronous(4), oldest_finished_first())
    assert ev.Interrupt in kinds(partial_rollout(), oldest_finished_first())
    assert ev.Drop in kinds(asynchronous(4), bounded_lag(1, "drop"))
    assert ev.Drop in kinds(asynchronous(4), bounded_lag(1, "recycle"))
    assert ev.Interrupt not in kinds(synchronous(), oldest_finished_first())
