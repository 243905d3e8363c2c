"""Aggregates: value, padded and packed, splits under one count, and what has no token."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lab.functional.aggregate import (
    fixed_length_mean,
    prompt_mean,
    sequence_mean,
    sequence_sum_mean,
    token_mean,
    token_sum,
)
from areal_lab.functional.segments import Segments
from tests.reference import aggregate as reference

# Six rows of three prompts in a mixed order; row 1 and all rows of prompt 2 have no token.
GROUPS = [0, 1, 0, 1, 2, 1]
LENGTHS = [3, 0, 5, 2, 0, 4]


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(5) < torch.tensor(LENGTHS)[:, None]
    mask[2, 1] = False  # a token of a tool
    values = torch.randn(6, 5, generator=generator, dtype=torch.double)
    return torch.where(mask, values, torch.nan), mask


def groups_of(mask, rows=GROUPS):
    return Segments(torch.tensor(rows, dtype=torch.long)[:, None].expand(mask.shape), 3)


def named(mask):
    """Each aggregate with its reference."""
    return {
        "token_sum": (token_sum, reference.token_sum),
        "token_mean": (token_mean, reference.token_mean),
        "sequence_mean": (sequence_mean, reference.sequence_mean),
        "sequence_sum_mean": (sequence_sum_mean, reference.sequence_sum_mean),
        "fixed_length_mean": (
            partial(fixed_length_mean, max_tokens=7),
            partial(reference.fixed_length_mean, max_tokens=7),
        ),
        "prompt_mean": (
            partial(prompt_mean, groups=groups_of(mask)),
            partial(reference.prompt_mean, groups=GROUPS),
        ),
    }


NAMES = tuple(named(batch()[1]))
COUNTED = {
    "token_mean": "token_count",
    "sequence_mean": "sequence_count",
    "sequence_sum_mean": "sequence_count",
    "fixed_length_mean": "sequence_count",
    "prompt_mean": "group_count",
}


@pytest.mark.parametrize("name", NAMES)
def test_an_aggregate_equals_the_reference(name):
    values, mask = batch()
    ours, slow = named(mask)[name]
    expected = slow(values.tolist(), mask.tolist())
    assert ours(values, mask, None).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_an_aggregate_divides_by_a_given_count(name, as_tensor):
    values, mask = batch()
    ours, slow = named(mask)[name]
    count = torch.tensor(11) if as_tensor else 11
    expected = slow(values.tolist(), mask.tolist(), count=11)
    assert ours(values, mask, None, **{COUNTED[name]: count}).item() == pytest.approx(expected)


def test_means_by_hand():
    values = torch.tensor([[1.0, 2.0, 3.0], [10.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    assert token_sum(values, mask) == 16
    assert token_mean(values, mask) == 4
    assert sequence_mean(values, mask) == 6  # of 2 and 10
    assert sequence_sum_mean(values, mask) == 8  # of 6 and 10
    assert fixed_length_mean(values, mask, max_tokens=4) == 2
    one_prompt = Segments(torch.zeros(2, 3, dtype=torch.long), 1)
    assert prompt_mean(values, mask, groups=one_prompt) == token_mean(values, mask)


@pytest.mark.parametrize("name", NAMES)
def test_packed_equals_padded_bit_for_bit(name):
    values, mask = batch()
    rows = Segments(torch.arange(6)[:, None].expand(6, 5), 6)
    exists = mask | (torch.arange(5) < torch.tensor(LENGTHS)[:, None])
    packed_rows = Segments(rows.ids[exists], 6)
    packed_groups = Segments(groups_of(mask).ids[exists], 3)
    ours, _ = named(mask)[name]
    packed = partial(ours, groups=packed_groups) if name == "prompt_mean" else ours
    padded_result = ours(values, mask, rows)
    assert torch.equal(packed(values[exists], mask[exists], packed_rows), padded_result)
    assert torch.equal(ours(values, mask, None), padded_result)


@pytest.mark.parametrize("name", NAMES)
def test_masked_values_do_not_matter(name):
    values, mask = batch()
    ours, _ = named(mask)[name]
    for garbage in (0.0, float("inf"), -1e300):
        leaf = torch.where(mask, values, garbage).requires_grad_()
        result = ours(leaf, mask, None)
        assert torch.equal(result, ours(values, mask, None))
        (gradient,) = torch.autograd.grad(result, leaf)
        assert (gradient[~mask] == 0).all()
        assert gradient.isfinite().all()


@pytest.mark.parametrize("name", COUNTED)
@settings(max_examples=30)
@given(cut=st.integers(0, 6), seed=st.integers(0, 3))
def test_whole_sequences_in_parts_sum_to_the_whole_under_one_count(name, cut, seed):
    values, mask = batch(seed)
    ours, _ = named(mask)[name]
    keyword = COUNTED[name]
    count = {
        "token_count": mask.sum(),
        "sequence_count": mask.any(1).sum(),
        "group_count": 2,
    }[keyword]
    parts = []
    for rows in (slice(0, cut), slice(cut, 6)):
        extra = {keyword: count}
        if name == "prompt_mean":
            # The two parts share prompts, so each is told the tokens of the whole prompt.
            extra["groups"] = groups_of(mask[rows], GROUPS[rows])
            extra["group_tokens"] = torch.tensor([7, 6, 0])
        parts.append(ours(values[rows], mask[rows], None, **extra))
    torch.testing.assert_close(sum(parts), ours(values, mask, None))


@pytest.mark.parametrize("name", ["token_sum", "token_mean", "sequence_sum_mean"])
def test_cut_sequences_sum_to_the_whole_where_the_docstring_says_so(name):
    values, mask = batch()
    ours, _ = named(mask)[name]
    keyword = COUNTED.get(name)
    extra = {keyword: {"token_count": 13, "sequence_count": 4}[keyword]} if keyword else {}
    halves = (slice(0, 2), slice(2, 5))
    parts = [ours(values[:, columns], mask[:, columns], None, **extra) for columns in halves]
    torch.testing.assert_close(sum(parts), ours(values, mask, None))


@pytest.mark.parametrize("name", COUNTED)
def test_what_has_no_token_is_counted_by_a_given_count_only(name):
    values, mask = batch()
    ours, _ = named(mask)[name]
    without, some = ours(values, mask, None), torch.tensor([True, False, True, True, False, True])
    if name != "prompt_mean":
        fewer = ours(values[some], mask[some], None)
        torch.testing.assert_close(fewer, without)
    counted = {"token_count": 13, "sequence_count": 4, "group_count": 2}[COUNTED[name]]
    torch.testing.assert_close(ours(values, mask, None, **{COUNTED[name]: counted}), without)
    all_rows = {"token_count": 30, "sequence_count": 6, "group_count": 3}[COUNTED[name]]
    torch.testing.assert_close(
        ours(values, mask, None, **{COUNTED[name]: all_rows}), without * counted / all_rows
    )


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_mask_gives_zero(name):
    values, mask = batch()
    ours, _ = named(mask)[name]
    leaf = values.clone().requires_grad_()
    result = ours(leaf, torch.zeros_like(mask), None)
    assert result == 0
    assert (torch.autograd.grad(result, leaf)[0] == 0).all()


@settings(max_examples=30)
@given(scale=st.floats(-3, 3), shift=st.floats(-3, 3))
def test_means_are_linear_and_keep_constants(scale, shift):
    values, mask = batch()
    for name in ("token_mean", "sequence_mean", "prompt_mean"):
        ours, _ = named(mask)[name]
        moved = ours(scale * values + shift, mask, None)
        torch.testing.assert_close(moved, scale * ours(values, mask, None) + shift)


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_sequences_does_not_matter(name):
    values, mask = batch()
    order = torch.tensor([5, 3, 0, 1, 4, 2])
    ours, _ = named(mask)[name]
    shuffled = ours
    if name == "prompt_mean":
        shuffled = partial(ours, groups=groups_of(mask, [GROUPS[i] for i in order]))
    torch.testing.assert_close(shuffled(values[order], mask[order], None), ours(values, mask, None))


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("count", [0, -2, float("nan")])
def test_counts_must_be_positive(name, count):
    values, mask = batch()
    ours, _ = named(mask)[name]
    with pytest.raises(ValueError, match=f"{COUNTED[name]} is {count}"):
        ours(values, mask, None, **{COUNTED[name]: count})


def test_the_length_must_be_positive():
    values, mask = batch()
    with pytest.raises(ValueError, match="max_tokens is 0"):
        fixed_length_mean(values, mask, max_tokens=0)


@pytest.mark.usefixtures("unchecked_shapes")
def test_bad_shapes_are_refused():
    values, mask = batch()
    groups = groups_of(mask)
    with pytest.raises(ValueError, match=r"values has shape \(6, 4\) and mask \(6, 5\)"):
        token_mean(values[:, :4], mask)
    with pytest.raises(ValueError, match=r"mask has dtype torch\.float32"):
        token_sum(values, mask.float())
    with pytest.raises(ValueError, match=r"sequences\.ids has shape \(6, 4\)"):
        sequence_mean(values, mask, Segments(groups.ids[:, :4], 3))
    with pytest.raises(ValueError, match=r"group_tokens has shape \(2,\).*3 groups"):
        prompt_mean(values, mask, groups=groups, group_tokens=torch.tensor([7, 6]))
    with pytest.raises(ValueError, match=r"group_tokens has dtype torch\.float32"):
        prompt_mean(values, mask, groups=groups, group_tokens=torch.ones(3))


@pytest.mark.parametrize("name", COUNTED)
def test_a_count_of_zero_tokens_divides_by_one(name):
    """A rank without a token: as of an empty mask, 0 and no NaN."""
    values, mask = batch()
    values = values.requires_grad_()
    ours, _ = named(mask)[name]
    zero = {COUNTED[name]: torch.tensor(0)}
    loss = ours(values, torch.zeros_like(mask), None, **zero)
    assert loss == 0
    assert torch.autograd.grad(loss, values)[0].eq(0).all()
    one = {COUNTED[name]: torch.tensor(1)}
    assert torch.equal(ours(values, mask, None, **zero), ours(values, mask, None, **one))


@pytest.mark.parametrize("name", COUNTED)
def test_sums_are_in_float32_at_least(name):
    """5000 ones: a bfloat16 sum stays at 256 when they are added one by one."""
    ones = torch.ones(1, 5000, dtype=torch.bfloat16)
    mask = ones > 0
    ours = {
        "token_mean": token_mean,
        "sequence_mean": sequence_mean,
        "sequence_sum_mean": sequence_sum_mean,
        "fixed_length_mean": partial(fixed_length_mean, max_tokens=5000),
        "prompt_mean": partial(prompt_mean, groups=Segments(torch.zeros_like(ones).long(), 1)),
    }[name]
    result = ours(ones, mask)
    assert result.dtype == torch.float32
    assert result == (5000 if name == "sequence_sum_mean" else 1)
    assert ours(ones.double(), mask).dtype == torch.float64
