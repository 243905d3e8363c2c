"""With constant costs, a co-simulated run has the events of the real pipeline, in its order.

Both sides have the same model, which generates and learns: in simpy's seconds, and in those of an
event loop whose clock jumps.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from areal_lab.control import events as ev
from areal_lab.control.coordinator import Coordinator
from areal_lab.control.drift import DriftBound
from areal_lab.control.order import bounded_lag, oldest_finished_first, strict_start_order
from areal_lab.control.schedule import (
    Schedule,
    asynchronous,
    bounded_drift,
    partial_rollout,
    synchronous,
)
from areal_lab.data.trajectory import Trajectory
from areal_lab.pipeline.drive import UserRequest, drive
from areal_lab.runlog.records import ActionRecord, EventRecord, Record
from cosim.live import Live
from cosim.load import resolve_cosim
from cosim.policy import Policy
from simulator.costs.weight_sync import WeightSync
from simulator.run.one_seed import run_system
from simulator.run.system import System
from tests.cosim.small import SORTING, small
from tests.simulator.engine.toy_engine import ToyEngine
from tests.simulator.run.test_twins import Clocked, StubPerformer
from tests.simulator.run.toy_system import Latencies, PerToken, toy_system
from tests.simulator.run.virtual_loop import run_virtually

SEED, TOKEN_S, EACH, STEPS = 7, 1e-2, 1000, 6
Entries = list[tuple[float, ev.Event | ev.Action]]


class RevisableToy(ToyEngine):
    """A toy engine whose responses change their lengths while it is paused."""

    def tokens_of(self, group: ev.GroupId, /) -> list[int]:
        told = [(one.place, one.told) for one in self._members(group)]
        return [tokens for _, tokens in sorted(told)]

    def revise(self, group: ev.GroupId, lengths: Sequence[int], /) -> None:
        assert self.paused
        for one in self._members(group):
            assert one.told < lengths[one.place] or one.tokens == lengths[one.place]
            one.tokens = lengths[one.place]

    def _members(self, group: ev.GroupId) -> list[Any]:
        running = [one for one in (*self.running, *self.waiting) if one.group == group]
        return [*running, *self.ended[group]]


@dataclass
class Learning:
    """What a policy has learned from, in place of the run's files."""

    batches: list[tuple[Trajectory, ...]] = field(default_factory=list)

    pending: dict[str, float] = field(default_factory=dict)

    def learn(self, policy: Policy, groups: Sequence[Sequence[Any]]) -> None:
        self.batches.append(tuple(row.trajectory() for rows in groups for row in rows))
        self.pending = policy.learn(groups)


@dataclass
class CosimPerformer(StubPerformer):
    """Sleeps for the durations of the system; generates and learns with `live`."""

    live: Live = None  # type: ignore[assignment]
    held: dict[ev.GroupId, list[float]] = field(default_factory=dict)
    """Simulated tokens of each running sample."""

    async def generate_group(self, start: ev.StartGroup) -> ev.GroupFinished:
        group = start.group
        self.live.begin([group], start.version)
        self.lengths[group] = self.live.of(group).lengths
        self.held[group] = [0.0] * len(self.lengths[group])
        versions = await asyncio.gather(
            *(self._grow(group, place) for place in range(len(self.lengths[group])))
        )
        self.held.pop(group, None)
        latencies_s = self.live.of(group).rewards_s
        assert latencies_s is not None
        await asyncio.sleep(max(latencies_s))
        self.live.scores(group, self.lengths[group])
        return ev.GroupFinished(group, min(v[0] for v in versions), max(v[-1] for v in versions))

    async def _grow(self, group: ev.GroupId, place: int) -> list[ev.Version]:
        loop, told = asyncio.get_running_loop(), 0
        done, lengths = self.held[group], self.lengths[group]
        versions: list[ev.Version] = []
        while done[place] < lengths[place]:
            await self.running.wait()
            version, begun_s = self.version, loop.time()
            left = lengths[place] - done[place]
            try:
                async with asyncio.timeout(left * TOKEN_S):
                    await self.pausing.wait()
                done[place] += (loop.time() - begun_s) / TOKEN_S
            except TimeoutError:
                done[place] = lengths[place]
            if math.floor(done[place] + 1e-9) > told:
                told = math.floor(done[place] + 1e-9)
                versions.append(version)
        return versions

    async def train(self, train: ev.Train) -> ev.TrainStepDone:
        self.live.learn(train)
        return await super().train(train)

    def _measured(self, _: ev.Train) -> Sequence[float]:
        return () if self.system.limits.schedule.bound is None else self.live.measured(0.0)

    async def resume(self) -> None:
        done = {
            group: [math.floor(tokens + 1e-9) for tokens in held]
            for group, held in self.held.items()
        }
        self.live.go_on(done, self.version)
        for group in done:
            self.lengths[group][:] = self.live.of(group).lengths
        await super().resume()

    async def drop_group(self, group: ev.GroupId) -> None:
        self.live.give_up(group)
        self.held.pop(group, None)
        await super().drop_group(group)


