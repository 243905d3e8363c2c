"""Advantages of samples that share a prompt: reward minus a baseline, over a scale.

`N` samples, each with an integer group id in any order; no loop over groups, static shapes.

    group_advantages(r, g)                                               GRPO
    group_advantages(r, g, scale=no_scale)                               Dr. GRPO
    group_advantages(r, g, scale=std_of_rewards)                         LitePPO
    group_advantages(r, g, baseline=mean_of_others, scale=no_scale)      RLOO
    group_advantages(r, g, baseline=mean_of_others, scale=std_of_others) NeMo-RL's default

`named_advantages` has these and others under their names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from areal_lab.functional.checks import (
    applied,
    check_finite,
    check_integer,
    check_same_shape,
    wide,
)
from areal_lab.functional.segments import dense_ids, segment_reduce


class GroupedRewards(NamedTuple):
    """Rewards with what baselines and scales need to know about their groups."""

    rewards: Float[Tensor, " N"]
    """Reward of each sample, minus its group's smallest: equal rewards are exact zeros."""
    ids: Int[Tensor, " N"]
    """Group of each sample, numbered from 0."""
    sizes: Float[Tensor, " N"]
    """Number of samples in the group of each sample."""
    smallest: Float[Tensor, " N"]
    """The group's smallest reward, for scales that need rewards as they were; no gradient."""


Baseline: TypeAlias = Callable[[GroupedRewards], Tensor]
"""Function that gives the value to subtract from each sample's reward."""

