r"""Advantages under the names of their papers, with the papers' defaults.

All are of samples, `N` rewards with an integer group id each, and 0 for a group of one and for a
group of equal rewards (ReMax has no groups). Only `rewards` gets a gradient.

    grpo      (R - mean) / std           max_rl      (R - mean) / mean
    dr_grpo    R - mean                  opo          R - mean weighted by length
    rloo       R - mean of the others    pass_at_k    best - second best, to the best
    lite_ppo  (R - mean) / std of all    remax        R - R of the greedy response
    gpg       alpha (R - mean) / f
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from areal_lab.functional.advantages.group import (
    GroupedRewards,
    Scale,
    check_rewards,
    group_advantages,
    grouped_rewards,
    length_weighted_mean,
    mean_of_others,
    mean_reward_of_group,
    no_scale,
    std_of_group,
    std_of_rewards,
)
from areal_lab.functional.checks import check_same_shape, count_known
from areal_lab.functional.segments import segment_reduce


def grpo_advantages(
    rewards: Float[Tensor, " N"], groups: Int[Tensor, " N"], *, eps: float = 1e-6
) -> Float[Tensor, " N"]:
    r"""Group-relative advantage, scaled by the group's standard deviation.

    $$ A_i = \frac{R_i - \bar R_g}{\sigma_g + \epsilon} $$

    The standard deviation is the unbiased one, as in every framework; the paper does not say.
    For the biased one: `group_advantages(..., unbiased=False)`.

    Source: DeepSeekMath (arXiv:2402.03300), section 4.1.2.

    Args:
        eps: added to the standard deviation. The paper has none; frameworks 1e-9 to 1e-4.

    Raises:
        ValueError: as `group_advantages`.
    """
    return group_advantages(rewards, groups, scale=std_of_group, eps=eps)


def dr_grpo_advantages(
    rewards: Float[Tensor, " N"], groups: Int[Tensor, " N"]
) -> Float[Tensor, " N"]:
    r"""GRPO without the standard deviation, which favors prompts with little variance.

    $$ A_i = R_i - \bar R_g $$

    Source: Dr. GRPO (arXiv:2503.20783), section 3.2.

    Raises:
        ValueError: as `group_advantages`.
    """
    return group_advantages(rewards, groups, scale=no_scale)


def rloo_advantages(rewards: Float[Tensor, " N"], groups: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    r"""REINFORCE with the mean of the other samples as baseline: leave one out.

    $$ A_i = R_i - \frac{1}{G - 1} \sum_{j \ne i} R_j = \frac{G}{G - 1} (R_i - \bar R_g) $$

    Source: RLOO (arXiv:2402.14740), eq. 7.

    Raises:
        ValueError: as `group_advantages`.
    """
    return group_advantages(rewards, groups, baseline=mean_of_others, scale=no_scale)


def lite_ppo_advantages(
    rewards: Float[Tensor, " N"], groups: Int[Tensor, " N"], *, eps: float = 1e-6
) -> Float[Tensor, " N"]:
    r"""Group mean as baseline, standard deviation of all rewards of the batch as scale.

    $$ A_i = \frac{R_i - \bar R_g}{\sigma_{batch} + \epsilon} $$

    The deviation is of the rewards as they are, difference between prompts included; for that of
    the centered rewards: `group_advantages(..., scale=std_of_batch)`.

    Source: LitePPO (arXiv:2508.08221).

    Args:
        eps: added to the standard deviation.

    Raises:
        ValueError: as `group_advantages`.
    """
    return group_advantages(rewards, groups, scale=std_of_rewards, eps=eps)


def opo_advantages(
    rewards: Float[Tensor, " N"], groups: Int[Tensor, " N"], length_tokens: Shaped[Tensor, " N"]
) -> Float[Tensor, " N"]:
    r"""Baseline of least variance, if a gradient's square grows with the number of its tokens.

    $$ A_i = R_i - \frac{\sum_{j \in g} |y_j| R_j}{\sum_{j \in g} |y_j|} $$

    Source: OPO (arXiv:2505.23585).

    Args:
        length_tokens: |y|, tokens the policy chose in each sample. Samples of length 0 have no say.

    Raises:
        ValueError: as `group_advantages`, or lengths of another shape.
    """
    check_same_shape("length_tokens", length_tokens, "rewards", rewards)
    baseline = length_weighted_mean(length_tokens)
    return group_advantages(rewards, groups, baseline=baseline, scale=no_scale)


def gpg_advantages(
    rewards: Float[Tensor, " N"],
    groups: Int[Tensor, " N"],
    *,
    alpha: float | None = None,
    scale: Scale = no_scale,
    eps: float = 1e-6,
) -> Float[Tensor, " N"]:
    r"""Mean-centered rewards, scaled up to compensate for samples without a gradient.

    $$ A_i = \alpha \frac{R_i - \bar R_g}{F}, \quad \alpha = \frac{B}{B - M} $$

    B samples, M of them in groups of equal rewards. So the mean over the batch is the mean over
    the samples that say something. A batch that says nothing gives 0.

    Source: GPG (arXiv:2504.02546), with F = 1; alpha as in the table of its authors' repository
    (AMAP-ML/GPG), where B / (B - M) did better than 1.

    Args:
        alpha: the factor; None counts this batch. Give it where a batch is split over ranks.
        scale: F; `std_of_group` for that of GRPO.
        eps: added to F, unless that is 1.

    Raises:
        ValueError: as `group_advantages`.
    """
    advantages = group_advantages(rewards, groups, scale=scale, eps=eps)
    if alpha is not None:
        return alpha * advantages
    grouped = grouped_rewards(rewards, groups)
    largest = segment_reduce(grouped.rewards.detach(), grouped.ids, rewards.shape[0], reduce="max")[
        grouped.ids
    ]
    informative = (largest > 0).sum().clamp(min=1).to(rewards.dtype)
    return rewards.shape[0] / informative * advantages


def max_rl_advantages(
    rewards: Float[Tensor, " N"], groups: Int[Tensor, " N"], *, eps: float = 0.0
) -> Float[Tensor, " N"]:
    r"""Mean-centered rewards divided by the mean reward: the maximum-likelihood direction.

    $$ A_i = \frac{R_i - \bar R_g}{\bar R_g + \epsilon} $$

    With rewards of 0 and 1 a prompt's gradient is weighted by 1 / success rate, that of the log of
    the success rate. A group whose rewards are all 0 gives 0.

    Source: MaxRL, maximum likelihood reinforcement learning (arXiv:2602.02710).

    Args:
        rewards: R >= 0 of each sample, such as 0 or 1.
        eps: added to the mean. The paper has none.

    Raises:
        ValueError: as `group_advantages`, or a reward is negative, where a mean near or below 0
            would turn the direction around.
    """
    _check_not_negative(rewards)
    return group_advantages(rewards, groups, scale=mean_reward_of_group, eps=eps)


def pass_at_k_advantages(
    rewards: Float[Tensor, " N"],
    groups: Int[Tensor, " N"],
    *,
    scale: Scale = std_of_group,
    eps: float = 1e-6,
) -> Float[Tensor, " N"]:
    r"""Leave-one-out advantage of the *best* reward of a group: what the best adds to it.

    $$ A_i = \frac{\max_j R_j - \max_{j \ne i} R_j}{\sigma_g + \epsilon} $$

    0 for all but a single best sample; 0 for all of a group in which two are best. k is the size
    of the group.

    Source: optimizing for inference-time objectives (arXiv:2503.19595); the scale is that of GRPO.

    Args:
        scale: `std_of_group` as verl has it, or `no_scale`.
        eps: added to the standard deviation.

    Raises:
        ValueError: as `group_advantages`.
    """
    return group_advantages(rewards, groups, baseline=best_of_others, scale=scale, eps=eps)


def best_of_others(groups: GroupedRewards) -> Float[Tensor, " N"]:
    """Second best reward for the best sample of a group; for all others their own reward.

    Source: optimizing for inference-time objectives (arXiv:2503.19595).
    """
    n, ids, rewards = groups.rewards.shape[0], groups.ids, groups.rewards
    best = rewards == segment_reduce(rewards.detach(), ids, n, reduce="max")[ids]
    second = segment_reduce(rewards, ids, n, mask=~best, reduce="max")[ids]
    winners = segment_reduce(best.long(), ids, n)[ids]
    return torch.where(best & (winners == 1) & (groups.sizes > 1), second, rewards)


def remax_advantages(
    rewards: Float[Tensor, " N"], greedy_rewards: Float[Tensor, " N"]
) -> Float[Tensor, " N"]:
    r"""Reward minus that of the greedy response to the same prompt; needs no group.

    $$ A_i = R(y_i) - R(y^{greedy}) $$

    Source: ReMax (arXiv:2310.10505).

    Args:
        greedy_rewards: R of the greedy response to each sample's prompt.

    Raises:
        ValueError: shapes differ, or rewards are not floating or not finite.
    """
    check_rewards("rewards", rewards)
    check_rewards("greedy_rewards", greedy_rewards)
    check_same_shape("greedy_rewards", greedy_rewards, "rewards", rewards)
    return rewards - greedy_rewards.detach()


def _check_not_negative(rewards: Tensor) -> None:
    negative = count_known(rewards < 0)
    if negative:
        raise ValueError(
            f"rewards (shape {tuple(rewards.shape)}) has {negative} negative entries, but must be "
            ">= 0: they are divided by their mean; add a constant"
        )