def system(schedule: Schedule, order: Any) -> System:
    """Constant costs; latencies of rewards, so that no two groups end at one moment."""
    made = toy_system(
        schedule,
        batch=4,
        in_flight=7,
        steps=STEPS,
        complete=True,
        order=order,
        samples=3,
        make_engine=lambda _number, _seed, record: RevisableToy(TOKEN_S, None, record),
        training=PerToken(1e-4),
        weights=WeightSync(export_s=3.3, delay_s=2.6, load_s=7.1),
    )
    slow = Latencies(lambda generator, size: generator.exponential(9.0, size))
    return replace(made, reward=slow)


def live_responses(folder: Path, of: System) -> tuple[Live, Learning]:
    config = small(folder, *SORTING, "gconfig.n_samples=3", f"total_train_steps={STEPS}", "seed=7")
    learning = Learning()
    policy = Policy(resolve_cosim(config))
    return Live(policy, learning, of, seed=SEED, tokens_per_token=EACH), learning


def run_pipeline(of: System, live: Live) -> Entries:
    told = Clocked()

    async def go() -> ev.Finish:
        events: asyncio.Queue[ev.Event | UserRequest] = asyncio.Queue()
        started = ev.RunStarted(tuple(range(of.engines)))
        performer = CosimPerformer(of, None, live=live)
        return await drive(Coordinator(of.limits), performer, started, events, told)

    run_virtually(go())
    return told.entries


def run_simulated(of: System, live: Live) -> Entries:
    records: list[Record] = []
    run_system(of, SEED, records.append, responses=live)
    return [
        (record.t_s, record.event if isinstance(record, EventRecord) else record.action)
        for record in records
        if isinstance(record, EventRecord | ActionRecord)
    ]


def _without_measures(entries: Sequence[Any]) -> list[Any]:
    steps = ev.TrainStepDone
    return [steps(one.version) if isinstance(one, steps) else one for _, one in entries]


def _measures(entries: Sequence[Any]) -> list[float]:
    steps = [one for _, one in entries if isinstance(one, ev.TrainStepDone)]
    return [of for one in steps for of in (one.drift, one.weight_deviation, one.effective_share)]


@pytest.mark.parametrize(
    ("schedule", "order"),
    [
        (synchronous(), oldest_finished_first()),
        (asynchronous(2), oldest_finished_first()),
        (asynchronous(1), strict_start_order()),
        (asynchronous(4), bounded_lag(1, "drop")),
        (asynchronous(4), bounded_lag(1, "recycle")),
        (asynchronous(4, interruptible=False), oldest_finished_first()),
        (partial_rollout(), oldest_finished_first()),
        (bounded_drift(DriftBound(max_drift=0.1, max_eta=8)), oldest_finished_first()),
    ],
    ids=lambda value: value.name,
)
def test_the_pipeline_and_the_co_simulation_do_and_learn_the_same(
    tmp_path: Path, schedule: Schedule, order: Any
) -> None:
    of = system(schedule, order)
    (one, learned), (other, repeated) = (live_responses(tmp_path, of) for _ in range(2))
    real, simulated = run_pipeline(of, one), run_simulated(of, other)
    assert _without_measures(simulated) == _without_measures(real)
    # Batches of other sizes add in another order.
    assert _measures(simulated) == pytest.approx(_measures(real), rel=1e-3, abs=1e-5)
    assert [t_s for t_s, _ in simulated] == pytest.approx([t_s for t_s, _ in real], rel=1e-9)
    tokens = [[(t.response_tokens, t.versions) for t in b] for b in learned.batches]
    assert [[(t.response_tokens, t.versions) for t in b] for b in repeated.batches] == tokens
    assert len(learned.batches) == STEPS
    interrupted = any(isinstance(entry, ev.Interrupt) for _, entry in simulated)
    several = any(len(set(versions)) > 1 for batch in tokens for _, versions in batch)
    assert several == interrupted == (schedule.name != "synchronous" and schedule.interrupts)