Scale: TypeAlias = Callable[[Tensor, GroupedRewards, bool], Tensor]
"""`(centered, groups, unbiased) -> divisor` for each sample, such as a standard deviation."""


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
    Results are float32 at least, whatever the type of the rewards.

    Source: GRPO: DeepSeekMath (arXiv:2402.03300), section 4.1.2; RLOO: arXiv:2402.14740, eq. 7;
    Dr. GRPO: arXiv:2503.20783, section 3.2.

    Args:
        baseline: `mean_of_group` (default), `mean_of_others`, `length_weighted_mean(lengths)`, or
            your own function of `GroupedRewards`.
        scale: `std_of_group` (default), `std_of_others`, `std_of_batch`, `std_of_rewards`,
            `mean_reward_of_group`, `no_scale`, or your own.
        unbiased: divide squares by n - 1 (as every framework does) rather than by n.
        eps: added to the scale; not used with `no_scale`.

    Only `rewards` gets a gradient, through baseline and scale too.

    Raises:
        ValueError: shapes differ, ids are not integers, rewards are not floating or not finite,
            or `eps` is negative.
    """
    if not eps >= 0:
        raise ValueError(f"eps is {eps}, but must be >= 0")
    grouped = grouped_rewards(rewards, groups)
    centered = grouped.rewards - applied(
        "baseline", baseline or mean_of_group, grouped, gives=Tensor, example="mean_of_group"
    )
    if scale is no_scale:
        return centered
    deviation = applied(
        "scale",
        scale or std_of_group,
        centered,
        grouped,
        unbiased,
        gives=Tensor,
        example="std_of_group",
    )
    # Without this, eps = 0 would make 0 / 0 of equal rewards.
    divisor = torch.where(deviation + eps > 0, deviation + eps, torch.ones_like(deviation))
    return centered / divisor


def grouped_rewards(rewards: Float[Tensor, " N"], groups: Int[Tensor, " N"]) -> GroupedRewards:
    """Rewards with their groups numbered and the smallest of each group subtracted.

    What baselines, scales and filters of your own start from; sizes are those of the groups.

    Args:
        rewards: R of each sample; gets a gradient.

    Source: definition.

    Raises:
        ValueError: shapes differ, ids are not integers, or rewards are not floating or not finite.
    """
    check_same_shape("groups", groups, "rewards", rewards)
    check_integer("groups", groups)
    check_rewards("rewards", rewards)
    # Sizes are counted in this type: a bfloat16 cannot count beyond 256.
    rewards = wide(rewards)
    ids = dense_ids(groups)
    n = rewards.shape[0]
    # An advantage does not change when a constant is taken off its group. The minimum makes equal
    # rewards exact zeros; rounding would otherwise leave 1e-9, blown up by a scale of eps.
    smallest = segment_reduce(rewards.detach(), ids, n, reduce="min")[ids]
    sizes = segment_reduce(torch.ones_like(rewards), ids, n)[ids]
    return GroupedRewards(rewards - smallest, ids, sizes, smallest)


def check_rewards(name: str, rewards: Tensor) -> None:
    """Refuse what is not one finite floating number per sample.

    Raises:
        ValueError: more or fewer axes than one, another dtype, or an entry that is not finite.
    """
    if rewards.dim() != 1 or not rewards.is_floating_point():
        raise ValueError(
            f"{name} has shape {tuple(rewards.shape)} and dtype {rewards.dtype}, but must be one "
            f"floating number per sample; pass {name}.flatten().float()"
        )
    check_finite(name, rewards)


def mean_of_group(groups: GroupedRewards) -> Float[Tensor, " N"]:
    """Mean reward of the sample's group, including the sample.

    Source: DeepSeekMath (arXiv:2402.03300), section 4.1.2.
    """
    n = groups.rewards.shape[0]
    return segment_reduce(groups.rewards, groups.ids, n, reduce="mean")[groups.ids]


def mean_of_others(groups: GroupedRewards) -> Float[Tensor, " N"]:
    """Mean reward of the *other* samples of the group (leave one out); of one: its own reward.

    Source: RLOO (arXiv:2402.14740), eq. 7.
    """
    n = groups.rewards.shape[0]
    total = segment_reduce(groups.rewards, groups.ids, n)[groups.ids]
    others = (total - groups.rewards) / (groups.sizes - 1).clamp(min=1)
    return torch.where(groups.sizes > 1, others, groups.rewards)


def length_weighted_mean(lengths: Shaped[Tensor, " N"]) -> Baseline:
    r"""Baseline in which each sample counts by its length: $\sum_j |y_j| R_j / \sum_j |y_j|$.

    The baseline of least variance if the gradients of tokens are independent and equally large.
    Samples of length 0 have no say; in a group without a token the smallest reward is the baseline.
    Source: OPO (arXiv:2505.23585).

    Raises:
        ValueError: (when applied) there is not one length per reward.
    """

    def baseline(groups: GroupedRewards) -> Tensor:
        check_same_shape("lengths", lengths, "rewards", groups.rewards)
        n = groups.rewards.shape[0]
        weights = lengths.detach().to(groups.rewards.dtype)
        total = segment_reduce(weights, groups.ids, n)
        weighted = segment_reduce(weights * groups.rewards, groups.ids, n)
        return (weighted / torch.where(total > 0, total, torch.ones_like(total)))[groups.ids]

    return baseline


def no_scale(
    centered: Float[Tensor, " N"],
    groups: GroupedRewards,  # noqa: ARG001 - part of the signature of a scale
    unbiased: bool,  # noqa: ARG001 - part of the signature of a scale
) -> Float[Tensor, " N"]:
    """No scale: a scale of 1 without eps.

    Source: Dr. GRPO (arXiv:2503.20783), section 3.2.
    """
    return torch.ones_like(centered)


def std_of_group(
    centered: Float[Tensor, " N"],  # noqa: ARG001 - part of the signature of a scale
    groups: GroupedRewards,
    unbiased: bool,
) -> Float[Tensor, " N"]:
    """Standard deviation of the rewards of the sample's group; 0 for a group of one.

    Source: DeepSeekMath (arXiv:2402.03300), section 4.1.2.
    """
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
    """Standard deviation of the centered rewards of all groups together, the same for all.

    Source: REINFORCE++-baseline (arXiv:2501.03262), there over tokens.
    """
    degrees = max(1, centered.shape[0] - 1 if unbiased else centered.shape[0])
    variance = (centered - centered.mean()).square().sum() / degrees
    return _sqrt(variance).expand_as(centered)


def std_of_rewards(
    centered: Float[Tensor, " N"],  # noqa: ARG001 - part of the signature of a scale
    groups: GroupedRewards,
    unbiased: bool,
) -> Float[Tensor, " N"]:
    """Standard deviation of all uncentered rewards, including differences between prompts.

    Source: LitePPO (arXiv:2508.08221), the standard deviation of the batch.
    """
    return std_of_batch(groups.rewards + groups.smallest, groups, unbiased)


def std_of_others(
    centered: Float[Tensor, " N"],  # noqa: ARG001 - part of the signature of a scale
    groups: GroupedRewards,
    unbiased: bool,
) -> Float[Tensor, " N"]:
    """Standard deviation of the *other* samples of the group; 1 if these are all equal.

    Where siblings are nearly equal it is tiny and the advantage huge. `std_of_group` includes the
    sample's own distance, so that no advantage exceeds about the root of the group's size.

    Source: the leave-one-out baseline of NeMo-RL; no paper has it.
    """
    n, ids = groups.rewards.shape[0], groups.ids
    # Squares of all minus the sample's own cancel when siblings are nearly equal: in float64.
    rewards, sizes = groups.rewards.double(), groups.sizes.double()
    deviations = rewards - segment_reduce(rewards, ids, n, reduce="mean")[ids]
    squares = segment_reduce(deviations.square(), ids, n)[ids]
    squares = squares - deviations.square() * sizes / (sizes - 1).clamp(min=1)
    std = _sqrt(squares / (sizes - 1 - int(unbiased)).clamp(min=1))
    # Exactly, since rounding would leave 1e-9 to divide by: one sample differs, all others agree.
    largest = segment_reduce(rewards.detach(), ids, n, reduce="max")[ids]
    at_bottom, at_top = rewards == 0, rewards == largest
    bottoms = segment_reduce(at_bottom.long(), ids, n)[ids]
    tops = segment_reduce(at_top.long(), ids, n)[ids]
    equal = (bottoms == sizes) | (at_top & (bottoms == sizes - 1))
    equal = equal | (at_bottom & (tops == sizes - 1))
    return torch.where(equal, torch.ones_like(std), std).to(groups.rewards.dtype)


def mean_reward_of_group(
    centered: Float[Tensor, " N"],  # noqa: ARG001 - part of the signature of a scale
    groups: GroupedRewards,
    unbiased: bool,  # noqa: ARG001 - part of the signature of a scale
) -> Float[Tensor, " N"]:
    """Mean of the group's rewards; with rewards of 0 and 1, its success rate.

    Source: MaxRL (arXiv:2602.02710).
    """
    return mean_of_group(groups) + groups.smallest


def _sqrt(variance: Tensor) -> Tensor:
    """Square root whose gradient at 0 is 0 rather than infinite."""
    positive = variance > 0
    return torch.where(
        positive,
        torch.where(positive, variance, torch.ones_like(variance)).sqrt(),
        torch.zeros_like(variance),
    )
