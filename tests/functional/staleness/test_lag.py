"""Lag of tokens and trajectories, histograms, effective sample size."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lab.functional.masked import masked_quantiles
from areal_lab.functional.segments import Segments, padded_sequence_ids, segment_reduce
from areal_lab.functional.staleness.lag import (
    effective_sample_share,
    effective_sample_size,
    effective_sample_size_by_lag,
    effective_sample_size_of_logs,
    lag_histogram,
    mean_by_lag,
    token_lag,
    trajectory_lag,
)
from tests.reference import formulas
from tests.reference import staleness as reference

VERSIONS = torch.tensor([[-1, 0, 0, 2], [-1, 3, -1, 4], [-1, -1, -1, -1]])
MASK = VERSIONS >= 0


def test_token_lag_by_hand():
    lag = token_lag(VERSIONS, MASK, 5)
    assert lag.tolist() == [[0, 5, 5, 3], [0, 2, 0, 1], [0, 0, 0, 0]]
    assert torch.equal(token_lag(VERSIONS, MASK, torch.tensor(5)), lag)


def test_trajectory_lag_equals_the_reference():
    lag = token_lag(VERSIONS, MASK, 5)
    ours = trajectory_lag(lag, MASK)
    for i in range(2):
        head, tail, mean = formulas.trajectory_lag(VERSIONS[i].tolist(), MASK[i].tolist(), 5)
        assert (ours.head[i], ours.tail[i]) == (head, tail)
        assert ours.mean[i].item() == pytest.approx(mean)
    assert [field[2].item() for field in ours] == [0, 0, 0, 0]
    assert ours.tokens.tolist() == [3, 2, 0]


def test_packed_trajectories_have_the_same_lag():
    lag, ids = token_lag(VERSIONS, MASK, 5), padded_sequence_ids(MASK)
    padded = trajectory_lag(lag, MASK)
    packed = trajectory_lag(lag[MASK], MASK[MASK], sequences=Segments(ids[MASK], 3))
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


@settings(max_examples=30)
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


def test_mean_by_lag_equals_the_reference():
    values = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, math.nan], dtype=torch.double)
    lag = torch.tensor([0, 3, 3, 9, -2, 1])
    mask = torch.tensor([True] * 5 + [False])
    ours = mean_by_lag(values, lag, mask, bins=5)
    assert ours.tolist() == reference.mean_by_lag(values[:5].tolist(), lag[:5].tolist(), 5)
    assert ours.tolist() == [8.5, 0, 0, 3, 8]


@settings(max_examples=30)
@given(weights)
def test_effective_sample_share(values):
    mask = torch.tensor([True] * len(values) + [False])
    ours = effective_sample_share(torch.tensor([*values, math.inf]), mask).item()
    assert ours == pytest.approx(reference.effective_sample_share(values), rel=1e-4)
    assert 0 < ours <= 1 + 1e-5


def test_a_dropped_token_lowers_the_share():
    mask = torch.ones(4, dtype=torch.bool)
    assert effective_sample_share(torch.ones(4), mask) == 1
    assert effective_sample_share(torch.tensor([1.0, 1.0, 1.0, 0.0]), mask) == 0.75
    assert effective_sample_share(torch.zeros(4), mask) == 0
    assert effective_sample_share(torch.ones(4), mask & False) == 0


@settings(max_examples=30)
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=12), st.floats(-5000, 5000))
def test_effective_sample_size_of_logs(logs, shift):
    tensor = torch.tensor([*logs, math.nan], dtype=torch.double)
    mask = ~tensor.isnan()
    ours = effective_sample_size_of_logs(tensor, mask)
    torch.testing.assert_close(ours, effective_sample_size(tensor.exp(), mask))
    torch.testing.assert_close(effective_sample_size_of_logs(tensor + shift, mask), ours)


def test_products_of_long_sequences_have_an_effective_sample_size():
    """As numbers these products would all be infinite or all be 0."""
    logs = [2000.0, 2001.0, 1999.5, -4000.0]
    tensor = torch.tensor(logs)
    mask = torch.ones(4, dtype=torch.bool)
    expected = reference.effective_sample_size_of_logs(logs)
    assert effective_sample_size_of_logs(tensor, mask).item() == pytest.approx(expected)
    assert effective_sample_size_of_logs(tensor - 5000, mask).item() == pytest.approx(expected)
    tokens = torch.full((4, 1000), 1.0)
    tokens[:, 500] += torch.tensor([0.0, 1.0, -0.5, 0.2])
    mask = torch.ones(4, 1000, dtype=torch.bool)
    products = segment_reduce(tokens, padded_sequence_ids(mask), 4)
    ours = effective_sample_size_of_logs(products, mask[:, 0])
    expected = reference.effective_sample_size_of_logs([0.0, 1.0, -0.5, 0.2])
    assert ours.item() == pytest.approx(expected, rel=1e-3)


def test_logs_without_an_end():
    inf = math.inf
    for logs, expected in [
        ([-inf, 1.0, 1.0], 2),
        ([inf, inf, 1.0], 2),
        ([-inf, -inf, -inf], 0),
    ]:
        tensor = torch.tensor(logs)
        assert effective_sample_size_of_logs(tensor, tensor == tensor) == expected  # noqa: PLR0124
    assert effective_sample_size_of_logs(tensor, tensor > 0) == 0
    assert effective_sample_size_of_logs(torch.tensor([math.nan, 1.0]), mask_of(2)).isnan()
    assert effective_sample_size_of_logs(torch.zeros(0), mask_of(0)) == 0


def mask_of(tokens):
    return torch.ones(tokens, dtype=torch.bool)


def test_statistics_have_no_gradient():
    values = torch.randn(3, requires_grad=True)
    lag = torch.tensor([0, 1, 1])
    for ours in (
        mean_by_lag(values, lag, mask_of(3), bins=2),
        effective_sample_share(values.exp(), mask_of(3)),
        effective_sample_size_of_logs(values, mask_of(3)),
        effective_sample_size_by_lag(values.exp(), lag, mask_of(3), bins=2),
    ):
        assert not ours.requires_grad


def test_quantiles_of_many_tokens_in_few_bits_are_those_of_their_rank():
    """bfloat16 has no 2970; a position computed in it would be that of another token."""
    values = (torch.arange(3001) // 16).to(torch.bfloat16)
    ours = masked_quantiles(values, mask_of(3001), torch.tensor([0.1, 0.5, 0.99]))
    assert ours.dtype == torch.bfloat16
    assert ours.tolist() == [300 // 16, 1500 // 16, 2970 // 16]


def test_an_unmasked_nan_is_the_largest_value():
    values = torch.tensor([1.0, math.nan, math.inf, 2.0])
    mask = torch.tensor([True, True, True, True])
    assert masked_quantiles(
        values, mask, torch.tensor([0.0, 1 / 3], dtype=torch.double)
    ).tolist() == [1, 2]
    assert masked_quantiles(values, mask, torch.tensor([1.0])).isnan().all()
    mask[3] = False  # what is masked does not come before it
    assert masked_quantiles(values, mask, torch.tensor([1.0])).isnan().all()
    mask[3], mask[1] = True, False
    assert masked_quantiles(values, mask, torch.tensor([0.5, 1.0])).tolist() == [2, math.inf]


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
    with pytest.raises(ValueError, match=r"weights has shape \(2,\)"):
        effective_sample_share(torch.ones(2), MASK[0])
    with pytest.raises(ValueError, match=r"log_weights has shape \(2,\)"):
        effective_sample_size_of_logs(torch.ones(2), MASK[0])
    with pytest.raises(ValueError, match=r"values has shape \(2,\)"):
        mean_by_lag(torch.ones(2), VERSIONS, MASK, bins=2)
    with pytest.raises(ValueError, match="bins is 0"):
        mean_by_lag(MASK.double(), VERSIONS, MASK, bins=0)


def test_many_equal_weights_are_all_counted():
    """As float32 stops counting at 2^24, bfloat16 does at 2^8."""
    weights = torch.ones(1000, dtype=torch.bfloat16)
    mask = weights > 0
    assert effective_sample_size(weights, mask).item() == 1000
    assert mean_by_lag(weights, mask.long(), mask, bins=2).tolist() == [0, 1]
