"""Eq. 3 of the paper, whole and fractional, and the other limits of starts."""

from __future__ import annotations

import math
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.capacity import (
    mean_staleness_bounded,
    mean_staleness_dropping,
    open_slots,
)
from areal_lab.control.schedule import (
    asynchronous,
    lag_bound,
    partial_rollout,
    start_limit,
    synchronous,
    whole_batches,
)


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


PUBLISHED = [
    # C, B, q, rho, M, predicted and measured lag in versions (a note by Applied Compute, retold)
    (120, 240, 2, 0.63, 1.42, 1.34, 1.26),
    (128, 128, 2, 1.07, 1.44, 3.29, 3.09),
    (120, 120, 1, 0.67, 1.42, 1.95, 1.92),
]


@pytest.mark.parametrize("row", PUBLISHED, ids=str)
def test_the_mean_staleness_is_near_the_published_rows(row: tuple[float, ...]) -> None:
    c, b, q, rho, m, predicted, measured = row
    form = mean_staleness_dropping(
        in_flight=c, batch_size=int(b), queue_batches=q, rate_ratio=rho, longest_over_mean=m
    )
    assert form.lag == pytest.approx(measured, abs=0.3)
    # The inputs have two digits; the third row differs by more, and the retelling does not say why.
    assert form.lag == pytest.approx(predicted, abs=0.05 if q == 2 else 0.15)


@given(st.floats(0.1, 1e4), st.integers(1, 999), st.sampled_from([0, 1, 2, 8]), st.floats(0.01, 9))
def test_the_mean_staleness_under_eta_keeps_its_bound(
    in_flight: float, batch: int, eta: float, rho: float
) -> None:
    form = mean_staleness_bounded(in_flight=in_flight, batch_size=batch, eta=eta, rate_ratio=rho)
    assert min(form) >= 0
    assert form.lag <= eta or form.lag == pytest.approx(eta)
    if rho >= 1:
        assert form.lag == pytest.approx(eta)
    free = mean_staleness_bounded(
        in_flight=in_flight, batch_size=batch, eta=math.inf, rate_ratio=rho
    )
    if rho < 1:
        dropping = mean_staleness_dropping(
            in_flight=in_flight, batch_size=batch, queue_batches=1, rate_ratio=rho
        )
        assert free == dropping
    else:
        assert math.isinf(free.in_queue)


def test_the_mean_staleness_in_its_limits() -> None:
    """A queue of one batch at equal rates holds each group for one version; a fast engine fills
    the queue with new groups, whose age is at most half a version."""
    at = partial(mean_staleness_dropping, in_flight=64, batch_size=64)
    assert at(queue_batches=1, rate_ratio=1.0) == (1.0, 1.0)
    assert at(queue_batches=3, rate_ratio=1.0).in_queue == 3.0
    assert at(queue_batches=3, rate_ratio=1e9).in_queue == pytest.approx(0.5)
    assert at(queue_batches=3, rate_ratio=1e9).before_queue == pytest.approx(0.0, abs=1e-6)
    assert at(queue_batches=1, rate_ratio=1 - 1e-9) == pytest.approx((1.0, 1.0))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"in_flight": 0}, "in_flight is 0"),
        ({"batch_size": 0}, "batch_size 0"),
        ({"rate_ratio": 0.0}, "rate_ratio is 0.0"),
        ({"rate_ratio": math.nan}, "rate_ratio is nan"),
        ({"longest_over_mean": 0.9}, "longest_over_mean is 0.9"),
        ({"queue_batches": 0}, "queue_batches is 0"),
    ],
)
def test_the_mean_staleness_refuses_what_cannot_be(change: dict[str, float], says: str) -> None:
    fine = {"in_flight": 1, "batch_size": 1, "rate_ratio": 1.0, "queue_batches": 1}
    with pytest.raises(ValueError, match=says):
        mean_staleness_dropping(**fine | change)  # type: ignore[arg-type]  # on purpose
    bounded = {name: value for name, value in (fine | change).items() if name != "queue_batches"}
    if "queue_batches" not in change:
        with pytest.raises(ValueError, match=says):
            mean_staleness_bounded(**bounded, eta=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="eta is -1"):
        mean_staleness_bounded(in_flight=1, batch_size=1, rate_ratio=1.0, eta=-1)
