"""Advantages under their papers' names: equal to slow references, and right in their limits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lab.functional.advantages.group import (
    group_advantages,
    mean_of_others,
    no_scale,
    std_of_batch,
    std_of_group,
    std_of_others,
)
from areal_lab.functional.advantages.named import (
    dr_grpo_advantages,
    gpg_advantages,
    grpo_advantages,
    lite_ppo_advantages,
    max_rl_advantages,
    opo_advantages,
    pass_at_k_advantages,
    remax_advantages,
    rloo_advantages,
)
from tests.reference import advantages as reference

REWARDS = torch.tensor([1.0, 0.0, 0.5, 0.0, 2.0, 0.75, 0.25, 0.3, 0.3], dtype=torch.double)
GROUPS = torch.tensor([40, 7, 40, 7, 40, 7, -3, 9, 9])
LENGTHS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5])

NAMED = {
    "grpo": (grpo_advantages, lambda r, g: reference.grpo(r, g, 1e-6)),
    "dr_grpo": (dr_grpo_advantages, reference.dr_grpo),
    "rloo": (rloo_advantages, reference.rloo),
    "lite_ppo": (lite_ppo_advantages, lambda r, g: reference.lite_ppo(r, g, 1e-6)),
    "gpg": (gpg_advantages, reference.gpg),
    "max_rl": (max_rl_advantages, lambda r, g: reference.max_rl(r, g, 0.0)),
    "pass_at_k": (pass_at_k_advantages, lambda r, g: reference.pass_at_k(r, g, 1e-6)),
    "opo": (
        lambda r, g: opo_advantages(r, g, (torch.arange(len(r)) * 7) % 5 + 1),
        lambda r, g: reference.opo(r, g, [(i * 7) % 5 + 1 for i in range(len(r))]),
    ),
}

BATCHES = st.lists(
    st.tuples(st.integers(-2, 3), st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0])),
    min_size=1,
    max_size=16,
)


@pytest.mark.parametrize("name", NAMED)
def test_equals_the_reference(name):
    ours, slow = NAMED[name]
    expected = torch.tensor(slow(REWARDS.tolist(), GROUPS.tolist()), dtype=torch.double)
    torch.testing.assert_close(ours(REWARDS, GROUPS), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMED)
@settings(max_examples=40)
@given(samples=BATCHES)
def test_equals_the_reference_on_any_batch(name, samples):
    ours, slow = NAMED[name]
    groups, rewards = [group for group, _ in samples], [reward for _, reward in samples]
    expected = torch.tensor(slow(rewards, groups), dtype=torch.double)
    result = ours(torch.tensor(rewards, dtype=torch.double), torch.tensor(groups))
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NAMED)
def test_groups_of_one_and_of_equal_rewards_give_exactly_zero(name):
    advantages = NAMED[name][0](
        torch.tensor([0.1, 0.1, 0.1, 0.7, 1.0, 0.0]), torch.tensor([0, 0, 0, 1, 2, 2])
    )
    assert advantages[:4].tolist() == [0.0] * 4
    assert advantages[4] > 0
    assert NAMED[name][0](torch.zeros(3), torch.zeros(3).long()).tolist() == [0.0] * 3
    assert NAMED[name][0](torch.zeros(0), torch.zeros(0).long()).shape == (0,)


# Without opo, whose lengths are by position here.
@settings(max_examples=30)
@given(BATCHES, st.sampled_from([name for name in NAMED if name != "opo"]))
def test_names_of_groups_do_not_matter_nor_does_order(samples, name):
    groups = torch.tensor([group for group, _ in samples])
    rewards = torch.tensor([reward for _, reward in samples], dtype=torch.double)
    usual = NAMED[name][0](rewards, groups)
    close = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(NAMED[name][0](rewards, 5 - 3 * groups), usual, **close)
    turned = NAMED[name][0](rewards.flip(0), groups.flip(0)).flip(0)
    torch.testing.assert_close(turned, usual, **close)


def test_equal_lengths_make_opo_the_plain_mean():
    ours = opo_advantages(REWARDS, GROUPS, torch.full_like(LENGTHS, 7))
    torch.testing.assert_close(ours, dr_grpo_advantages(REWARDS, GROUPS))


def test_in_opo_samples_without_tokens_have_no_say():
    rewards, group = torch.tensor([0.5, 1.0, 0.0]), torch.zeros(3).long()
    ours = opo_advantages(rewards, group, torch.tensor([3, 1, 0]))
    torch.testing.assert_close(ours, rewards - (3 * 0.5 + 1.0) / 4)
    nobody = opo_advantages(rewards, group, torch.zeros(3).long())
    torch.testing.assert_close(nobody, rewards)  # the smallest reward, 0, is the baseline


def test_gpg_stretches_what_says_something():
    """Four of six samples are in a group of equal rewards: the other two count three times."""
    rewards = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 0.0])
    groups = torch.tensor([0, 0, 1, 1, 2, 2])
    assert gpg_advantages(rewards, groups).tolist() == [0, 0, 0, 0, 1.5, -1.5]
    assert gpg_advantages(rewards, groups, alpha=1.0).tolist() == [0, 0, 0, 0, 0.5, -0.5]
    scaled = gpg_advantages(rewards, groups, scale=std_of_group, alpha=1.0)
    torch.testing.assert_close(scaled, grpo_advantages(rewards, groups))


def test_max_rl_weighs_by_the_inverse_success_rate():
    """One of four right: (1 - 1/4) / (1/4) = 3 for it and -1 for the others."""
    ours = max_rl_advantages(torch.tensor([0.0, 1.0, 0.0, 0.0]), torch.zeros(4).long())
    assert ours.tolist() == [-1, 3, -1, -1]


@pytest.mark.usefixtures("unchecked_shapes")
def test_max_rl_refuses_negative_rewards_where_it_can_see_them():
    rewards, groups = torch.tensor([-1.0, 1.0]), torch.zeros(2).long()
    with pytest.raises(ValueError, match=r"rewards \(shape \(2,\)\) has 1 negative entries"):
        max_rl_advantages(rewards, groups)
    mapped = torch.func.vmap(max_rl_advantages)(rewards.abs()[None], groups[None])
    assert mapped.shape == (1, 2)


def test_pass_at_k_rewards_a_single_best_sample_only():
    rewards = torch.tensor([0.2, 0.9, 0.5, 1.0, 1.0, 0.0])
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    ours = pass_at_k_advantages(rewards, groups, scale=no_scale)
    torch.testing.assert_close(ours, torch.tensor([0.0, 0.9 - 0.5, 0.0, 0.0, 0.0, 0.0]))


def test_remax_is_the_reward_beyond_the_greedy_one():
    rewards = torch.tensor([1.0, 0.0], requires_grad=True)
    greedy = torch.tensor([0.25, 0.25], requires_grad=True)
    advantages = remax_advantages(rewards, greedy)
    assert advantages.tolist() == [0.75, -0.25]
    advantages.sum().backward()
    assert rewards.grad is not None
    assert greedy.grad is None


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("greedy", "message"),
    [
        (torch.zeros(3), r"greedy_rewards has shape \(3,\) and rewards \(2,\)"),
        (torch.tensor([0.0, float("nan")]), r"greedy_rewards \(shape \(2,\)\) has 1 entries"),
        (torch.zeros(2).long(), "greedy_rewards has shape .* and dtype torch.int64"),
    ],
)
def test_remax_refuses_bad_greedy_rewards(greedy, message):
    with pytest.raises(ValueError, match=message):
        remax_advantages(torch.zeros(2), greedy)


@pytest.mark.usefixtures("unchecked_shapes")
def test_opo_refuses_lengths_of_another_shape():
    with pytest.raises(ValueError, match=r"length_tokens has shape \(3,\) and rewards \(2,\)"):
        opo_advantages(torch.zeros(2), torch.zeros(2).long(), torch.ones(3).long())


def test_lite_ppo_counts_the_difference_between_prompts():
    """Two prompts, all right and all wrong but for one each: centered rewards vary less."""
    rewards = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0], dtype=torch.double)
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    of_rewards = lite_ppo_advantages(rewards, groups, eps=0.0)
    torch.testing.assert_close(of_rewards[0] * rewards.std(), torch.tensor(0.25).double())
    centered = group_advantages(rewards, groups, scale=std_of_batch, eps=0.0)
    assert (centered.abs() > of_rewards.abs()).all()


@pytest.mark.parametrize("unbiased", [True, False])
@settings(max_examples=30)
@given(samples=BATCHES)
def test_leaving_one_out_of_mean_and_deviation_equals_the_reference(unbiased, samples):
    groups, rewards = [group for group, _ in samples], [reward for _, reward in samples]
    ours = group_advantages(
        torch.tensor(rewards, dtype=torch.double),
        torch.tensor(groups),
        baseline=mean_of_others,
        scale=std_of_others,
        unbiased=unbiased,
    )
    expected = reference.leave_one_out_both(rewards, groups, 1e-6, unbiased)
    torch.testing.assert_close(ours, torch.tensor(expected, dtype=torch.double))


def test_nearly_equal_siblings_blow_up_what_leaves_one_out():
    """0, 0.01, 1: the last is 0.995 above siblings that deviate by 0.007, hence 140; GRPO: 1.15."""
    rewards, group = torch.tensor([0.0, 0.01, 1.0]), torch.zeros(3).long()
    ours = group_advantages(rewards, group, baseline=mean_of_others, scale=std_of_others)
    assert ours[2] == pytest.approx(0.995 / (0.01 / 2**0.5), rel=1e-3)
    assert grpo_advantages(rewards, group)[2] < 1.16
    # Equal siblings leave the difference as it is.
    ours = group_advantages(
        torch.tensor([0.1, 0.1, 1.0]), group, baseline=mean_of_others, scale=std_of_others
    )
    assert ours[2] == pytest.approx(0.9, rel=1e-5)
