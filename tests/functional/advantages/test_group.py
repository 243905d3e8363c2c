"""Group advantages: every baseline and scale, and the groups that have nothing to compare."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lab.functional.advantages.group import (
    group_advantages,
    length_weighted_mean,
    mean_of_group,
    mean_of_others,
    mean_reward_of_group,
    no_scale,
    std_of_batch,
    std_of_group,
    std_of_others,
    std_of_rewards,
)
from areal_lab.functional.advantages.named import best_of_others
from tests.reference import formulas

BASELINES = {"mean": mean_of_group, "leave one out": mean_of_others}
SCALES = {"none": no_scale, "group": std_of_group, "batch": std_of_batch}

REWARDS = torch.tensor([1.0, 0.0, 0.5, 0.0, 2.0, -1.0, 0.25], dtype=torch.double)
GROUPS = torch.tensor([40, 7, 40, 7, 40, 7, -3])


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("eps", [1e-6, 0.1])
def test_equals_the_reference(baseline, scale, unbiased, eps):
    ours = group_advantages(
        REWARDS,
        GROUPS,
        baseline=BASELINES[baseline],
        scale=SCALES[scale],
        unbiased=unbiased,
        eps=eps,
    )
    expected = formulas.group_advantages(
        REWARDS.tolist(),
        GROUPS.tolist(),
        leave_one_out=baseline == "leave one out",
        scale=scale,
        unbiased=unbiased,
        eps=eps,
    )
    torch.testing.assert_close(ours, torch.tensor(expected, dtype=torch.double))


def test_grpo_by_hand():
    """Two right of four: deviations of 1/2, unbiased standard deviation sqrt(1/3)."""
    ours = group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.zeros(4, dtype=torch.long))
    side = 0.5 / (1 / 3) ** 0.5
    torch.testing.assert_close(ours, torch.tensor([side, -side, -side, side]), atol=1e-5, rtol=0)


def test_leave_one_out_is_the_mean_stretched():
    """RLOO is G / (G - 1) times the mean-centered reward."""
    group = torch.zeros(7, dtype=torch.long)
    rloo = group_advantages(REWARDS, group, baseline=mean_of_others, scale=no_scale)
    centered = group_advantages(REWARDS, group, scale=no_scale)
    torch.testing.assert_close(rloo, 7 / 6 * centered)


@pytest.mark.parametrize("baseline", [*BASELINES.values(), best_of_others])
@pytest.mark.parametrize(
    "scale", [*SCALES.values(), std_of_others, std_of_rewards, mean_reward_of_group]
)
@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("eps", [1e-6, 0.0])
def test_equal_rewards_and_groups_of_one_give_exactly_zero(baseline, scale, unbiased, eps):
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.7, 1.0, 0.0])
    groups = torch.tensor([0, 0, 0, 1, 2, 2])
    keywords = {"baseline": baseline, "scale": scale, "unbiased": unbiased, "eps": eps}
    assert (group_advantages(rewards, groups, **keywords)[:4] == 0).all()
    assert (group_advantages(rewards[:4], groups[:4], **keywords) == 0).all()
    one = group_advantages(torch.tensor([0.7]), torch.tensor([5]), **keywords)
    assert one.tolist() == [0.0]
    assert group_advantages(rewards[:0], groups[:0], **keywords).shape == (0,)


def test_a_length_weighted_baseline_goes_with_any_scale():
    """Lengths 3 and 1: the baseline of 1 and 0 is 3/4; scaled by the deviation sqrt(1/2)."""
    advantages = group_advantages(
        torch.tensor([1.0, 0.0]),
        torch.zeros(2).long(),
        baseline=length_weighted_mean(torch.tensor([3, 1])),
        eps=0.0,
    )
    torch.testing.assert_close(advantages, torch.tensor([0.25, -0.75]) / 0.5**0.5)


batches = st.lists(
    st.tuples(st.integers(-2, 4), st.floats(-10, 10, width=32)), min_size=1, max_size=20
)


@settings(max_examples=30)
@given(batches, st.sampled_from(list(BASELINES.values())), st.sampled_from(list(SCALES.values())))
def test_a_constant_order_and_names_of_groups_do_not_matter(samples, baseline, scale):
    groups = torch.tensor([group for group, _ in samples])
    rewards = torch.tensor([reward for _, reward in samples], dtype=torch.double)

    def advantages(rewards, groups):
        return group_advantages(rewards, groups, baseline=baseline, scale=scale, eps=1e-2)

    usual = advantages(rewards, groups)
    close = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(advantages(rewards + 3.5, groups), usual, **close)
    torch.testing.assert_close(advantages(rewards, 5 - 3 * groups), usual, **close)
    torch.testing.assert_close(advantages(rewards.flip(0), groups.flip(0)).flip(0), usual, **close)
    # A constant of its own for each group matters to none of them either.
    torch.testing.assert_close(advantages(rewards + groups, groups), usual, **close)


@settings(max_examples=30)
@given(batches, st.sampled_from(list(BASELINES.values())), st.sampled_from(list(SCALES.values())))
def test_advantages_of_a_group_sum_to_zero_and_are_finite(samples, baseline, scale):
    groups = torch.tensor([group for group, _ in samples])
    rewards = torch.tensor([reward for _, reward in samples])
    advantages = group_advantages(rewards, groups, baseline=baseline, scale=scale)
    assert advantages.isfinite().all()
    for group in groups.unique():
        members = advantages[groups == group].double()
        assert members.sum().abs() <= 1e-4 * (1 + members.abs().sum())


@pytest.mark.parametrize("baseline", BASELINES.values())
@pytest.mark.parametrize("scale", SCALES.values())
def test_derivatives_with_respect_to_rewards_are_finite(baseline, scale):
    rewards = torch.tensor([0.1, 0.1, 0.7, 1.0, 0.0], dtype=torch.double)
    groups = torch.tensor([0, 0, 1, 2, 2])
    advantages = partial(group_advantages, baseline=baseline, scale=scale)
    jacobian = torch.func.jacrev(advantages)(rewards, groups)
    assert jacobian.isfinite().all()
    assert (jacobian[2] == 0).all()  # a group of one: 0 whatever its reward


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": torch.tensor([1.0, float("nan")])}, r"rewards \(shape \(2,\)\) has 1 entries"),
        ({"rewards": torch.tensor([1.0, float("inf")])}, "NaN or infinite"),
        ({"rewards": torch.tensor([1, 2])}, r"rewards has shape \(2,\) and dtype torch.int64"),
        ({"groups": torch.tensor([1, 2, 3])}, r"groups has shape \(3,\) and rewards \(2,\)"),
        ({"groups": torch.tensor([1.0, 2.0])}, "groups has dtype torch.float32"),
        ({"rewards": torch.ones(1, 2), "groups": torch.ones(1, 2).long()}, "one floating number"),
        ({"eps": -1e-6}, "eps is -1e-06"),
    ],
)
def test_bad_inputs_are_refused(change, message):
    inputs = {"rewards": torch.tensor([1.0, 0.0]), "groups": torch.tensor([0, 0])}
    with pytest.raises(ValueError, match=message):
        group_advantages(**{**inputs, **change})


def test_bfloat16_rewards_are_counted_in_float32():
    """A bfloat16 cannot count to 300: a group of 300 would have 256 samples or so."""
    rewards = (torch.arange(300) % 2).bfloat16()
    ours = group_advantages(rewards, torch.zeros(300, dtype=torch.long), scale=no_scale)
    assert ours.dtype == torch.float32
    assert set(ours.tolist()) == {-0.5, 0.5}
