"""Lag of tokens and trajectories, histograms, effective sample size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.functional import (
    effective_sample_size,
    effective_sample_size_by_lag,
    lag_histogram,
    padded_sequence_ids,
    token_lag,
    trajectory_lag,
)
from tests.reference import formulas

VERSIONS = torch.tensor([[-1, 0, 0, 2], [-1, 3, -1, 4], [-1, -1, -1, -1]])
MASK = VERSIONS >= 0


def test_token_lag_by_hand():
    lag = token_lag(VERSIONS, MASK, 5)
    assert lag.tolist() == [[0, 5, 5, 3], [0, 2, 0, 1], [0, 0, 0, 0]]
    assert torch.equal(token_lag(VERSIONS, MASK, torch.tensor(5)), lag)


def test_trajectory_lag_equals_the_reference():
    lag = token_lag(VERSIONS, MASK, 5)
    ours = trajectory_lag(lag, MASK, padded_sequence_ids(MASK), 3)
    for i in range(2):
        head, tail, mean = formulas.trajectory_lag(VERSIONS[i].tolist(), MASK[i].tolist(), 5)
        assert (ours.head[i], ours.tail[i]) == (head, tail)
        assert ours.mean[i].item() == pytest.approx(mean)
    assert [field[2].item() for field in ours] == [0, 0, 0, 0]
    assert ours.tokens.tolist() == [3, 2, 0]


def test_packed_trajectories_have_the_same_lag():
    lag, ids = token_lag(VERSIONS, MASK, 5), padded_sequence_ids(MASK)
    padded = trajectory_lag(lag, MASK, ids, 3)
    packed = trajectory_lag(lag[MASK], torch.ones_like(lag[MASK]) > 0, ids[MASK], 3)
    assert all(torch.equal(one, other) for one, other in zip(padded, packed, strict=True))


def test_histogram_counts_each_token_once():
    lag = token_lag(VERSIONS, MASK, 5)
    assert lag_histogram(lag, MASK, bins=7).tolist() == [0, 1, 1, 1, 0, 2, 0]
    assert lag_histogram(lag, MASK, bins=3).tolist() == [0, 1, 4]  # the last bin holds the rest
    assert lag_histogram(lag - 9, MASK, bins=2).tolist() == [5, 0]  # never negative


def test_synchronous_data_has_no_lag():
    versions = torch.full((2, 3), 4)
    mask = torch.ones(2, 3, dtype=torch.bool)
    lag = token_lag(versions, mask, 4)
    assert lag_histogram(lag, mask, bins=4).tolist() == [6, 0, 0, 0]


weights = st.lists(st.floats(1 / 1024, 1024, width=32), min_size=1, max_size=20)


@given(weights, st.floats(1e-20, 1e20))
def test_effective_sample_size(values, scale):
    mask = torch.tensor([True] * len(values) + [False])
    tensor = torch.tensor([*values, float("nan")])
    ours = effective_sample_size(tensor, mask).item()
    assert ours == pytest.approx(formulas.effective_sample_size(values), rel=1e-4)
    assert 1 - 1e-5 <= ours <= len(values) * (1 + 1e-5)
    scaled = effective_sample_size(tensor.double() * scale, mask).item()
    assert scaled == pytest.approx(ours, rel=1e-4)


def test_equal_weights_are_worth_their_number_and_none_nothing():
    mask = torch.tensor([True, True, True, False])
    assert effective_sample_size(torch.full((4,), 0.3), mask) == 3
    assert effective_sample_size(torch.zeros(4), mask) == 0
    assert effective_sample_size(torch.ones(4), mask & False) == 0
    assert effective_sample_size(torch.full((4,), 1e30), mask) == 3


def test_effective_sample_size_by_lag_is_that_of_each_age():
    lag = torch.tensor([0, 0, 2, 2, 2, 9, 0])
    values = torch.tensor([1.0, 1.0, 1e25, 3e25, 1e25, 0.5, float("inf")])
    mask = torch.tensor([True] * 6 + [False])
    ours = effective_sample_size_by_lag(values, lag, mask, bins=4)
    expected = [2.0, 0.0, formulas.effective_sample_size([1, 3, 1]), 1.0]
    assert ours.tolist() == pytest.approx(expected)


@pytest.mark.usefixtures("unchecked_shapes")
def test_bad_inputs_are_refused():
    with pytest.raises(ValueError, match=r"versions has shape \(3, 4\) and mask \(4,\)"):
        token_lag(VERSIONS, MASK[0], 5)
    with pytest.raises(ValueError, match="versions has dtype"):
        token_lag(VERSIONS.float(), MASK, 5)
    with pytest.raises(ValueError, match="bins is 0"):
        lag_histogram(VERSIONS, MASK, bins=0)
    with pytest.raises(ValueError, match=r"lag has shape \(3,\)"):
        lag_histogram(VERSIONS[:, 0], MASK, bins=2)
    with pytest.raises(ValueError, match=r"weights has shape \(2,\)"):
        effective_sample_size(torch.ones(2), MASK[0])
