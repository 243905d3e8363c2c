"""The ledger agrees with a plain account of a run, after each event of any run."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lab.control import events as ev
from areal_lab.control.coordinator import Coordinator, Limits
from areal_lab.control.frontier import recovered_start
from areal_lab.control.ledger import (
    LagParts,
    Ledger,
    TokenCounts,
    lag_parts,
    lag_percentile,
)
from areal_lab.control.schedule import asynchronous
from tests.control.shell import Shell
from tests.control.test_coordinator_properties import SEEDS, limits


class Account(Shell):
    """A world that reports tokens, and keeps a row per group and sample instead of counters."""

    def __init__(self, limits: Limits, random: Random, **more: object) -> None:
        self.ledger = Ledger()
        self.random = random
        self.tokens: dict[ev.GroupId, int] = {}
        self.firsts: dict[ev.GroupId, tuple[ev.Version, ...]] = {}
        self.entered: dict[ev.GroupId, ev.Version] = {}
        self.twice = 0
        self.thrown_away = 0
        """Tokens of recycled groups, whose next attempts have others."""
        self.offered_before: Counter[int] = Counter()
        self.reasons: dict[ev.GroupId, str] = {}
        self.lags_of: list[tuple[LagParts, int]] = []
        super().__init__(limits, **more)  # type: ignore[arg-type]  # passed on as they are

    def tell(self, event: ev.Event) -> tuple[ev.Action, ...]:
        before = set(self.running)
        match event:
            case ev.GroupFinished(group) | ev.GroupFiltered(group):
                self._report(group)
            case ev.EngineLost(engine, tokens_kept=False):
                for home, _ in [one for one in self.running.values() if one[0] == engine]:
                    assert home == engine
                    lost = self.random.randrange(5)
                    self.twice += lost
                    self.ledger.report_twice(lost)
            case _:
                pass
        self.ledger.event(event)
        if isinstance(event, ev.GroupFinished):
            self.entered[event.group] = self.trained
        if isinstance(event, ev.GroupFiltered):
            self.reasons[event.group] = event.reason
        actions = super().tell(event)
        for action in actions:
            self.ledger.action(action)
            if isinstance(action, ev.Drop):
                self.reasons[action.group] = action.reason
                if action.group in before and action.group not in self.tokens:
                    self.tokens[action.group] = self.random.randrange(9)
                    self.ledger.report(action.group, {}, self.tokens[action.group])
                if action.reason == ev.RECYCLED:
                    self.thrown_away += self.tokens.pop(action.group, 0)
                    del self.reasons[action.group]
                    entered = self.entered.pop(action.group, None)
                    if entered is not None:
                        self.offered_before.update(entered - v for v in self.firsts[action.group])
            if isinstance(action, ev.Train):
                self.lags_of += [
                    (lag_parts(first, self.entered[group], action.version), action.version - first)
                    for group in action.groups
                    for first in self.firsts[group]
                ]
        self.check_ledger()
        return actions

    def _report(self, group: ev.GroupId) -> None:
        home = self.running.get(group)
        first = self.homeless[group] if home is None else home[1]
        assert first is not None
        others = self.random.choices(range(first, self.pushed + 1), k=2)
        self.firsts[group] = (first, *others)
        self.tokens[group] = self.random.randrange(100)
        self.ledger.report(group, Counter(self.firsts[group]), self.tokens[group])

    def check_ledger(self) -> None:
        counts = self.ledger.tokens()
        assert counts.unexplained == 0
        of = dict.fromkeys(("trained", "filtered", "dropped", ""), 0)
        dropped: Counter[str] = Counter()
        for group, tokens in self.tokens.items():
            of[self.fate.get(group, "")] += tokens
            if group in self.reasons:
                dropped[self.reasons[group]] += tokens
        assert counts == TokenCounts(
            generated=sum(of.values()) + self.twice + self.thrown_away,
            trained=of["trained"],
            waiting=of[""],
            dropped=counts.dropped,
            generated_twice=self.twice,
        )
        dropped[ev.RECYCLED] += self.thrown_away
        assert {r: n for r, n in counts.dropped.items() if n} == {
            reason: n for reason, n in dropped.items() if n
        }
        total = self.ledger.total
        assert total.before_queue == Counter(parts.before_queue for parts, _ in self.lags_of)
        assert total.in_queue == Counter(parts.in_queue for parts, _ in self.lags_of)
        assert all(parts.lag == lag for parts, lag in self.lags_of)
        assert total.offered == self.offered_before + Counter(
            entered - first
            for group, entered in self.entered.items()
            for first in self.firsts[group]
        )


@given(limits(), SEEDS, st.integers(1, 4), st.sampled_from([0.0, 0.2]))
@settings(max_examples=1000)
def test_the_ledger_is_exact_after_each_event(
    limits: Limits, seed: int, engines: int, disturb: float
) -> None:
    random = Random(seed)
    account = Account(limits, random, engines=engines)
    account.run(random, events=150, disturb=disturb, ask=disturb / 2)


@given(limits(), SEEDS, st.integers(1, 100))
@settings(max_examples=200)
def test_the_counts_of_steps_sum_to_those_of_the_run(
    limits: Limits, seed: int, events: int
) -> None:
    random = Random(seed)
    account = Account(limits, random)
    before: Counter[int] = Counter()
    waited: Counter[int] = Counter()
    batch: tuple[ev.GroupId, ...] = ()
    for _ in range(events):
        if account.over is not None:
            break
        actions = account.tell(random.choice(account.possible()))
        for action in actions:
            if isinstance(action, ev.Train):
                batch = batch + action.groups
                if not action.rest:
                    step = account.ledger.step
                    assert step.before_queue.total() == 3 * len(batch)
                    before += step.before_queue
                    waited += step.in_queue
                    batch = ()
    if not batch:
        assert (before, waited) == (
            account.ledger.total.before_queue,
            account.ledger.total.in_queue,
        )


def test_the_lag_of_a_sample_is_the_sum_of_its_parts() -> None:
    parts = lag_parts(3, 5, 9)
    assert parts == (2, 4)
    assert parts.lag == 6
    for versions in ((4, 3, 9), (3, 10, 9)):
        with pytest.raises(ValueError, match="must not decrease"):
            lag_parts(*versions)


def test_a_run_by_hand() -> None:
    ledger = Ledger()
    ledger.event(ev.RunStarted((0,)))
    ledger.report(0, {0: 2}, 10)
    ledger.event(ev.GroupFinished(0, 0, 0))
    ledger.action(ev.Train(0, (0,)))
    ledger.event(ev.TrainStepDone(1))
    ledger.report(1, {0: 1, 1: 1}, 20)  # its second sample began after the push
    ledger.event(ev.GroupFinished(1, 0, 1))
    ledger.event(ev.TrainStepDone(2))
    ledger.action(ev.Drop(2, "lag above 1"))  # it runs
    ledger.report(2, {}, 3)
    ledger.action(ev.Train(2, (1,)))
    assert ledger.step.before_queue == {1: 1, 0: 1}
    assert ledger.step.in_queue == {1: 2}
    assert ledger.step.offered == {1: 1, 0: 1}
    assert ledger.step.means == {"before_queue": 0.5, "in_queue": 1.0, "offered": 0.5}
    assert ledger.tokens() == TokenCounts(
        generated=33, trained=30, dropped={"lag above 1": 3}, waiting=0, generated_twice=0
    )


def test_the_end_of_a_dropped_group_may_come_late() -> None:
    ledger = Ledger()
    ledger.report(0, {0: 1}, 10)
    ledger.action(ev.Drop(0, "run ended"))
    ledger.event(ev.GroupFinished(0, 0, 0))
    ledger.action(ev.Drop(1, "run ended"))
    ledger.report(1, {0: 1}, 5)
    ledger.event(ev.GroupFiltered(1, "no signal"))
    assert ledger.tokens() == TokenCounts(generated=15, dropped={"run ended": 15})
    assert not ledger.total.offered


def test_a_group_that_starts_over_was_generated_twice() -> None:
    ledger = Ledger()
    ledger.report(0, {0: 1}, 10)
    ledger.report(0, {1: 1}, 12)
    assert ledger.tokens() == TokenCounts(generated=22, waiting=12, generated_twice=10)
    for report in (lambda: ledger.report(1, {}, -1), lambda: ledger.report_twice(-1)):
        with pytest.raises(ValueError, match="must be >= 0"):
            report()


def test_a_recovery_keeps_waiting_tokens_and_counts_the_others_twice() -> None:
    ledger = Ledger()
    ledger.event(ev.RunStarted((0,)))
    for group in range(3):
        ledger.report(group, {0: 1}, 10)
        ledger.event(ev.GroupFinished(group, 0, 0))
    ledger.action(ev.Train(0, (0,)))  # killed before it ended
    kept = ev.RunStarted((0,), 0, 3, (0, 1, 2), (0, 0, ev.STARTS_OVER), (1, 1, 2))
    ledger.event(kept)
    assert ledger.tokens() == TokenCounts(generated=30, waiting=20, generated_twice=10)
    assert not ledger.total.before_queue
    ledger.event(ev.GroupFinished(1, 0, 0))
    assert ledger.total.offered == {0: 3}  # each once
    ledger.action(ev.Drop(0, "run ended"))  # it runs again, and ends late
    ledger.event(ev.GroupFinished(0, 0, 0))
    assert ledger.tokens().waiting == 10


def test_a_returned_batch_waits_again_with_its_lag_and_its_tokens() -> None:
    limits = Limits(batch_groups=1, max_in_flight=4, schedule=asynchronous(4), weights_offered=True)
    coordinator, ledger = Coordinator(limits), Ledger()

    def tell(event: ev.Event) -> None:
        ledger.event(event)
        for action in coordinator.handle(event):
            ledger.action(action)

    def finish(group: ev.GroupId) -> None:
        ledger.report(group, {0: 2}, 10)
        tell(ev.GroupFinished(group, 0, 0))

    tell(ev.RunStarted((0,)))
    finish(0)
    tell(ev.TrainStepDone(1))  # the program takes the next batch without new weights
    finish(1)  # enters at version 1, and is given to the trainer
    assert ledger.tokens() == TokenCounts(generated=20, trained=20)
    tell(ev.BatchReturned((1,)))
    assert (ledger.version, ledger.tokens().unexplained) == (1, 0)
    assert ledger.step.before_queue == {1: 2}, "the returned group is trained on at once"
    tell(ev.BatchReturned((0,), (0,)))  # lost, one version back
    assert ledger.version == 0
    assert ledger.tokens() == TokenCounts(generated=20, trained=10, generated_twice=10)
    assert (ledger.total.before_queue, ledger.total.in_queue) == ({1: 2}, {0: 2})
    with pytest.raises(ValueError, match="no batch that the trainer has"):
        ledger.event(ev.BatchReturned((7,)))


def test_a_recovered_run_has_the_ledger_of_its_log() -> None:
    random = Random(3)
    limits = Limits(
        batch_groups=2, max_in_flight=6, train_steps=9, save_every_steps=2, schedule=asynchronous(2)
    )
    account = Account(limits, random)
    while account.newest_save is None or account.training:
        account.tell(random.choice(account.possible()))
    frontier = account.coordinator.frontier()
    waiting = {one.group: one for one in frontier.open if one.finished}
    started = recovered_start(frontier, (0, 1), kept=set(waiting))
    before = account.ledger.tokens()
    account.ledger.event(started)
    after = account.ledger.tokens()
    assert after == before  # all that waited is kept; what ran was not reported yet


@given(
    st.dictionaries(st.integers(0, 9), st.integers(0, 30)),
    st.sampled_from([0.05, 0.5, 0.95, 1.0]),
)
def test_a_percentile_of_a_histogram_is_that_of_its_values(
    lags: dict[int, int], share: float
) -> None:
    values = [lag for lag, times in lags.items() for _ in range(times)]
    expected = np.quantile(values, share, method="inverted_cdf") if values else 0
    assert lag_percentile(lags, share) == expected


def test_what_the_end_cuts_off_is_not_thrown_away() -> None:
    """58 % of a run whose trainer uses 38.6 of 92.7 thousand tokens a second."""
    dropped = {"lag above 1": 50_000, ev.RUN_ENDED: 9_000}
    tokens = TokenCounts(
        generated=105_700, trained=38_600, waiting=4_000, dropped=dropped, generated_twice=4_100
    )
    assert tokens.unexplained == 0
    assert tokens.thrown_away == pytest.approx(0.58, abs=0.005)
    assert TokenCounts().thrown_away == 0
