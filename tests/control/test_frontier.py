"""A run that is killed anywhere and continues trains on what an uninterrupted one trains on."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lab.control import events as ev
from areal_lab.control.coordinator import TOO_FEW_GROUPS, Coordinator, Limits
from areal_lab.control.frontier import Frontier, OpenGroup, recovered_start
from areal_lab.control.order import bounded_lag
from areal_lab.control.schedule import asynchronous
from tests.control.shell import Shell
from tests.control.test_coordinator_properties import SEEDS, limits


def killed_and_continued(
    limits: Limits, random: Random, *, kills: int, disturb: float, keep: float
) -> tuple[list[ev.GroupId], Shell]:
    """The groups that the lives of one run trained on, and its last life."""

    def unfit(group: ev.GroupId) -> bool:
        return group % 7 == 3

    kept_batches: list[tuple[ev.GroupId, ...]] = []
    frontier = Frontier(version=0, next_group=0, open=(), eta=limits.schedule.eta)
    for life in range(kills + 1):
        engines = tuple(range(random.randint(1, 4)))
        kept = {o.group for o in frontier.open if o.finished and random.random() < keep}
        started = recovered_start(frontier, engines, kept)
        shell = Shell(limits, started=started, unfit=unfit)
        events = random.randrange(150) if life < kills else 8000
        shell.run(random, events=events, disturb=disturb)
        if life < kills and random.random() < 0.3:
            end_without_engines(shell, random)
        if life < kills and shell.newest_save is not None:
            kept_batches += shell.batches[: shell.newest_save.version - frontier.version]
            frontier = shell.newest_save
    kept_batches += shell.whole_batches
    return [group for batch in kept_batches for group in batch], shell


def end_without_engines(shell: Shell, random: Random) -> None:
    """All engines are lost for good: the run saves what it has trained, and ends."""
    for engine in sorted(shell.engines | shell.awaited):
        if shell.over is None:
            shell.tell(ev.EngineLost(engine))
    shell.run(random, events=10)
    assert shell.over in ("complete", "stopped", "no engine left", TOO_FEW_GROUPS)


@given(
    limits(), SEEDS, st.integers(1, 4), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0, 0.1])
)
@settings(max_examples=250)
def test_any_kill_leaves_the_trained_prompts_as_they_are(
    limits: Limits, seed: int, kills: int, keep: float, disturb: float
) -> None:
    limits = replace(limits, save_every_steps=max(1, limits.save_every_steps))
    trained, last = killed_and_continued(
        limits, Random(seed), kills=kills, disturb=disturb, keep=keep
    )
    assert last.over == "complete"
    assert limits.train_steps is not None
    assert len(trained) == len(set(trained)) == limits.train_steps * limits.batch_groups
    if limits.order.on_late != "drop" and not disturb:
        assert not any(map(last.unfit, trained))
        uninterrupted = Shell(limits, unfit=last.unfit)
        uninterrupted.run(Random(seed + 1), events=8000)
        assert Counter(trained) == Counter(g for batch in uninterrupted.batches for g in batch)


@given(limits(), SEEDS, st.integers(0, 200))
@settings(max_examples=150)
def test_every_group_is_trained_on_or_open_or_ended_or_above_the_frontier(
    limits: Limits, seed: int, events: int
) -> None:
    shell = Shell(limits)
    shell.run(Random(seed), events=events, disturb=0.1)
    if shell.training or shell.between:
        with pytest.raises(ValueError, match="is running"):
            shell.coordinator.frontier()
        return
    frontier = shell.coordinator.frontier()
    open_groups = {one.group for one in frontier.open}
    assert open_groups | shell.fate.keys() == set(range(frontier.next_group))
    assert not open_groups & shell.fate.keys()
    assert {one.group for one in frontier.open if one.finished} == set(shell.finished)
    recycled = dict.fromkeys(shell.recycled, shell.pushed)
    started = shell.started + len(recycled)
    assert len(open_groups) + frontier.version * limits.batch_groups == started
    assert {one.group: one.version for one in frontier.open} == shell._untrained() | recycled
    assert all(
        one.attempts > shell.attempts[one.group] - (one.group in recycled) for one in frontier.open
    )


def test_a_complete_run_continues_with_more_steps() -> None:
    limits = Limits(batch_groups=2, max_in_flight=4, train_steps=2, schedule=asynchronous(1))
    shell = Shell(limits)
    shell.run(Random(1), events=100)
    assert shell.newest_save == Frontier(version=2, next_group=4, open=(), eta=1)
    more = Shell(limits, started=recovered_start(shell.newest_save, (0,), train_steps=5))
    more.run(Random(1), events=100)
    trained = [group for one in (shell, more) for batch in one.batches for group in batch]
    assert sorted(trained) == list(range(10))


def test_a_group_keeps_its_version_with_its_tokens_and_starts_over_without() -> None:
    coordinator = Coordinator(Limits(batch_groups=2, max_in_flight=2, schedule=asynchronous(2)))
    frontier = Frontier(
        version=5,
        next_group=20,
        open=(
            OpenGroup(group=14, version=4, attempts=2),
            OpenGroup(group=16, version=3, finished=True),
            OpenGroup(group=17, version=5),
        ),
        eta=2.0,
        restarted=1,
    )
    event = recovered_start(frontier, (0,), {16})
    assert event.open_versions == (ev.STARTS_OVER, 3, ev.STARTS_OVER)
    assert event.open_attempts == (3, 1, 2)
    assert event.restarted == 3
    # The engines run two groups at once, so the third waits.
    assert coordinator.handle(event) == (ev.StartGroup(14, 0, 5), ev.StartGroup(16, 0, 3))
    assert coordinator.handle(ev.GroupFinished(16, 3, 4)) == (ev.StartGroup(17, 0, 5),)
    again = coordinator.frontier()
    assert again.open == (
        OpenGroup(group=14, version=5, attempts=3),
        OpenGroup(group=16, version=3, finished=True),
        OpenGroup(group=17, version=5, attempts=2),
    )
    # 10 groups were trained on and 3 are open; eq. 3 admits 16 at version 5.
    assert coordinator.handle(ev.GroupFinished(17, 5, 5)) == (
        ev.Train(5, (16, 17)),
        ev.StartGroup(20, 0, 5),
    )


def test_a_lost_engine_counts_as_an_attempt_unless_tokens_were_kept() -> None:
    coordinator = Coordinator(Limits(batch_groups=1, max_in_flight=1, schedule=asynchronous(4)))
    coordinator.handle(ev.RunStarted((0,)))
    for kept in (True, False, False):
        coordinator.handle(ev.EngineLost(0, tokens_kept=kept, returns=True))
        coordinator.handle(ev.EngineJoined(0))
    assert coordinator.frontier().open == (OpenGroup(group=0, version=0, attempts=3),)
    assert coordinator.frontier().restarted == 2
    coordinator.handle(ev.GroupFinished(0, 0, 0))
    coordinator.handle(ev.TrainStepDone(1))
    assert [one.attempts for one in coordinator.frontier().open] == [1]


def test_a_run_that_ends_saves_no_group_that_its_next_life_could_not_train_on() -> None:
    order = bounded_lag(0, "drop")
    limits = Limits(batch_groups=1, max_in_flight=3, schedule=asynchronous(2), order=order)
    coordinator = Coordinator(limits)
    coordinator.handle(ev.RunStarted((0,)))
    coordinator.handle(ev.GroupFinished(0, 0, 0))
    coordinator.handle(ev.GroupFinished(1, 0, 0))
    coordinator.handle(ev.EngineLost(0))
    late = ev.Drop(1, "lag above 0"), ev.Drop(2, "lag above 0")
    assert coordinator.handle(ev.TrainStepDone(1)) == (*late, ev.Save(1))
    assert coordinator.frontier().open == ()


@pytest.mark.parametrize(
    ("groups", "next_group"), [((3, 2), 9), ((2, 2), 9), ((2, 9), 9), ((-1, 2), 9)]
)
def test_open_groups_ascend_below_the_next_one(groups: tuple[int, ...], next_group: int) -> None:
    opened = tuple(OpenGroup(group=group, version=0) for group in groups)
    with pytest.raises(ValueError, match="must ascend"):
        Frontier(version=1, next_group=next_group, open=opened, eta=math.inf)


def test_what_cannot_be_recovered_is_refused() -> None:
    late = (OpenGroup(group=1, version=4),)
    with pytest.raises(ValueError, match="another version"):
        Frontier(version=3, next_group=2, open=late, eta=1)
    with pytest.raises(ValueError, match="not open"):
        recovered_start(Frontier(version=0, next_group=2, open=(), eta=1), (0,), {1})
    coordinator = Coordinator(Limits(batch_groups=1, max_in_flight=1))
    with pytest.raises(ValueError, match="number of attempts"):
        coordinator.handle(ev.RunStarted((0,), 1, 2, open_groups=(1,)))
    assert coordinator.handle(ev.RunStarted((0,), 1, 2))
