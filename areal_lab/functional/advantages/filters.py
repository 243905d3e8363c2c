r"""Filters of samples: a boolean per sample, to be combined with `&`, `|` and `~`.

    keep = ~zero_variance_groups(r, g) & overlong_mask(lengths, max_length_tokens=4096)
    mask = keep_samples(mask, keep)

Shapes stay as they are: a filtered sample is masked, not cut out. Nothing here has a gradient.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from areal_lab.functional.advantages.group import grouped_rewards, mean_of_group
from areal_lab.functional.checks import check_integer, check_same_shape
from areal_lab.functional.segments import Segments, segment_reduce, sequences_or_rows


def zero_variance_groups(
    rewards: Float[Tensor, " N"], groups: Int[Tensor, " N"], *, tolerance: float = 0.0
) -> Bool[Tensor, " N"]:
    r"""True for the samples of a group whose rewards are all equal: they have advantage 0.

    $$ \max_{j \in g} R_j - \min_{j \in g} R_j \le \tau $$

    A group of one counts as equal. Dynamic sampling replaces such groups with others.

    Source: dynamic sampling of DAPO (arXiv:2503.14476), eq. 11.

    Args:
        rewards: R of each sample; shape them before or after, which frameworks disagree about.
        tolerance: tau, the largest difference that still counts as equal.

    Raises:
        ValueError: shapes differ, ids are not integers, rewards are not floating or not finite, or
            `tolerance` is negative.
    """
    if not tolerance >= 0:
        raise ValueError(f"tolerance is {tolerance}, but must be >= 0: a difference of rewards")
    grouped = grouped_rewards(rewards.detach(), groups)
    n = rewards.shape[0]
    spread = segment_reduce(grouped.rewards, grouped.ids, n, reduce="max")
    return (spread <= tolerance)[grouped.ids]


def difficulty_band(
    rewards: Float[Tensor, " N"],
    groups: Int[Tensor, " N"],
    *,
    low: float = 0.0,
    high: float = 1.0,
) -> Bool[Tensor, " N"]:
    r"""True for the samples of a group of medium difficulty: its mean reward is inside the band.

    $$ low < \frac{1}{|g|} \sum_{j \in g} R_j < high $$

    Both bounds are outside. With rewards of 0 and 1 the defaults keep the groups that are neither
    all right nor all wrong. The mean of a group of one is its reward.

    Source: DAPO (arXiv:2503.14476), eq. 11, in shares instead of counts.

    Args:
        low: lower bound of the mean, in the unit of R.
        high: upper bound of the mean.

    Raises:
        ValueError: shapes differ, ids are not integers, rewards are not floating or not finite, or
            `low` is not below `high`.
    """
    if not low < high:
        raise ValueError(f"low is {low} and high {high}, but low must be below high")
    grouped = grouped_rewards(rewards.detach(), groups)
    mean = mean_of_group(grouped) + grouped.smallest
    return (low < mean) & (mean < high)


def overlong_mask(
    length_tokens: Int[Tensor, " N"],
    *,
    max_length_tokens: int,
    finished: Bool[Tensor, " N"] | None = None,
) -> Bool[Tensor, " N"]:
    r"""True for the responses that count; False for those cut off at the limit of length.

    $$ |y_i| < L_{max} \quad \text{or} \quad y_i \text{ ended by itself} $$

    A cut-off response is rewarded as wrong although its reasoning may be right, hence this filter.

    Source: overlong filtering of DAPO (arXiv:2503.14476), section 3.4.

    Args:
        length_tokens: |y|, prompt excluded.
        max_length_tokens: L_max, the sampler's limit.
        finished: True where the response ended by itself, at the limit included. None: unknown, and
            a response of `max_length_tokens` counts as cut off.

    Raises:
        ValueError: lengths are not integers, shapes differ, or `max_length_tokens` is below 1.
    """
    check_integer("length_tokens", length_tokens)
    if max_length_tokens < 1:
        raise ValueError(f"max_length_tokens is {max_length_tokens}, but must be >= 1")
    below = length_tokens < max_length_tokens
    if finished is None:
        return below
    check_same_shape("finished", finished, "length_tokens", length_tokens)
    if finished.dtype != torch.bool:
        raise ValueError(f"finished has dtype {finished.dtype}, but must be torch.bool")
    return below | finished


def keep_samples(
    mask: Bool[Tensor, "*shape"],
    keep: Bool[Tensor, " sequences"],
    *,
    sequences: Segments | None = None,
) -> Bool[Tensor, "*shape"]:
    """Token mask without the tokens of the samples that are not kept.

    A mean that counts this mask divides by what is left; to divide by what there was, pass the
    count from before as `token_count` (or `sequence_count`).

    Args:
        keep: True for the samples that count, one per sequence.

    Source: definition.

    Raises:
        ValueError: a mask is not boolean, or there are more or fewer of `keep` than sequences.
    """
    for name, value in (("mask", mask), ("keep", keep)):
        if value.dtype != torch.bool:
            raise ValueError(f"{name} has dtype {value.dtype}, but must be torch.bool")
    ids, count = sequences_or_rows(mask, sequences)
    if keep.shape != (count,):
        raise ValueError(
            f"keep has shape {tuple(keep.shape)}, but mask (shape {tuple(mask.shape)}) has {count} "
            "sequences; give one entry per sequence, or the sequences of the tokens"
        )
    return mask & keep[ids]
