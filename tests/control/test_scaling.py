from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.control.coordinator import Coordinator, Counts
from areal_lab.control.events import GroupFinished, RunStarted, StartGroup, TrainStepDone
from areal_lab.control.limits import Limits
from areal_lab.control.scaling import (
    Learned,
    ScalingRule,
    ScalingWatch,
    Window,
    engines_wanted,
)
from areal_lab.control.schedule import asynchronous

SHARE = st.floats(0, 1)
RULES = st.tuples(st.integers(1, 20), st.integers(0, 40), st.floats(0.01, 0.3)).map(
    lambda of: ScalingRule(min_engines=of[0], max_engines=of[0] + of[1], tolerance=of[2])
)
WINDOWS = st.builds(
    Window, waiting=SHARE, held_back=SHARE, drained=st.floats(-1, 1), remaining_s=st.just(math.inf)
)


@dataclass(frozen=True)
class Load:
    """A constant load: groups of so much work, a trainer, and engines that run them at once."""

    needed: float
    """Engines whose groups come as fast as the trainer trains on them."""
    batching: float = 0.0
    """Tokens per second of n engines are n / (1 + batching * n): fewer have larger batches."""
    latency: float = 0.0
    """Share of the time that the trainer waits however many engines there are."""

    def window(self, engines: int) -> Window:
        def speed(n: float) -> float:
            return n / (1 + self.batching * n)

        waiting = max(0.0, self.latency, 1 - speed(engines) / speed(self.needed))
        return Window(waiting=waiting, held_back=float(waiting == 0))


LOADS = st.builds(Load, st.floats(1, 60), st.sampled_from([0.0, 0.01, 0.03]))


def course(rule: ScalingRule, load: Load, engines: int, windows: int = 200) -> list[int]:
    """Engines in each window under a constant load."""
    learned, seen = Learned(), [engines]
    for _ in range(windows):
        engines, learned = engines_wanted(rule, engines, load.window(engines), learned)
        seen.append(engines)
    return seen


@given(RULES, LOADS, st.integers(0, 40))
def test_a_constant_load_comes_to_rest_at_enough_engines(
    rule: ScalingRule, load: Load, more: int
) -> None:
    start = min(rule.min_engines + more, rule.max_engines)
    seen = course(rule, load, start)
    last = seen[-1]
    assert seen[100:] == [last] * len(seen[100:])
    changes = sum(a != b for a, b in pairwise(seen))
    assert changes <= 4 * math.log2(max(rule.max_engines, 2)) + 8
    # What is enough within the tolerance, or the most; and never far more than that.
    assert load.window(last).waiting <= rule.tolerance or last == rule.max_engines
    least = next(
        (n for n in range(1, 200) if load.window(n).waiting <= rule.tolerance), rule.max_engines
    )
    most = max(math.ceil(load.needed), math.ceil(least * 1.15) + 2)
    assert last <= max(rule.min_engines, most)


@given(RULES, LOADS, st.data())
def test_growth_does_not_pass_what_is_needed(
    rule: ScalingRule, load: Load, data: st.DataObject
) -> None:
    engines = data.draw(st.integers(rule.min_engines, rule.max_engines))
    wanted, _ = engines_wanted(rule, engines, load.window(engines), Learned())
    assert wanted <= max(engines, math.ceil(load.needed + 1e-6))


@given(RULES, st.integers(0, 40), st.integers(0, 10**6))
def test_there_are_finitely_many_changes_whatever_the_windows_say(
    rule: ScalingRule, more: int, seed: int
) -> None:
    random = Random(seed)
    engines = min(rule.min_engines + more, rule.max_engines)
    windows = [
        Window(
            waiting=random.random() ** 2,
            held_back=random.random() + 0.3,
            drained=random.uniform(-0.2, 0.2),
        )
        for _ in range(400)
    ]
    learned, changes, unavoidable, raised = Learned(), 0, 0.0, 0
    for window in windows:
        before, known = engines, learned.too_few
        engines, learned = engines_wanted(rule, engines, window, learned)
        assert rule.min_engines <= engines <= rule.max_engines
        if learned.unavoidable > unavoidable:
            assert learned.unavoidable >= unavoidable + 0.7 * rule.tolerance
            unavoidable, raised = learned.unavoidable, raised + 1
        elif engines > before:
            assert learned.too_few > known or before == known
        changes += engines != before
    # Each growth raises one of two numbers, and between two of them there are few steps downwards.
    assert changes <= (rule.max_engines - rule.min_engines + 2) * (raised + 1) * 8


@given(RULES, WINDOWS, SHARE, st.data())
def test_more_waiting_never_means_fewer_engines(
    rule: ScalingRule, window: Window, more: float, data: st.DataObject
) -> None:
    engines = data.draw(st.integers(rule.min_engines, rule.max_engines))
    too_few = data.draw(st.integers(0, engines - 1))
    learned = Learned(too_few=too_few, group_tokens=1.0)
    waits_more = replace(window, waiting=max(window.waiting, more))
    wanted, _ = engines_wanted(rule, engines, window, learned)
    wanted_then, _ = engines_wanted(rule, engines, waits_more, learned)
    assert wanted_then >= wanted


