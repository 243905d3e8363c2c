"""Weights of prompts by their success rate: closed forms, and the policy gradient itself."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch

from areal_lab.functional import (
    advantages_by_count,
    dr_grpo_advantages,
    grpo_advantages,
    lite_ppo_advantages,
    max_rl_advantages,
    pass_at_k_advantages,
    prompt_weight,
    rloo_advantages,
)

RATES = torch.tensor([0.0, 0.03, 0.125, 0.5, 0.8, 1.0], dtype=torch.double)


def test_advantages_by_count_by_hand():
    by_count = advantages_by_count(dr_grpo_advantages, 4)
    assert by_count.right.tolist() == [0.0, 0.75, 0.5, 0.25, 0.0]
    assert by_count.wrong.tolist() == [0.0, -0.25, -0.5, -0.75, 0.0]


@pytest.mark.parametrize("group_size", [2, 8])
def test_without_a_scale_each_prompt_has_the_same_weight(group_size):
    """So the mean success rate is maximized; leaving one out makes it exactly that."""
    ones = torch.ones_like(RATES)
    plain = prompt_weight(dr_grpo_advantages, RATES, group_size=group_size)
    torch.testing.assert_close(plain.weight, (group_size - 1) / group_size * ones)
    torch.testing.assert_close(plain.size, (group_size - 1) / group_size * 2 * RATES * (1 - RATES))
    left_out = prompt_weight(rloo_advantages, RATES, group_size=group_size)
    torch.testing.assert_close(left_out.weight, ones)


@pytest.mark.parametrize("group_size", [2, 8])
def test_max_rl_weights_by_the_inverse_success_rate(group_size):
    weight = prompt_weight(max_rl_advantages, RATES, group_size=group_size).weight
    expected = (1 - (1 - RATES[1:]) ** (group_size - 1)) / RATES[1:]
    torch.testing.assert_close(weight[1:], expected)
    assert weight[0].item() == pytest.approx(group_size - 1)  # the limit


def test_grpo_weights_by_the_inverse_deviation_in_large_groups():
    rates = torch.tensor([0.2, 0.5, 0.9], dtype=torch.double)
    weight = prompt_weight(grpo_advantages, rates, group_size=512).weight
    torch.testing.assert_close(weight, (rates * (1 - rates)).rsqrt(), rtol=0.01, atol=0)


def test_grpo_in_a_small_group_favors_the_ends_up_to_a_bound():
    weight = prompt_weight(partial(grpo_advantages, eps=0.0), RATES, group_size=8).weight
    assert weight[0].item() == pytest.approx(7 / math.sqrt(8))
    assert weight[-1].item() == pytest.approx(weight[0].item())
    assert weight[3] < weight[2] < weight[1] < weight[0]


def test_grpo_gives_each_mixed_group_the_same_sum_of_squares():
    by_count = advantages_by_count(partial(grpo_advantages, eps=0.0), 8)
    counts = torch.arange(9)
    squares = counts * by_count.right.square() + (8 - counts) * by_count.wrong.square()
    torch.testing.assert_close(squares[1:-1], torch.full((7,), 7.0, dtype=torch.double))
    assert squares[0] == squares[-1] == 0


@pytest.mark.parametrize(
    "estimator", [grpo_advantages, rloo_advantages, max_rl_advantages, pass_at_k_advantages]
)
def test_the_weight_is_that_of_the_policy_gradient(estimator):
    """Of a policy that is right with probability sigmoid(theta), over all outcomes of a group."""
    theta, size = 0.4, 4
    p = 1 / (1 + math.exp(-theta))
    slope = p * (1 - p)  # of p by theta
    total = 0.0
    for outcome in itertools.product([0.0, 1.0], repeat=size):
        rewards = torch.tensor(outcome, dtype=torch.double)
        chance = math.prod(p if right else 1 - p for right in outcome)
        scores = torch.tensor([1 - p if right else -p for right in outcome], dtype=torch.double)
        advantages = estimator(rewards, torch.zeros(size, dtype=torch.long))
        total += chance * (advantages * scores).mean().item()
    weight = prompt_weight(estimator, torch.tensor([p], dtype=torch.double), group_size=size).weight
    assert weight.item() * slope == pytest.approx(total)


def test_informative_groups_are_mixed():
    found = prompt_weight(grpo_advantages, RATES, group_size=8).informative
    torch.testing.assert_close(found, 1 - RATES**8 - (1 - RATES) ** 8)


def test_other_prompts_matter_to_estimators_of_the_batch():
    easy = {"others": torch.ones(8, dtype=torch.double), "other_groups": torch.full((8,), 3)}
    mixed = easy | {"others": torch.tensor([0.0, 1.0] * 4, dtype=torch.double)}
    at = partial(prompt_weight, success_rates=RATES, group_size=8)
    for estimator, moves in ((lite_ppo_advantages, True), (grpo_advantages, False)):
        first, second = at(estimator, **easy).weight, at(estimator, **mixed).weight
        assert torch.equal(first, second) is not moves


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_size": 0}, "group_size is 0, but must be at least 1"),
        ({"success_rates": torch.tensor([1.1])}, r"outside of \[0, 1\]"),
        ({"others": torch.ones(2)}, "others and other_groups belong together"),
        (
            {"others": torch.ones(2), "other_groups": torch.zeros(3, dtype=torch.long)},
            r"other_groups has shape \(3,\)",
        ),
        ({"advantages": lambda rewards, _: rewards.mean()}, r"gave shape \(\) for 4 samples"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_bad_input_is_refused(change, message):
    arguments = {
        "advantages": grpo_advantages,
        "success_rates": torch.tensor([0.5]),
        "group_size": 4,
    } | change
    with pytest.raises(ValueError, match=message):
        prompt_weight(**arguments)
