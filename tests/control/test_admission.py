"""Eq. 3 of the paper, whole and fractional, and the other limits of starts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.capacity import open_slots
from areal_lab.control.admission import lag_bound, start_limit, whole_batches
from areal_lab.control.schedule import asynchronous, partial_rollout, synchronous


@given(st.integers(0, 50), st.integers(0, 20), st.integers(1, 40))
def test_the_limit_is_the_largest_count_that_eq_3_admits(version: int, eta: int, size: int) -> None:
    limit = asynchronous(eta).admissible_groups(version, size)
    assert (limit - 1) // size <= version + eta
    assert limit // size > version + eta


def test_a_fraction_is_at_most_that_part_of_a_batch_ahead() -> None:
    assert synchronous().admissible_groups(0, 100) == 100
    assert asynchronous(0.5).admissible_groups(0, 100) == 150
    assert asynchronous(0.5).admissible_groups(3, 100) == 450
    assert asynchronous(2.25).admissible_groups(0, 4) == 13
    # In floats 0.29 * 100 is 28.999999999999996.
    assert asynchronous(0.29).admissible_groups(0, 100) == 129
    assert asynchronous(0.1).admissible_groups(0, 5) == 5


def test_an_infinite_eta_admits_everything() -> None:
    assert asynchronous(math.inf).admissible_groups(0, 8) == math.inf
    assert partial_rollout().admissible_groups(0, 8) == math.inf


@pytest.mark.parametrize("eta", [-1, -0.1, math.nan, -math.inf])
def test_an_invalid_eta_is_refused(eta: float) -> None:
    with pytest.raises(ValueError, match="a staleness bound is a number >= 0"):
        asynchronous(eta)


def test_a_finite_run_starts_no_more_than_it_can_train_on() -> None:
    endless = start_limit(asynchronous(4), version=2, batch_groups=8, train_steps=None)
    assert endless == 7 * 8
    assert start_limit(asynchronous(4), version=2, batch_groups=8, train_steps=5) == 5 * 8
    unbounded = asynchronous(math.inf)
    assert start_limit(unbounded, version=0, batch_groups=8, train_steps=5) == 5 * 8
    assert start_limit(unbounded, version=0, batch_groups=8, train_steps=None) == math.inf


def test_slots_are_the_smaller_room_and_never_negative() -> None:
    assert open_slots(started=10, in_flight=3, limit=16, max_in_flight=4) == 1
    assert open_slots(started=15, in_flight=3, limit=16, max_in_flight=9) == 1
    assert open_slots(started=20, in_flight=3, limit=16, max_in_flight=9) == 0
    assert open_slots(started=20, in_flight=12, limit=math.inf, max_in_flight=9) == 0
    assert open_slots(started=20, in_flight=2, limit=math.inf, max_in_flight=9) == 7


def test_batches_are_completed_upwards() -> None:
    assert [whole_batches(started, 4) for started in (0, 1, 4, 5)] == [0, 4, 4, 8]


def test_the_lag_bound_is_eta_rounded_up() -> None:
    assert [lag_bound(asynchronous(eta)) for eta in (0, 0.2, 1, 1.5)] == [0, 1, 1, 2]
    assert lag_bound(asynchronous(math.inf)) == math.inf
