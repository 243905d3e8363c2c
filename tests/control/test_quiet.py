"""A caller that starts groups itself, and reports many ends at once, gets the same run."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.control import events as ev
from areal_lab.control.coordinator import Coordinator, Limits
from areal_lab.control.order import bounded_lag, oldest_finished_first, strict_start_order
from areal_lab.control.routing import round_robin
from areal_lab.control.sampling import DynamicSampling
from areal_lab.control.schedule import SCHEDULES, lag_bound, schedule_named

ENGINES = 3


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    eta = draw(st.sampled_from([0, 0.5, 1, 3, math.inf]))
    schedule = schedule_named(
        draw(st.sampled_from(SCHEDULES)), eta=eta, interruptible=draw(st.booleans())
    )
    parts = 1 if schedule.carry_over else draw(st.sampled_from([1, 2]))
    ahead = lag_bound(schedule)
    return Limits(
        batch_groups=2 * draw(st.integers(1, 3)),
        batch_parts=parts,
        max_in_flight=draw(st.integers(1, 9)),
        schedule=schedule,
        order=draw(
            st.sampled_from([oldest_finished_first(), strict_start_order(), bounded_lag(ahead)])
        ),
        train_steps=draw(st.sampled_from([None, 6])),
    )


class Pair:
    """A coordinator that gets every event, and one whose caller starts the groups."""

    def __init__(self, of: Limits) -> None:
        self.every, self.leaves = Coordinator(of), Coordinator(of)
        self.leaves.leave_starts()
        self.running: dict[int, ev.StartGroup] = {}
        self.open: list[ev.Event] = []
        """Events that work in progress will end with."""
        self.over = False

    def tell(self, event: ev.Event) -> None:
        actions = self.every.handle(event)
        started = [one for one in actions if isinstance(one, ev.StartGroup)]
        others = [one for one in actions if not isinstance(one, ev.StartGroup)]
        assert [*self.leaves.handle(event)] == others
        assert self.leaves.open_starts == len(started)
        self.leaves.follow([one.engine for one in started], [], self.every.engine_loads)
        assert self.leaves.counts == self.every.counts
        self.running |= {start.group: start for start in started}
        for action in others:
            match action:
                case ev.Train(version, _, rest):
                    done = ev.TrainPartDone if rest else ev.TrainStepDone
                    self.open.append(done(version + 1))
                case ev.PushWeights(version):
                    self.open.append(ev.WeightsPushed(version))
                case ev.Save(version):
                    self.open.append(ev.CheckpointDone(version))
                case ev.Drop(group):
                    self.running.pop(group, None)
                case ev.Finish():
                    self.over = True
                case _:
                    pass

    def finished(self, group: int) -> ev.GroupFinished:
        version = self.running.pop(group).version
        return ev.GroupFinished(group, version, version)

    def end_quietly(self, chance: random.Random) -> int:
        """End as many groups as need no decision; returns their number."""
        quiet, counts = self.leaves.quiet(), self.leaves.counts
        ends = int(min(quiet.ends, chance.randrange(1, 6), len(self.running) - 1))
        started: list[ev.StartGroup] = []
        ended: list[int] = []
        for _ in range(ends):
            if len(self.running) < 2:
                break
            group = chance.choice(sorted(self.running))
            actions = self.every.handle(self.finished(group))
            ended.append(group)
            may_start = counts.started + len(started) < quiet.start_limit
            assert [type(one) for one in actions] == [ev.StartGroup] * may_start
            for one in actions:
                assert isinstance(one, ev.StartGroup)
                started.append(one)
                self.running[one.group] = one
        self.leaves.follow([one.engine for one in started], ended, self.every.engine_loads)
        assert self.leaves.counts == self.every.counts
        assert self.leaves.engine_loads == self.every.engine_loads
        return len(ended)


def run(of: Limits, seed: int) -> int:
    """Groups that ended without a decision."""
    chance, pair, quietly = random.Random(seed), Pair(of), 0
    pair.tell(ev.RunStarted(tuple(range(ENGINES))))
    for _ in range(120):
        if pair.over:
            break
        what = chance.random()
        if what < 0.5 and len(pair.running) > 1:
            quietly += pair.end_quietly(chance)
        elif what < 0.8 and pair.running:
            pair.tell(pair.finished(chance.choice(sorted(pair.running))))
        elif pair.open:
            pair.tell(pair.open.pop(chance.randrange(len(pair.open))))
        elif what > 0.97:
            request = ev.ResumeRequested() if pair.every.paused else ev.PauseRequested()
            pair.tell(request)
    if not pair.over:
        pair.tell(ev.StopRequested())
    return quietly


@given(limits(), st.integers(0, 2**32))
def test_ends_that_need_no_decision_lead_to_starts_alone(of: Limits, seed: int) -> None:
    run(of, seed)


def test_most_ends_need_no_decision() -> None:
    of = Limits(batch_groups=40, max_in_flight=64, schedule=schedule_named("asynchronous", eta=4))
    assert run(of, 1) > 60


def test_starts_that_only_single_events_tell_cannot_be_left_to_the_caller() -> None:
    usual = Limits(batch_groups=4, max_in_flight=4)
    for name, of in {
        "routing": replace(usual, routing=round_robin()),
        "order.on_late": replace(usual, order=bounded_lag(1, "drop")),
        "group_slots": replace(usual, group_slots=2),
        "sampling": replace(usual, sampling=DynamicSampling(max_filtered=4)),
        "weights_offered": replace(usual, weights_offered=True),
    }.items():
        with pytest.raises(ValueError, match=name):
            Coordinator(of).leave_starts()


def test_a_paused_run_and_one_that_ends_are_not_quiet() -> None:
    of = Limits(batch_groups=4, max_in_flight=4, schedule=schedule_named("asynchronous", eta=1))
    for request in (ev.PauseRequested(), ev.StopRequested()):
        pair = Pair(of)
        pair.tell(ev.RunStarted(tuple(range(ENGINES))))
        assert pair.leaves.quiet().ends == 3
        pair.tell(request)
        assert pair.leaves.quiet() == (0, 0)
        assert pair.leaves.open_starts == 0
