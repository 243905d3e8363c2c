"""Whatever the world does, four things hold after every event; `shell.py` checks them."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from areal_lab.control import events as ev
from areal_lab.control.coordinator import Coordinator, Limits, replay
from areal_lab.control.order import bounded_lag, oldest_finished_first, strict_start_order
from areal_lab.control.routing import least_loaded, round_robin, sticky
from areal_lab.control.schedule import (
    SCHEDULES,
    OnNewWeights,
    Schedule,
    asynchronous,
    lag_bound,
    one_step_overlap,
    partial_rollout,
    schedule_named,
    synchronous,
)
from areal_lab.runlog.records import ActionRecord, EventRecord, decode, encode
from areal_lab.runlog.replay import limits_from_fields, limits_to_fields
from tests.control.shell import ETAS, Shell

BY_NAME = [
    schedule_named(name, eta=eta, interruptible=pause)
    for name in SCHEDULES
    for eta in ETAS
    for pause in (True, False)
]
ANY_SCHEDULE = [
    *dict.fromkeys(BY_NAME),  # each once: some ignore eta, most ignore the pause
    Schedule(name="uneven overlap", eta=0.5, on_new_weights=OnNewWeights.FINISH_BATCH),
    Schedule(name="unbounded overlap", eta=math.inf, on_new_weights=OnNewWeights.FINISH_BATCH),
]
SEEDS = st.integers(0, 2**32)


@st.composite
def limits(draw: st.DrawFn, *, endless: bool = False) -> Limits:
    """Any combination that `Limits` accepts."""
    schedule = draw(st.sampled_from(ANY_SCHEDULE))
    bound = lag_bound(schedule)
    orders = [
        oldest_finished_first(),
        strict_start_order(),
        bounded_lag(bound),
        bounded_lag(bound + 1),
        *[bounded_lag(lag, late) for lag in (0, 1, 2) for late in ("drop", "recycle")],
    ]
    parts = 1 if schedule.carry_over else draw(st.sampled_from([1, 1, 2, 3]))
    hybrid = parts == 1 and schedule.on_new_weights is OnNewWeights.INTERRUPT
    return Limits(
        hybrid_engines=draw(st.sampled_from([0, 0, 1, 2])) if hybrid else 0,
        batch_groups=parts * draw(st.integers(1, 5 if parts == 1 else 2)),
        batch_parts=parts,
        max_in_flight=draw(st.integers(1, 20)),
        group_slots=draw(st.sampled_from([1, 1, 2, 3])),
        train_steps=None if endless else draw(st.integers(1, 8)),
        save_every_steps=draw(st.integers(0, 3)),
        schedule=schedule,
        order=draw(st.sampled_from(orders)),
        routing=draw(st.sampled_from([least_loaded(), round_robin(), sticky()])),
    )


@given(limits(), SEEDS, st.integers(1, 4))
@settings(max_examples=250)
def test_an_undisturbed_run_ends_complete_and_wastes_nothing(
    limits: Limits, seed: int, engines: int
) -> None:
    shell = Shell(limits, engines=engines)
    shell.run(Random(seed), events=5000)
    assert shell.over == "complete"
    assert shell.actions[-1] == ev.Finish("complete")
    assert len(shell.batches) == limits.train_steps == shell.pushed
    saves = [action.version for action in shell.actions if isinstance(action, ev.Save)]
    assert saves[-1] == limits.train_steps
    assert sorted(set(saves)) == saves
    if limits.order.on_late != "drop":
        assert set(shell.fate.values()) == {"trained"}
    assert not shell.recycled


@given(limits(), SEEDS, st.integers(1, 4), st.integers(0, 9))
@settings(max_examples=250)
def test_a_disturbed_run_ends_complete(
    limits: Limits, seed: int, engines: int, version: int
) -> None:
    shell = Shell(limits, engines=engines, version=version, next_group=17)
    shell.run(Random(seed), events=8000, disturb=0.2)
    assert shell.over == "complete"


@given(limits(), SEEDS, st.integers(1, 4), st.sampled_from([0.0, 0.2]))
@settings(max_examples=250)
def test_a_run_of_which_much_is_asked_ends_complete(
    limits: Limits, seed: int, engines: int, disturb: float
) -> None:
    shell = Shell(limits, engines=engines)
    shell.run(Random(seed), events=8000, disturb=disturb, ask=0.3)
    assert shell.over == "complete"
    assert shell.pushed == limits.train_steps
    if limits.order.on_late != "drop" and not disturb:
        assert set(shell.fate.values()) == {"trained"}


@given(limits(), SEEDS, st.integers(0, 150), st.sampled_from([0.0, 0.1]))
@settings(max_examples=200)
def test_a_paused_run_comes_to_rest_and_loses_nothing(
    limits: Limits, seed: int, events: int, disturb: float
) -> None:
    shell, random = Shell(limits), Random(seed)
    shell.run(random, events=events, disturb=disturb, ask=disturb)
    if shell.over is not None or shell.ask(ev.PauseRequested()) is not None:
        return
    actions, fates = len(shell.actions), len(shell.fate)
    while rest := [e for e in shell.possible() if not isinstance(e, ev.ResumeRequested)]:
        shell.tell(random.choice(rest))  # what was begun
    meanwhile = shell.actions[actions:]
    assert not any(isinstance(action, ev.StartGroup | ev.Train | ev.Finish) for action in meanwhile)
    dropped = [action.reason for action in meanwhile if isinstance(action, ev.Drop)]
    assert len(shell.fate) == fates + len(dropped) - dropped.count(ev.RECYCLED)
    assert not dropped or limits.order.drops_late
    assert not any((shell.training, shell.saving, shell.pushing))
    shell.tell(ev.ResumeRequested())
    shell.run(random, events=5000)
    assert shell.over == "complete"


@given(limits(endless=True), SEEDS, st.integers(0, 120))
@settings(max_examples=100)
def test_what_is_asked_twice_is_done_once(limits: Limits, seed: int, events: int) -> None:
    shell = Shell(limits)
    shell.run(Random(seed), events=events, disturb=0.1, ask=0.1)
    for asked in (
        ev.ResumeRequested(),
        ev.PauseRequested(),
        ev.EtaRequested(limits.schedule.eta),
        ev.StopRequested(),
    ):
        if shell.over is None and shell.ask(asked) is None and shell.over is None:
            assert shell.tell(asked) == ()


@given(limits(endless=True), SEEDS, st.integers(0, 120))
@settings(max_examples=150)
def test_a_stopped_run_saves_what_it_trained_and_ends(
    limits: Limits, seed: int, events: int
) -> None:
    shell, random = Shell(limits), Random(seed)
    shell.run(random, events=events, disturb=0.1, ask=0.1)
    batches = len(shell.batches)
    for _ in range(2):  # A second request changes nothing.
        if shell.over is None:
            shell.tell(ev.StopRequested())
    shell.run(random, events=1000)
    assert shell.over == "stopped"
    assert len(shell.batches) == batches == shell.trained
    saves = [action.version for action in shell.actions if isinstance(action, ev.Save)]
    assert shell.trained == 0 or saves[-1] == shell.trained


@given(limits(endless=True), SEEDS, st.integers(0, 120))
@settings(max_examples=150)
def test_a_run_without_engines_saves_what_it_trained_and_ends(
    limits: Limits, seed: int, events: int
) -> None:
    shell, random = Shell(limits), Random(seed)
    shell.run(random, events=events, disturb=0.1, ask=0.1)
    for engine in sorted(shell.engines):
        shell.tell(ev.EngineLost(engine, tokens_kept=random.random() < 0.5))
    for engine in sorted(shell.awaited):
        assert shell.over is None
        shell.tell(ev.EngineLost(engine))
    shell.run(random, events=20)  # a step, its save and an evaluation may still end
    assert shell.over == "no engine left"
    # In the middle of a step, the weights are those of no version.
    assert shell.trained == 0 or shell.between or ev.Save(shell.trained) in shell.actions


@given(limits(endless=True), SEEDS)
@settings(max_examples=60)
def test_the_same_events_give_the_same_actions(limits: Limits, seed: int) -> None:
    shell = Shell(limits)
    shell.run(Random(seed), events=200, disturb=0.1, ask=0.1)
    assert replay(limits, shell.events) == shell.actions
    for event in shell.events:
        assert decode(encode(EventRecord(0.0, event))) == EventRecord(0.0, event)
    for action in shell.actions:
        assert decode(encode(ActionRecord(0.0, action))) == ActionRecord(0.0, action)
    assert limits_from_fields(limits_to_fields(limits)) == limits


@given(limits(endless=True), SEEDS)
@settings(max_examples=40)
def test_a_rejected_event_changes_nothing(limits: Limits, seed: int) -> None:
    shell = Shell(limits)
    shell.run(Random(seed), events=100, disturb=0.1)
    twin = Coordinator(limits)
    for event in shell.events:
        before = twin.counts
        for impossible in (ev.EngineLost(99),):
            try:
                twin.handle(impossible)
            except ValueError:
                assert twin.counts == before
        twin.handle(event)
    assert twin.counts == shell.coordinator.counts


@given(
    st.integers(1, 6),
    st.integers(1, 12),
    st.sampled_from([oldest_finished_first(), strict_start_order(), bounded_lag(0)]),
    SEEDS,
)
@settings(max_examples=60)
def test_eta_zero_is_synchronous(size: int, in_flight: int, order, seed: int) -> None:
    runs = []
    for schedule in (
        synchronous(),
        asynchronous(0),
        asynchronous(0, interruptible=False),
        partial_rollout(0),
        Schedule(name="overlap", eta=0, on_new_weights=OnNewWeights.FINISH_BATCH),
    ):
        shell = Shell(
            Limits(
                batch_groups=size,
                max_in_flight=in_flight,
                train_steps=5,
                schedule=schedule,
                order=order,
            )
        )
        shell.run(Random(seed), events=1000, disturb=0.05)
        runs.append((shell.events, shell.actions))
        assert shell.over == "complete"
        assert set(shell.lags) == {0}
        assert not any(isinstance(action, ev.Interrupt) for action in shell.actions)
        for number, groups in enumerate(shell.batches):
            if "filtered" not in shell.fate.values():
                assert set(groups) == set(range(number * size, (number + 1) * size))
    assert all(run == runs[0] for run in runs)


@given(st.integers(1, 5), st.integers(1, 15), SEEDS)
@settings(max_examples=60)
def test_one_step_overlap_has_one_version_per_batch_and_a_lag_of_one(
    size: int, in_flight: int, seed: int
) -> None:
    shell = Shell(
        Limits(
            batch_groups=size,
            max_in_flight=in_flight,
            train_steps=6,
            schedule=one_step_overlap(),
        )
    )
    shell.run(Random(seed), events=2000)
    lags = [set(shell.lags[n : n + size]) for n in range(0, len(shell.lags), size)]
    assert all(len(lag) == 1 for lag in lags)
    assert lags[0] == {0}
    # A batch may be fresher where generation was slow: nothing was left to overlap with.
    assert all(lag <= {0, 1} for lag in lags)


@given(limits(endless=True), SEEDS)
@settings(max_examples=60)
def test_pushed_versions_only_rise(limits: Limits, seed: int) -> None:
    shell = Shell(limits)
    shell.run(Random(seed), events=300, disturb=0.1)
    pushes = [action.version for action in shell.actions if isinstance(action, ev.PushWeights)]
    assert pushes == sorted(set(pushes))
    starts = {
        action.group: action
        for action in reversed(shell.actions)
        if isinstance(action, ev.StartGroup)
    }
    first = [starts[group].version for group in sorted(starts)]
    assert first == sorted(first)


@given(limits(endless=True), SEEDS)
@settings(max_examples=100)
def test_the_longest_sample_of_a_group_is_overtaken_by_few_groups(
    limits: Limits, seed: int
) -> None:
    """Group 0 keeps one sample until nothing else can happen, and then ends."""
    limits = replace(limits, group_slots=3)
    shell, random = Shell(limits), Random(seed)
    for _ in range(400):
        others = [
            event
            for event in shell.possible()
            if getattr(event, "group", None) != 0
            or (isinstance(event, ev.SamplesEnded) and shell.slots_of(0) > event.samples)
        ]
        if not others:
            break
        shell.tell(random.choice(others))
    if 0 in shell.running:
        # Eq. 3 counts it as started, so at most that many groups started after it.
        ahead = (shell.pushed + 1 + shell.coordinator.limits.schedule.eta) * limits.batch_groups
        assert shell.started <= ahead + 1e-9 or shell.eta_fell
        assert shell.slots_of(0) <= shell.taken <= shell.slots
        shell.tell(ev.SamplesEnded(0, shell.slots_of(0))) if shell.slots_of(0) else None
    shell.run(random, events=600)
    assert 0 not in shell.running or shell.attempts[0]
    recycled = shell.attempts[0] > 0
    assert recycled or shell.fate.get(0) in ("trained", "dropped") or 0 in shell.finished


def test_ended_samples_that_cannot_be_are_refused() -> None:
    one, three = (
        Coordinator(Limits(batch_groups=2, max_in_flight=2, group_slots=slots)) for slots in (1, 3)
    )
    for coordinator in (one, three):
        coordinator.handle(ev.RunStarted((0,)))
    with pytest.raises(ValueError, match="group_slots"):
        one.handle(ev.SamplesEnded(0, 1))
    three.handle(ev.SamplesEnded(0, 2))
    for samples in (0, 2):
        with pytest.raises(ValueError, match="1 running samples of 3 slots were expected"):
            three.handle(ev.SamplesEnded(0, samples))
    with pytest.raises(ValueError, match="group 7 is not running"):
        three.handle(ev.SamplesEnded(7, 1))
    assert [one.group for one in three.handle(ev.SamplesEnded(1, 1))] == [2]
    assert three.engine_loads == {0: 6}


def test_a_group_that_needs_fewer_slots_does_not_overtake_an_older_one() -> None:
    coordinator = Coordinator(
        Limits(batch_groups=9, max_in_flight=3, group_slots=3, routing=round_robin())
    )

    def starts(event: ev.Event) -> list[ev.GroupId]:
        actions = coordinator.handle(event)
        return [action.group for action in actions if isinstance(action, ev.StartGroup)]

    assert starts(ev.RunStarted(tuple(range(5)))) == [0, 1, 2]
    assert starts(ev.SamplesEnded(0, 3)) == [3]
    assert starts(ev.SamplesEnded(1, 2)) == []
    assert starts(ev.SamplesEnded(2, 2)) == [4]
    # One slot is free: group 0 needs three again, and group 1 the one that it had.
    assert starts(ev.EngineLost(0)) == []
    assert starts(ev.EngineLost(1, tokens_kept=True)) == []
    assert starts(ev.SamplesEnded(2, 1)) == [0]
    assert starts(ev.SamplesEnded(3, 1)) == [1]
    assert sum(coordinator.engine_loads.values()) == 3 * 3


@given(SEEDS)
@settings(max_examples=30)
@example(0)
def test_oldest_finished_first_has_no_bound_and_the_others_do(seed: int) -> None:
    lags = {}
    for order in (oldest_finished_first(), strict_start_order(), bounded_lag(2)):
        shell = Shell(
            Limits(batch_groups=2, max_in_flight=8, schedule=asynchronous(2), order=order)
        )
        random = Random(seed)
        for _ in range(400):  # Group 0 is a straggler: it ends when nothing else can happen.
            others = [e for e in shell.possible() if getattr(e, "group", None) != 0]
            if not others or shell.over:
                break
            shell.tell(random.choice(others))
        lags[order.name] = shell.trained
        shell.run(random, events=50)
        assert order.name == "oldest_finished_first" or max(shell.lags) <= 2
    assert lags["strict_start_order"] == 0
    assert lags["bounded_lag"] == 2
    assert lags["oldest_finished_first"] > 4


@given(limits(endless=True), SEEDS)
@settings(max_examples=60)
def test_a_group_that_keeps_its_tokens_keeps_the_version_it_began_with(
    limits: Limits, seed: int
) -> None:
    shell, random = Shell(limits, engines=3), Random(seed)
    shell.run(random, events=60, disturb=0.1)
    began = {group: version for group, (_, version) in shell.running.items()}
    attempts = shell.attempts.copy()
    earlier = len(shell.actions)  # a group that lost its tokens started over, with another version
    for engine in sorted(shell.engines):
        shell.tell(ev.EngineLost(engine, tokens_kept=True, returns=True))
    assert shell.over is None
    assert not shell.running
    moved = {group: version for group, version in began.items() if group in shell.homeless}
    assert {group: shell.homeless[group] for group in moved} == moved
    shell.run(random, events=150)
    later = shell.actions[earlier:]
    kept = [group for group in moved if shell.attempts[group] == attempts[group]]
    again = [a for a in later if isinstance(a, ev.StartGroup) and a.group in kept]
    assert all(action.version == moved[action.group] for action in again)


@given(limits(), SEEDS, st.sampled_from([0.0, 0.2]))
@settings(max_examples=250)
def test_engines_can_leave_the_devices_from_a_batch_to_its_weights(
    limits: Limits, seed: int, disturb: float
) -> None:
    """What turns on the same devices rely on: no group starts, and those that run are paused."""
    shell = Shell(limits)
    shell.run(Random(seed), events=3000, disturb=disturb, ask=disturb)
    begun = 0
    coordinator, interrupted = Coordinator(limits), False
    for event in shell.events:
        for action in coordinator.handle(event):
            match action:
                case ev.Train():
                    begun = action.version + 1
                    running = bool(
                        coordinator.engine_loads and sum(coordinator.engine_loads.values())
                    )
                    if limits.schedule.takes_turns and limits.batch_parts == 1 and running:
                        assert interrupted
                case ev.Interrupt():
                    interrupted = True
                case ev.Resume():
                    interrupted = False
                case ev.StartGroup() if limits.schedule.takes_turns and limits.batch_parts == 1:
                    assert coordinator.counts.pushed_version >= begun or coordinator.ending
                case _:
                    pass
