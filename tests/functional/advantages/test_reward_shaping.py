"""Rewards before advantages: shifted, scaled, clipped, normalized, less for overlong answers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lab.functional.advantages.reward_shaping import (
    clip_advantages,
    no_moments,
    normalize_rewards,
    overlong_penalty,
    shape_rewards,
)
from tests.reference import filters as reference

REWARDS = torch.tensor([1.0, 0.0, 0.5, -3.0], dtype=torch.double)


def test_shaping_equals_the_reference():
    ours = shape_rewards(REWARDS, bias=-0.5, scale=10.0, clip=6.0)
    expected = [reference.shape_reward(r, -0.5, 10.0, 6.0) for r in REWARDS.tolist()]
    assert ours.tolist() == expected == [5.0, -5.0, 0.0, -6.0]
    assert shape_rewards(REWARDS).tolist() == REWARDS.tolist()


def test_clipped_rewards_get_no_gradient():
    rewards = REWARDS.clone().requires_grad_()
    shape_rewards(rewards, scale=2.0, clip=3.0).sum().backward()
    assert rewards.grad is not None
    assert rewards.grad.tolist() == [2, 2, 2, 0]


@settings(max_examples=30)
@given(st.integers(1, 200), st.integers(0, 200), st.lists(st.integers(0, 500), max_size=20))
def test_overlong_penalty_equals_the_reference(buffer, rest, lengths):
    ours = overlong_penalty(
        torch.tensor(lengths, dtype=torch.long),
        max_length_tokens=buffer + rest,
        buffer_tokens=buffer,
    )
    expected = [reference.overlong_penalty(n, buffer + rest, buffer) for n in lengths]
    torch.testing.assert_close(ours, torch.tensor(expected))


def test_overlong_penalty_is_capped_beyond_the_limit():
    """80 tokens free, 20 over which it grows; 130 of 100 would be -2.5 without the cap."""
    lengths = torch.tensor([0, 80, 90, 100, 130])
    ours = overlong_penalty(lengths, max_length_tokens=100, buffer_tokens=20)
    assert ours.tolist() == [0, 0, -0.5, -1, -1]
    assert (
        overlong_penalty(lengths, max_length_tokens=100, buffer_tokens=20, factor=0.5)[-1] == -0.5
    )


def test_running_normalization_equals_the_reference():
    batches = [[1.0, 0.0, 0.5], [2.0, 2.0], [-1.0]]
    moments = no_moments()
    for batch, expected in zip(
        batches, reference.running_normalization(batches, eps=1e-8), strict=True
    ):
        result = normalize_rewards(torch.tensor(batch, dtype=torch.double), moments)
        torch.testing.assert_close(result.rewards, torch.tensor(expected, dtype=torch.double))
        moments = result.moments
    assert moments.size == 6


def test_forgetting_makes_old_batches_count_less():
    first, second = torch.zeros(4), torch.tensor([1.0, 3.0])
    moments = normalize_rewards(first, no_moments()).moments
    kept = normalize_rewards(second, moments, decay=0.5).moments
    assert kept.size == 2 + 2
    assert kept.mean() == 1
    forgotten = normalize_rewards(second, moments, decay=0.0)
    assert forgotten.moments.size == 2
    torch.testing.assert_close(forgotten.rewards, torch.tensor([-1.0, 1.0]) / 2**0.5)


def test_uncentered_normalization_only_scales():
    rewards = torch.tensor([1.0, 3.0])
    ours = normalize_rewards(rewards, no_moments(), center=False).rewards
    torch.testing.assert_close(ours, rewards / rewards.std())


def test_equal_first_rewards_give_zero_and_the_state_has_no_gradient():
    rewards = torch.full((3,), 0.1, requires_grad=True)
    result = normalize_rewards(rewards, no_moments())
    assert result.rewards.tolist() == [0, 0, 0]
    assert not any(moment.requires_grad for moment in result.moments)
    assert normalize_rewards(torch.tensor([0.7]), no_moments()).rewards.tolist() == [0]


def test_advantages_are_clipped_on_both_sides():
    assert clip_advantages(torch.tensor([-9.0, 0.5, 9.0]), bound=2.0).tolist() == [-2, 0.5, 2]


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: shape_rewards(REWARDS, clip=-1.0), "clip is -1.0"),
        (lambda: shape_rewards(REWARDS / 0), r"rewards \(shape \(4,\)\) has 4 entries"),
        (lambda: clip_advantages(REWARDS, bound=float("nan")), "bound is nan"),
        (lambda: normalize_rewards(REWARDS, no_moments(), eps=0.0), "eps is 0.0"),
        (lambda: normalize_rewards(REWARDS, no_moments(), decay=1.5), "decay is 1.5"),
        (lambda: normalize_rewards(REWARDS / 0, no_moments()), "NaN or infinite"),
        (
            lambda: overlong_penalty(REWARDS, max_length_tokens=9, buffer_tokens=3),
            "length_tokens has dtype torch.float64",
        ),
        (
            lambda: overlong_penalty(torch.ones(1).long(), max_length_tokens=9, buffer_tokens=10),
            "buffer_tokens is 10 and max_length_tokens 9",
        ),
        (
            lambda: overlong_penalty(torch.ones(1).long(), max_length_tokens=9, buffer_tokens=0),
            "buffer_tokens is 0",
        ),
        (
            lambda: overlong_penalty(
                torch.ones(1).long(), max_length_tokens=9, buffer_tokens=3, factor=-1.0
            ),
            "factor is -1.0",
        ),
    ],
)
def test_bad_inputs_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
