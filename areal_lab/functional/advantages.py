"""Advantages of samples that share a prompt: reward minus a baseline, over a scale.

`N` samples, each with an integer group id in any order; no loop over groups, static shapes.

    group_advantages(r, g)                                          GRPO
    group_advantages(r, g, scale=no_scale)                          Dr. GRPO
    group_advantages(r, g, scale=std_of_batch)                      LitePPO
    group_advantages(r, g, baseline=mean_of_others, scale=no_scale) RLOO
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from areal_lab.functional.checks import check_finite, check_integer, check_same_shape
from areal_lab.functional.segments import dense_ids, segment_reduce


class GroupedRewards(NamedTuple):
    """Rewards with what baselines and scales need to know about their groups."""

    rewards: Tensor
    """Reward of each sample, minus its group's smallest: equal rewards are exact zeros."""
    ids: Tensor
    """Group of each sample, numbered from 0."""
    sizes: Tensor
    """Number of samples in the group of each sample."""


Baseline: TypeAlias = Callable[[GroupedRewards], Tensor]
"""What a sample's reward is compared with, for each sample."""

Scale: TypeAlias = Callable[[Tensor, GroupedRewards, bool], Tensor]
"""`(centered, groups, unbiased) -> standard deviation` for each sample."""


def group_advantages(
    rewards: Float[Tensor, " N"],
    groups: Int[Tensor, " N"],
    *,
    baseline: Baseline | None = None,
    scale: Scale | None = None,
    unbiased: bool = True,
    eps: float = 1e-6,
) -> Float[Tensor, " N"]:
    r"""Advantage of each sample within its group.

    $$ A_i = \frac{R_i - b_i}{\sigma_i + \epsilon} $$

    A group of one, and a group of equal rewards, gives exactly 0 with every baseline and scale.

    Source: GRPO: DeepSeekMath (arXiv:2402.03300), section 4.1.2; RLOO: arXiv:2402.14740, eq. 7;
    Dr. GRPO: arXiv:2503.20783, section 3.2.

    Args:
        rewards: R of each sample.
        groups: integer id of each sample's group; any numbers, any order.
        baseline: `mean_of_group` (default) or `mean_of_others`.
        scale: `std_of_group` (default), `std_of_batch` or `no_scale`.
        unbiased: divide squares by n - 1 (as every framework does) rather than by n.
        eps: added to the standard deviation; not used with `no_scale`.

    Raises:
        ValueError: shapes differ, ids are no integers, rewards are not floating or not finite,
            or `eps` is negative.
    """
    check_same_shape("groups", groups, "rewards", rewards)
    check_integer("groups", groups)
    if rewards.dim() != 1 or not rewards.is_floating_point():
        raise ValueError(
            f"rewards has shape {tuple(rewards.shape)} and dtype {rewards.dtype}, but must be one "
            "floating number per sample; pass rewards.flatten().float()"
        )
    if not eps >= 0:
        raise ValueError(f"eps is {eps}, but must be >= 0")
    check_finite("rewards", rewards)
    grouped = _grouped(rewards, groups)
    centered = grouped.rewards - (baseline or mean_of_group)(grouped)
    if scale is no_scale:
        return centered
    deviation = (scale or std_of_group)(centered, grouped, unbiased)
    # Without this, eps = 0 would make 0 / 0 of equal rewards.
    divisor = torch.where(deviation + eps > 0, deviation + eps, torch.ones_like(deviation))
    return centered / divisor


def _grouped(rewards: Tensor, groups: Tensor) -> GroupedRewards:
    ids = dense_ids(groups)
    n = rewards.shape[0]
    # An advantage does not change when a constant is taken off its group. The minimum makes equal
    # rewards exact zeros; rounding would otherwise leave 1e-9, blown up by a scale of eps.
    smallest = segment_reduce(rewards.detach(), ids, n, reduce="min")[ids]
    sizes = segment_reduce(torch.ones_like(rewards), ids, n)[ids]
    return GroupedRewards(rewards - smallest, ids, sizes)


def mean_of_group(groups: GroupedRewards) -> Float[Tensor, " N"]:
    """Mean reward of the sample's group, itself included."""
    n = groups.rewards.shape[0]
    return segment_reduce(groups.rewards, groups.ids, n, reduce="mean")[groups.ids]


def mean_of_others(groups: GroupedRewards) -> Float[Tensor, " N"]:
    """Mean reward of the *other* samples of the group (leave one out); of one: its own reward."""
    n = groups.rewards.shape[0]
    total = segment_reduce(groups.rewards, groups.ids, n)[groups.ids]
    others = (total - groups.rewards) / (groups.sizes - 1).clamp(min=1)
    return torch.where(groups.sizes > 1, others, groups.rewards)


def no_scale(
    centered: Float[Tensor, " N"],
    groups: GroupedRewards,  # noqa: ARG001 - part of the signature of a scale
    unbiased: bool,  # noqa: ARG001
) -> Float[Tensor, " N"]:
    """Leave rewards in their own unit: a scale of 1, to which no eps is added."""
    return torch.ones_like(centered)


def std_of_group(
    centered: Float[Tensor, " N"],  # noqa: ARG001 - part of the signature of a scale
    groups: GroupedRewards,
    unbiased: bool,
) -> Float[Tensor, " N"]:
    """Standard deviation of the rewards of the sample's group; 0 for a group of one."""
    n = groups.rewards.shape[0]
    deviations = groups.rewards - mean_of_group(groups)
    squares = segment_reduce(deviations.square(), groups.ids, n)[groups.ids]
    degrees = (groups.sizes - 1).clamp(min=1) if unbiased else groups.sizes
    return _sqrt(squares / degrees)


def std_of_batch(
    centered: Float[Tensor, " N"],
    groups: GroupedRewards,  # noqa: ARG001 - part of the signature of a scale
    unbiased: bool,
) -> Float[Tensor, " N"]:
    """Standard deviation of the centered rewards of all groups together, the same for all."""
    degrees = max(1, centered.shape[0] - 1 if unbiased else centered.shape[0])
    variance = (centered - centered.mean()).square().sum() / degrees
    return _sqrt(variance).expand_as(centered)


def _sqrt(variance: Tensor) -> Tensor:
    """Square root whose gradient at 0 is 0 rather than infinite."""
    positive = variance > 0
    return torch.where(
        positive,
        torch.where(positive, variance, torch.ones_like(variance)).sqrt(),
        torch.zeros_like(variance),
    )
