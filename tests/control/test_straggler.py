"""One group that does not end: the counterexample to eq. 3 as a bound of age, in every order."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.capacity import admissible, lag_bound
from areal_lab.control.order import bounded_lag, oldest_finished_first, strict_start_order
from areal_lab.control.straggler import STRAGGLER, straggler_steps

ETA = st.sampled_from([0, 0.5, 1, 2, 3.25, 5])
BATCH = st.integers(1, 4)
STEPS = st.integers(1, 12)


def test_the_counterexample_can_be_followed_by_hand() -> None:
    """eta 2, batches of one group: five rows, and group 0 is trained on at lag 4."""
    rows = straggler_steps(oldest_finished_first(), eta=2, steps=4)
    assert [(row.version, row.may_start, row.started) for row in rows] == [
        (0, 3, 3),
        (1, 4, 4),
        (2, 5, 5),
        (3, 6, 6),
        (4, 7, 7),
    ]
    assert [row.trained for row in rows] == [(1,), (2,), (3,), (4,), (0,)]
    assert rows[-1].lag == 4


@given(ETA, BATCH, STEPS)
def test_eq_3_holds_in_every_row_and_bounds_no_age(eta: float, batch: int, steps: int) -> None:
    rows = straggler_steps(oldest_finished_first(), eta=eta, batch_groups=batch, steps=steps)
    for row in rows:
        assert row.may_start == admissible(row.version, batch_size=batch, eta=eta)
        assert row.started <= row.may_start
    # Groups without group 0 fill batches if there is room for one more than a batch.
    if math.floor(eta * batch) >= 1:
        assert STRAGGLER in rows[-1].trained
        assert rows[-1].lag == steps
    else:
        assert rows[-1].trained == ()
        assert rows[-1].lag == 0


@given(ETA, BATCH, STEPS)
def test_strict_start_order_waits_at_once(eta: float, batch: int, steps: int) -> None:
    rows = straggler_steps(strict_start_order(), eta=eta, batch_groups=batch, steps=steps)
    assert [(row.lag, row.trained) for row in rows] == [(0, ())]


@given(ETA, BATCH, STEPS, st.integers(0, 4))
def test_bounded_lag_waits_at_its_bound(eta: float, batch: int, steps: int, more: int) -> None:
    bound = lag_bound(eta) + more
    rows = straggler_steps(bounded_lag(bound), eta=eta, batch_groups=batch, steps=steps)
    assert rows[-1].lag <= bound
    assert all(row.lag < bound for row in rows[:-1])


@given(ETA, BATCH, STEPS)
def test_bounded_lag_can_drop_it_instead(eta: float, batch: int, steps: int) -> None:
    bound = lag_bound(eta)
    rows = straggler_steps(bounded_lag(bound, "drop"), eta=eta, batch_groups=batch, steps=steps)
    assert STRAGGLER not in rows[-1].trained or rows[-1].lag <= bound
    assert rows[-1].dropped == (rows[-1].lag > bound)


def test_what_would_not_end_is_refused() -> None:
    with pytest.raises(ValueError, match="steps is 0, but must be >= 1"):
        straggler_steps(oldest_finished_first(), eta=2, steps=0)
    with pytest.raises(ValueError, match="eta is infinite"):
        straggler_steps(oldest_finished_first(), eta=math.inf)
    with pytest.raises(ValueError, match="eta is -1"):
        straggler_steps(oldest_finished_first(), eta=-1)
