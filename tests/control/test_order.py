"""Batch orders alone, against the plain rules, and what they say while they wait."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lab.control.order import (
    BatchOrder,
    bounded_lag,
    oldest_finished_first,
    strict_start_order,
)
from tests.reference.order import batch

ORDERS = [
    oldest_finished_first(),
    strict_start_order(),
    bounded_lag(2),
    bounded_lag(3.9),
    bounded_lag(math.inf),
    bounded_lag(1, "drop"),
    bounded_lag(1, "recycle"),
]


@given(st.data(), st.sampled_from(ORDERS), st.integers(1, 4), st.integers(1, 3))
@settings(max_examples=300)
def test_a_backlog_decides_as_the_plain_rule(
    data: st.DataObject, order: BatchOrder, part: int, parts: int
) -> None:
    size = part * parts
    backlog = order.make_backlog(size)
    running: dict[int, int] = {}
    finished: dict[int, int] = {}
    version = group = 0
    rest = size - part

    def rule(
        order: BatchOrder, finished: dict[int, int], running: dict[int, int]
    ) -> tuple[int, ...] | None:
        return batch(
            order, finished, running, trained=version, batch_groups=size, part=part, rest=rest
        )

    for what in data.draw(st.lists(st.sampled_from("sssfffffrlvv"), min_size=25, max_size=80)):
        taken = size - part - rest
        untrained = len(running) + len(finished) + taken
        if what == "s" and untrained < 3 * size:  # eq. 3 with eta = 2, engines at `version`
            backlog.started(group, version)
            running[group] = version
            group += 1
        elif what == "v" and (chosen := rule(order, finished, running)):
            assert backlog.ready(version, part, rest)
            assert backlog.take(part) == chosen
            for each in chosen:
                del finished[each]
            if rest:
                rest -= part
                continue
            version, rest = version + 1, size - part
            late = backlog.late(version)
            oldest = version - order.max_lag if order.drops_late else -math.inf
            assert late == sorted(g for g, v in (running | finished).items() if v < oldest)
            for each in late:
                running.pop(each, None)
                finished.pop(each, None)
        elif what in "frl" and running:
            one = data.draw(st.sampled_from(sorted(running)))
            start = running[one]
            if what == "f":
                backlog.finished(one, start)
                finished[one] = running.pop(one)
            elif what == "r":
                backlog.removed(one, start)
                del running[one]
            else:
                backlog.restarted(one, start, version)
                running[one] = version
        expected = rule(order, finished, running)
        assert backlog.ready(version, part, rest) == (expected is not None)
        assert backlog.waiting_for(version, part, rest)


def test_the_oldest_is_the_one_with_the_oldest_version() -> None:
    backlog = oldest_finished_first().make_backlog(2)
    for group, version in ((0, 0), (1, 0), (2, 1)):
        backlog.started(group, version)
    backlog.restarted(0, 0, 3)
    for group, version in ((2, 1), (0, 3), (1, 0)):
        backlog.finished(group, version)
    assert backlog.take(2) == (1, 2)


def test_waiting_is_described_in_words() -> None:
    strict = strict_start_order().make_backlog(2)
    for group in range(3):
        strict.started(group, 0)
    strict.finished(1, 0)
    assert strict.waiting_for(4, 2) == "1 of 2 groups for step 5"
    strict.finished(2, 0)
    assert strict.waiting_for(4, 2) == "group 0, the oldest, to end"
    bounded = bounded_lag(4).make_backlog(1)
    for group in range(3):
        bounded.started(group, 0)
    bounded.finished(1, 0)
    assert not bounded.ready(4, 1)
    assert bounded.waiting_for(4, 1).startswith("2 groups started at version 0 or earlier to end")


def test_orders_compare_by_what_they_say() -> None:
    assert bounded_lag(2) == bounded_lag(2.7)
    assert bounded_lag(2) != bounded_lag(3)
    assert bounded_lag(2) != bounded_lag(2, "drop")


@pytest.mark.parametrize("lag", [-1, math.nan])
def test_an_invalid_lag_bound_is_refused(lag: float) -> None:
    with pytest.raises(ValueError, match="a lag is a number >= 0"):
        bounded_lag(lag)
