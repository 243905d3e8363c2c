"""Whitening: equal to the reference, the same for a split batch, and quiet where masked."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lab.functional.advantages.named import dr_grpo_advantages
from areal_lab.functional.advantages.returns import reinforce_plus_plus_returns
from areal_lab.functional.advantages.whitening import (
    Moments,
    add_moments,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    spread_to_tokens,
    token_moments,
    whiten,
)
from areal_lab.functional.segments import packed_sequences
from tests.reference import advantages as reference

VALUES = torch.tensor([[0.5, -1.0, 3.0], [2.0, 0.25, 7.0]], dtype=torch.double)
MASK = torch.tensor([[True, True, False], [True, True, True]])
REWARDS = torch.tensor([1.0, 0.0, 0.5, 0.25], dtype=torch.double)
GROUPS = torch.tensor([0, 0, 1, 1])
CHOSEN = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]]) > 0


@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("eps", [1e-8, 0.5])
def test_equals_the_reference(unbiased, eps):
    ours = whiten(VALUES, MASK, unbiased=unbiased, eps=eps)
    expected = reference.whiten(VALUES[MASK].tolist(), unbiased=unbiased, eps=eps)
    torch.testing.assert_close(ours[MASK], torch.tensor(expected, dtype=torch.double))
    assert (ours[~MASK] == 0).all()


def test_whitened_values_have_mean_zero_and_variance_one():
    ours = whiten(VALUES, MASK)[MASK]
    assert ours.mean().abs() < 1e-12
    assert ours.var().item() == pytest.approx(1, abs=1e-6)
    kept = whiten(VALUES, MASK, keep_mean=True)
    assert kept[MASK].mean().item() == pytest.approx(VALUES[MASK].mean().item())
    assert (kept[~MASK] == 0).all()


@settings(max_examples=30)
@given(st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=24), st.data())
def test_moments_of_parts_add_up_to_those_of_the_whole(numbers, data):
    values = torch.tensor(numbers, dtype=torch.double)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(numbers), max_size=24)))
    mask = mask[: len(numbers)]
    cut = data.draw(st.integers(0, len(numbers)))
    parts = [(values[:cut], mask[:cut]), (values[cut:], mask[cut:])]
    moments = add_moments(*(token_moments(*part) for part in parts))
    ours = torch.cat([whiten(*part, moments=moments, eps=1e-2) for part in parts])
    torch.testing.assert_close(ours, whiten(values, mask, eps=1e-2), rtol=1e-9, atol=1e-9)


def test_a_constant_added_to_all_values_does_not_matter():
    torch.testing.assert_close(whiten(VALUES + 100, MASK), whiten(VALUES, MASK))
    torch.testing.assert_close(whiten(-3 * VALUES, MASK), -whiten(VALUES, MASK))


def test_masked_values_reach_neither_value_nor_gradient():
    poisoned = VALUES.clone()
    poisoned[0, 2] = float("nan")
    poisoned.requires_grad_()
    ours = whiten(poisoned, MASK)
    torch.testing.assert_close(ours.detach(), whiten(VALUES, MASK))
    ours.square().sum().backward()
    assert poisoned.grad is not None
    assert poisoned.grad.isfinite().all()
    assert poisoned.grad[0, 2] == 0


def test_given_moments_get_no_gradient():
    values = VALUES.clone().requires_grad_()
    moments = token_moments(values, MASK)
    whiten(VALUES.clone().requires_grad_(), MASK, moments=moments).sum().backward()
    assert values.grad is None


def test_one_value_equal_values_and_nothing_give_zero():
    one = torch.tensor([True, False, False])
    assert whiten(torch.tensor([0.7, 1.0, 2.0]), one).tolist() == [0, 0, 0]
    assert whiten(torch.full((9,), 0.1), torch.ones(9).bool()).tolist() == [0.0] * 9
    assert whiten(torch.ones(3), torch.zeros(3).bool()).tolist() == [0, 0, 0]
    assert whiten(torch.ones(3), torch.zeros(3).bool(), keep_mean=True).tolist() == [0, 0, 0]


def test_bfloat16_is_whitened_in_float32():
    values = torch.arange(8.0).bfloat16()
    ours = whiten(values, torch.ones(8).bool())
    assert ours.dtype == torch.float32
    assert torch.equal(ours, whiten(values.float(), torch.ones(8).bool()))


def test_float32_is_whitened_with_moments_in_float64():
    """Mean 1,000 and deviation 0.01: squares in float32 would know no digit of the variance."""
    generator = torch.Generator().manual_seed(0)
    values = (1000 + 0.01 * torch.randn(4096, generator=generator, dtype=torch.double)).float()
    ours = whiten(values, torch.ones(4096).bool())
    assert ours.dtype == torch.float32
    assert ours.std().item() == pytest.approx(1, abs=1e-3)


def test_each_token_gets_the_number_of_its_sequence():
    values = torch.tensor([5.0, 7.0])
    ours = spread_to_tokens(values, MASK)
    assert ours.tolist() == [[5, 5, 0], [7, 7, 7]]
    packed = packed_sequences(torch.tensor([0, 2, 5]), 5)
    assert spread_to_tokens(values, MASK[MASK], sequences=packed).tolist() == [5, 5, 7, 7, 7]
    nothing = torch.tensor([5.0, float("nan")])
    assert spread_to_tokens(nothing, torch.tensor([[True], [False]])).tolist() == [[5], [0]]
    assert spread_to_tokens(values[:1], MASK[0]).tolist() == [5, 5, 0]


@pytest.mark.parametrize("unbiased", [True, False])
def test_reinforce_plus_plus_baseline_equals_the_reference(unbiased):
    ours = reinforce_plus_plus_baseline_advantages(REWARDS, GROUPS, CHOSEN, unbiased=unbiased)
    expected = reference.reinforce_plus_plus_baseline(
        REWARDS.tolist(), GROUPS.tolist(), CHOSEN.tolist(), unbiased=unbiased, eps=1e-8
    )
    torch.testing.assert_close(ours, torch.tensor(expected, dtype=torch.double))


def test_reinforce_plus_plus_baseline_of_two_ranks_is_that_of_one():
    """Prompts are on one rank each; only the moments cross."""
    whole = reinforce_plus_plus_baseline_advantages(REWARDS, GROUPS, CHOSEN)
    ranks = [slice(0, 2), slice(2, 4)]
    centered = [dr_grpo_advantages(REWARDS[r], GROUPS[r]) for r in ranks]
    moments = add_moments(
        *(
            token_moments(spread_to_tokens(c, CHOSEN[r]), CHOSEN[r])
            for c, r in zip(centered, ranks, strict=True)
        )
    )
    reduced = Moments(*torch.stack(moments))  # as after an all-reduce
    ours = [
        reinforce_plus_plus_baseline_advantages(REWARDS[r], GROUPS[r], CHOSEN[r], moments=reduced)
        for r in ranks
    ]
    torch.testing.assert_close(torch.cat(ours), whole)


@pytest.mark.usefixtures("unchecked_shapes")
def test_bad_inputs_are_refused():
    with pytest.raises(ValueError, match="eps is 0, but must be > 0"):
        whiten(VALUES, MASK, eps=0)
    with pytest.raises(ValueError, match=r"values has shape \(2, 2\) and mask \(2, 3\)"):
        whiten(VALUES[:, :2], MASK)
    with pytest.raises(ValueError, match="mask has dtype"):
        token_moments(VALUES, MASK.long())
    with pytest.raises(ValueError, match=r"values has shape \(3,\), but mask .* has 2 sequences"):
        spread_to_tokens(torch.zeros(3), MASK)


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_reinforce_plus_plus_equals_the_reference(gamma):
    mask = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 0, 0]]) > 0
    penalty = torch.tensor([[0.5, 9.0, -1.0], [0.25, 2.0, 9.0], [9.0, 9.0, 9.0]])
    ours = reinforce_plus_plus_advantages(
        torch.tensor([1.0, -2.0, 5.0]), mask, token_rewards=penalty, gamma=gamma
    )
    returns = [0.5 + gamma * 0.0, 0.0, 0.25 + gamma * 0.0, 0.0]
    mean = sum(returns) / 4
    variance = sum((x - mean) ** 2 for x in returns) / 3
    expected = torch.tensor([(x - mean) / (variance + 1e-8) ** 0.5 for x in returns])
    torch.testing.assert_close(ours[mask], expected)
    assert (ours[~mask] == 0).all()


def test_reinforce_plus_plus_of_two_ranks_is_that_of_one():
    rewards, mask = torch.tensor([1.0, 0.0, 3.0, 2.0]), torch.ones(4, 3) > 0
    whole = reinforce_plus_plus_advantages(rewards, mask, gamma=0.5)
    ranks = [slice(0, 1), slice(1, 4)]
    moments = add_moments(
        *(
            token_moments(reinforce_plus_plus_returns(rewards[r], mask[r], gamma=0.5), mask[r])
            for r in ranks
        )
    )
    parts = [
        reinforce_plus_plus_advantages(rewards[r], mask[r], gamma=0.5, moments=moments)
        for r in ranks
    ]
    torch.testing.assert_close(torch.cat(parts), whole)