def test_engines_that_do_not_help_go_back_and_the_rest_is_tried_fewer() -> None:
    """Where the trainer waits for the longest response, fewer engines do as well."""
    rule = ScalingRule(min_engines=1, max_engines=100)
    seen = course(rule, Load(needed=10, latency=0.2), 40)
    assert seen[1] == 50
    assert seen[2] == 40
    assert max(seen[3:]) == 30, "40 did no better than 50, so fewer are tried"
    assert 8 <= seen[-1] <= 12


def test_other_work_is_tried_again() -> None:
    rule = ScalingRule(min_engines=1, max_engines=40)
    few = Window(waiting=0.0, held_back=1.0, group_tokens=100)
    learned = Learned(too_few=9, group_tokens=100)
    assert engines_wanted(rule, 10, few, learned)[0] == 10
    assert engines_wanted(rule, 10, replace(few, group_tokens=105), learned)[0] == 10
    assert engines_wanted(rule, 10, replace(few, group_tokens=80), learned)[0] == 8


def test_what_would_come_too_late_is_not_started() -> None:
    rule = ScalingRule(min_engines=1, max_engines=40, startup_s=60)
    window = Window(waiting=0.5, held_back=0.0, remaining_s=61)
    assert engines_wanted(rule, 4, window, Learned())[0] == 8
    assert engines_wanted(rule, 4, replace(window, remaining_s=60), Learned())[0] == 4


def test_groups_that_become_fewer_keep_engines() -> None:
    """They hide for a while that there are too few engines."""
    rule = ScalingRule(min_engines=1, max_engines=40)
    window = Window(waiting=0.0, held_back=1.0, drained=0.2)
    assert engines_wanted(rule, 8, window, Learned())[0] == 8
    assert engines_wanted(rule, 8, replace(window, drained=0.0), Learned())[0] == 6


@dataclass
class Watched:
    """A coordinator of which every fact is given."""

    limits: Limits
    counts: Counts
    trainer_waits: bool = False
    held_back: bool = False


COUNTS = Counts(
    started=0,
    in_flight=0,
    finished=0,
    trained=0,
    unfilled=0,
    filtered=0,
    dropped=0,
    trained_version=0,
    pushed_version=0,
)


def test_the_watch_measures_whole_windows_after_the_first_steps() -> None:
    """eta 1: steps 1 to 3 are the run's beginning; a window is steps 4 and 5."""
    run = Watched(Limits(batch_groups=4, max_in_flight=8, schedule=asynchronous(1)), COUNTS)
    rule = ScalingRule(min_engines=1, max_engines=9, window_steps=2, cooldown_steps=1)
    watch = ScalingWatch(rule, run)
    wanted = []
    for step in range(1, 9):
        now_s = 10.0 * step
        run.trainer_waits = step <= 4 or step == 5  # a step waits from its start for 5 s
        watch.note(now_s - 5)
        run.trainer_waits = step <= 4
        watch.note(now_s)
        wanted.append(watch.step_done(now_s, engines=3, changing=False, tokens=0))
    # In the window of steps 5 and 6, the trainer waited for 5 of 20 s.
    assert wanted[:6] == [3, 3, 3, 3, 3, 4]
    run.counts = replace(COUNTS, in_flight=8)
    assert watch.step_done(90, engines=3, changing=True, tokens=0) == 3
    for step in range(4):  # two steps until what is in flight has ended, one more, and a beginning
        assert watch.step_done(100 + step, engines=4, changing=False, tokens=0) == 4
    assert watch.step_done(110, engines=0, changing=False, tokens=0) == 1


def test_the_coordinator_says_who_waits_for_whom() -> None:
    """Batches of 2, eta 1: four groups at first, and the trainer waits for the first two."""
    limits = Limits(batch_groups=2, max_in_flight=8, schedule=asynchronous(1))
    coordinator = Coordinator(limits)
    assert not coordinator.trainer_waits
    started = coordinator.handle(RunStarted((0, 1)))
    assert sum(isinstance(one, StartGroup) for one in started) == 4
    assert coordinator.trainer_waits
    assert coordinator.held_back
    coordinator.handle(GroupFinished(0, 0, 0))
    coordinator.handle(GroupFinished(1, 0, 0))
    assert not coordinator.trainer_waits
    assert coordinator.held_back
    coordinator.handle(TrainStepDone(1))
    assert coordinator.trainer_waits
    full = Coordinator(replace(limits, max_in_flight=4))
    full.handle(RunStarted((0,)))
    assert not full.held_back, "engines that are full are not held back"


@pytest.mark.parametrize(
    "fields",
    [
        {"min_engines": 0},
        {"min_engines": 3},
        {"window_steps": 0},
        {"cooldown_steps": -1},
        {"tolerance": 0},
        {"startup_s": math.inf},
    ],
)
def test_impossible_rules_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        ScalingRule(**{"min_engines": 1, "max_engines": 2, **fields})  # type: ignore[arg-type]
