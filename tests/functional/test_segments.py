"""Reduction by ids, masked statistics and aggregation: padded, packed and split."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from areal_lab.functional import (
    Segments,
    dense_ids,
    last_unmasked,
    linear_recurrence,
    masked_mean,
    masked_quantiles,
    masked_sum,
    packed_sequence_ids,
    packed_sequences,
    padded_sequence_ids,
    prompt_mean,
    restart_at_holes,
    segment_reduce,
    sequence_mean,
    sequence_ratio,
    sequences_or_rows,
    token_mean,
)
from tests.reference import formulas

REDUCTIONS = {"sum": sum, "mean": formulas.mean, "min": min, "max": max}

ragged = st.lists(st.lists(st.floats(-100, 100, width=32), max_size=6), min_size=1, max_size=6)


def padded_and_packed(rows):
    """The same values in both layouts, with NaN as padding."""
    width = max(1, *(len(row) for row in rows))
    values = torch.full((len(rows), width), float("nan"))
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        values[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = True
    boundaries = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    packed = values[mask]
    return (values, mask, padded_sequence_ids(mask)), (
        packed,
        torch.ones_like(packed, dtype=torch.bool),
        packed_sequence_ids(boundaries, packed.shape[0]),
    )


@settings(max_examples=30)
@given(ragged, st.sampled_from(sorted(REDUCTIONS)))
def test_reductions_equal_the_reference_and_padded_equals_packed(rows, reduce):
    results = []
    for values, mask, ids in padded_and_packed(rows):
        results.append(segment_reduce(values, ids, len(rows), mask=mask, reduce=reduce))
    assert torch.equal(*results)
    expected = [REDUCTIONS[reduce](row) if row else 0.0 for row in rows]
    assert results[0].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-4)


@settings(max_examples=30)
@given(ragged)
def test_sequence_mean_equals_the_reference_and_padded_equals_packed(rows):
    padded, packed = padded_and_packed(rows)
    ours = [
        sequence_mean(values, mask, Segments(ids, len(rows)))
        for values, mask, ids in (padded, packed)
    ]
    assert torch.equal(*ours)
    if any(rows):
        expected = formulas.sequence_mean(padded[0].tolist(), padded[1].tolist())
        assert ours[0].item() == pytest.approx(expected, rel=1e-5, abs=1e-4)
    else:
        assert ours[0] == 0


@settings(max_examples=30)
@given(ragged)
def test_token_mean_is_the_mean_over_all_tokens(rows):
    tokens = [value for row in rows for value in row]
    expected = formulas.mean(tokens) if tokens else 0.0
    for values, mask, _ in padded_and_packed(rows):
        assert token_mean(values, mask).item() == pytest.approx(expected, rel=1e-5, abs=1e-4)
        assert masked_mean(values, mask).item() == pytest.approx(expected, rel=1e-5, abs=1e-4)


def test_global_counts_make_parts_add_up():
    torch.manual_seed(0)
    values, mask = torch.randn(6, 5).double(), torch.rand(6, 5) > 0.4
    ids = padded_sequence_ids(mask)
    parts = [slice(0, 2), slice(2, 3), slice(3, 6)]
    tokens = mask.sum()
    by_token = sum(token_mean(values[p], mask[p], token_count=tokens) for p in parts)
    torch.testing.assert_close(by_token, token_mean(values, mask))
    by_sequence = sum(
        sequence_mean(values[p], mask[p], Segments(ids[p], 6), sequence_count=6) for p in parts
    )
    torch.testing.assert_close(by_sequence, sequence_mean(values, mask, Segments(ids, 6)))


def test_segments_without_a_value_give_zero():
    for reduce in REDUCTIONS:
        result = segment_reduce(torch.tensor([-5.0]), torch.tensor([1]), 3, reduce=reduce)
        assert result.tolist() == [0, -5, 0]


def test_integers_stay_integers():
    lag, ids = torch.tensor([3, 1, 2]), torch.tensor([0, 0, 1])
    assert segment_reduce(lag, ids, 2, reduce="max").tolist() == [3, 2]
    assert segment_reduce(lag, ids, 2).dtype == torch.int64


def test_sums_and_means_of_bfloat16_are_in_float32():
    """Beyond 256 a bfloat16 cannot count, and 1 + 2**-8 is between two of them."""
    ones, ids = torch.ones(300, dtype=torch.bfloat16), torch.zeros(300, dtype=torch.long)
    assert segment_reduce(ones, ids, 1).tolist() == [300]
    pair = torch.tensor([1.0, 1.0 + 2.0**-7]).bfloat16()
    mean = segment_reduce(pair, ids[:2], 1, reduce="mean")
    assert mean.dtype == torch.float32
    assert mean.tolist() == [1.0 + 2.0**-8]
    assert segment_reduce(pair, ids[:2], 1, reduce="max").dtype == torch.bfloat16
    assert segment_reduce(pair.double(), ids[:2], 1).dtype == torch.float64


@pytest.mark.parametrize("reduce", sorted(REDUCTIONS))
def test_segment_reduce_has_right_derivatives(reduce):
    values = torch.tensor([3.0, -1.0, 2.0, 0.5], dtype=torch.double, requires_grad=True)
    ids, mask = torch.tensor([0, 1, 0, 1]), torch.tensor([True, True, True, False])
    assert torch.autograd.gradcheck(
        lambda v: segment_reduce(v, ids, 2, mask=mask, reduce=reduce), (values,)
    )


@settings(max_examples=30)
@given(st.lists(st.integers(-5, 5), min_size=0, max_size=12))
def test_dense_ids_are_the_inverse_of_unique(ids):
    tensor = torch.tensor(ids, dtype=torch.long)
    assert torch.equal(dense_ids(tensor), torch.unique(tensor, return_inverse=True)[1])


def test_packed_ids_skip_empty_sequences():
    assert packed_sequence_ids(torch.tensor([0, 2, 2, 5]), 5).tolist() == [0, 0, 2, 2, 2]


def test_masked_sums_along_an_axis():
    values = torch.tensor([[1.0, float("nan")], [2.0, 3.0]])
    mask = torch.tensor([[True, False], [True, True]])
    assert masked_sum(values, mask, dim=1).tolist() == [1, 5]
    assert masked_mean(values, mask, dim=1).tolist() == [1, 2.5]
    assert masked_mean(values, torch.zeros_like(mask), dim=0).tolist() == [0, 0]


@settings(max_examples=30)
@given(ragged)
@example([[0.0, -55.0, -55.0, -55.0, -55.0, -55.0]])
@example([[-100.0, 100.0, 100.0]])
def test_masked_quantiles_are_those_of_the_unmasked_values(rows):
    quantiles = torch.tensor([0.0, 0.1, 0.5, 0.99, 1.0])
    values, mask, _ = padded_and_packed(rows)[0]
    ours = masked_quantiles(values, mask, quantiles)
    if mask.any():
        # Interpolated in float64: in float32 torch's are off by 1e-5 between -55 and 0.
        exact = torch.quantile(values[mask].double(), quantiles.double())
        torch.testing.assert_close(ours, exact.float(), rtol=2e-7, atol=0)
    else:
        assert ours.isnan().all()


def test_infinite_values_have_quantiles_too():
    values = torch.tensor([0.0, 1.0, float("inf")])
    mask = torch.tensor([True, True, True])
    assert masked_quantiles(values, mask, torch.tensor([0.5, 1.0])).tolist() == [1, float("inf")]


@pytest.mark.usefixtures("unchecked_shapes")
def test_bad_inputs_are_refused():
    values, ids = torch.zeros(3), torch.zeros(3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"ids has shape \(2,\) and values \(3,\)"):
        segment_reduce(values, ids[:2], 1)
    with pytest.raises(ValueError, match="ids has dtype"):
        segment_reduce(values, values, 1)
    with pytest.raises(ValueError, match="segments is -1"):
        segment_reduce(values, ids, -1)
    with pytest.raises(ValueError, match="mask has dtype"):
        segment_reduce(values, ids, 1, mask=ids)
    with pytest.raises(ValueError, match=r"values has shape \(3,\) and mask \(1,\)"):
        token_mean(values, torch.ones(1, dtype=torch.bool))
    with pytest.raises(ValueError, match="sequence_count is 0"):
        sequence_mean(values, values == 0, Segments(ids, 1), sequence_count=0)


def test_infinite_values_are_their_own_extrema():
    ids = torch.tensor([0, 0, 1])
    for sign, reduce in ((1, "min"), (-1, "max")):
        values = sign * torch.tensor([torch.inf, torch.inf, 2.0])
        assert segment_reduce(values, ids, 2, reduce=reduce).tolist() == [
            sign * torch.inf,
            sign * 2,
        ]


@pytest.mark.parametrize("boundaries", [[0, 3], [0, 3, 3], [0, 1, 2, 3]])
def test_padding_behind_a_packed_batch_belongs_to_the_last_sequence(boundaries):
    count = len(boundaries) - 1
    ids, segments = packed_sequences(torch.tensor(boundaries), 5)
    assert segments == count
    assert ids[3:].tolist() == [count - 1] * 2
    mask = torch.arange(5) < 3
    values = torch.where(mask, torch.arange(5.0), torch.nan)
    sums = segment_reduce(values, ids, count, mask=mask)
    assert sums.sum() == 3
    returns = linear_recurrence(1.0, values, mask, sequences=Segments(ids, count))
    assert returns[:3].isfinite().all()


@pytest.mark.parametrize(
    ("boundaries", "tokens"), [([0, 3, 9], 5), ([2, 5], 5), ([0, 4, 2, 5], 5), ([0, 9], 0)]
)
def test_wrong_boundaries_are_refused(boundaries, tokens):
    with pytest.raises(ValueError, match=r"cu_seqlens is \[.*must begin with 0, never fall"):
        packed_sequences(torch.tensor(boundaries), tokens)


@pytest.mark.parametrize("boundaries", [[0], []])
def test_tokens_without_a_sequence_are_refused(boundaries):
    with pytest.raises(ValueError, match="one axis of boundaries"):
        packed_sequences(torch.tensor(boundaries, dtype=torch.long), 5)


def test_no_tokens_are_no_sequence_or_an_empty_one():
    assert packed_sequences(torch.tensor([0]), 0).count == 0
    assert packed_sequences(torch.tensor([0, 0]), 0).ids.shape == (0,)


def test_a_mask_without_an_axis_is_refused():
    for function in (sequences_or_rows, last_unmasked, restart_at_holes):
        with pytest.raises(ValueError, match=r"mask has shape \(\), but needs an axis"):
            function(torch.tensor(True))
    with pytest.raises(ValueError, match=r"tokens have shape \(\)"):
        linear_recurrence(1.0, torch.tensor(1.0))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3)])
def test_quantiles_of_no_tokens_are_nan(shape):
    empty = torch.zeros(shape)
    assert masked_quantiles(empty, empty > 0, torch.tensor([0.1, 0.9])).isnan().tolist() == [1, 1]


# --- accuracy of long sums


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_a_million_float32_lose_no_digits(reduce):
    """Added one by one in float32 they would be 1 % off."""
    values, ids = torch.full((1_000_000,), 0.1), torch.zeros(1_000_000, dtype=torch.long)
    exact = values.double().sum().item() / (1 if reduce == "sum" else 1_000_000)
    ours = segment_reduce(values, ids, 1, reduce=reduce)
    assert ours.dtype == torch.float32
    assert ours.item() == pytest.approx(exact, rel=1e-7)


def test_sequence_means_of_long_sequences_lose_no_digits():
    values, mask = torch.full((1, 1_000_000), 0.1), torch.ones(1, 1_000_000, dtype=torch.bool)
    groups = Segments(torch.zeros(1, 1_000_000, dtype=torch.long), 1)
    for mean in (sequence_mean(values, mask), prompt_mean(values, mask, groups=groups)):
        assert mean.item() == pytest.approx(values[0, 0].item(), rel=1e-6)


def test_gradients_through_a_sequence_ratio_lose_no_digits():
    """The gradient of a sequence's mean is a sum over its tokens."""
    mask = torch.ones(1_000_000, dtype=torch.bool)
    logprobs = torch.zeros(1_000_000, requires_grad=True)
    policy = sequence_ratio(logprobs, torch.zeros(1_000_000), mask)
    (gradient,) = torch.autograd.grad(policy.log_ratio.sum() * 0.1, logprobs)
    assert gradient[0].item() == pytest.approx(0.1, rel=1e-6)
