"""How old the data is, and how much of it is left: lag, histograms, effective sample size.

Lag is counted in versions: the trainer's version minus the version that sampled the token.
Everything here is a tensor without a gradient; nothing waits for a device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from areal_lab.functional.checks import check_integer, check_same_shape, check_token_inputs
from areal_lab.functional.masked import select
from areal_lab.functional.segments import segment_reduce


class TrajectoryLag(NamedTuple):
    """Lag of each trajectory, in versions; 0 where it has no unmasked token."""

    head: Tensor
    """Lag of the oldest version among its tokens, at which it was started: the largest."""
    tail: Tensor
    """Lag of the newest version among its tokens: the smallest."""
    mean: Tensor
    """Mean over its tokens."""
    tokens: Tensor
    """Number of its unmasked tokens."""


def token_lag(
    versions: Int[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    trainer_version: int | Int[Tensor, ""],
) -> Int[Tensor, "*shape"]:
    r"""Lag of each token, $v - v_\mu$; 0 where masked.

    Args:
        versions: version that sampled the token.
        mask: True where the policy chose the token; prompts and observations (-1) are masked.
        trainer_version: version of the weights that the training step begins with.

    Raises:
        ValueError: shapes differ, or versions are no integers.
    """
    check_integer("versions", versions)
    check_token_inputs(mask, versions=versions)
    lag = trainer_version - versions
    return torch.where(mask, lag, torch.zeros_like(lag))


def trajectory_lag(
    lag: Int[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    ids: Int[Tensor, "*shape"],
    trajectories: int,
) -> TrajectoryLag:
    """Head, tail and mean lag of each trajectory.

    Args:
        lag: lag of each token, from `token_lag`.
        mask: True where the policy chose the token.
        ids: trajectory of each token (`padded_sequence_ids`, `packed_sequence_ids`).
        trajectories: number of trajectories.

    Raises:
        ValueError: shapes differ.
    """
    return TrajectoryLag(
        head=segment_reduce(lag, ids, trajectories, mask=mask, reduce="max"),
        tail=segment_reduce(lag, ids, trajectories, mask=mask, reduce="min"),
        mean=segment_reduce(lag.double(), ids, trajectories, mask=mask, reduce="mean").float(),
        tokens=segment_reduce(mask.long(), ids, trajectories),
    )


def lag_histogram(
    lag: Int[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], *, bins: int
) -> Int[Tensor, " bins"]:
    """Number of unmasked tokens (or trajectories) with each lag 0, 1, ...

    The last bin holds everything from `bins - 1` on. A negative lag counts as 0: the sampler
    cannot be ahead of the trainer.

    Raises:
        ValueError: shapes differ, or `bins` is not positive.
    """
    return segment_reduce(mask.long(), _bin(lag, mask, bins), bins)


def effective_sample_size(
    weights: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]
) -> Float[Tensor, ""]:
    r"""How many equally weighted tokens the weighted ones are worth; at most their number.

    $$ \mathrm{ESS} = \frac{(\sum_t w_t)^2}{\sum_t w_t^2} $$

    Args:
        weights: non-negative, finite importance weights, such as `PolicyLossResult.behavior_weight`
            or its product with `ratio`. Their scale does not matter.
        mask: True where a token counts. 0 when none does, or when all weights are 0.

    Source: Kong, Liu, Wong (1994), as in Owen, Monte Carlo theory, methods and examples, eq. 9.13.

    Raises:
        ValueError: shapes differ.
    """
    check_token_inputs(mask, weights=weights)
    everything = torch.zeros(mask.shape, dtype=torch.long, device=mask.device)
    return effective_sample_size_by_lag(weights, everything, mask, bins=1)[0]


def effective_sample_size_by_lag(
    weights: Float[Tensor, "*shape"],
    lag: Int[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    bins: int,
) -> Float[Tensor, " bins"]:
    """Effective sample size of the tokens of each lag; the bins are those of `lag_histogram`.

    Divide by the histogram for the share that is left of the tokens of each age.

    Raises:
        ValueError: shapes differ, or `bins` is not positive.
    """
    check_token_inputs(mask, weights=weights)
    weights = select(weights.detach(), mask)
    index = _bin(lag, mask, bins)
    # Squares of large weights overflow; ESS does not depend on the scale, hence divide by the max.
    largest = segment_reduce(weights, index, bins, mask=mask, reduce="max")
    relative = weights / torch.where(largest > 0, largest, torch.ones_like(largest))[index]
    total = segment_reduce(relative, index, bins)
    squares = segment_reduce(relative.square(), index, bins)
    return total.square() / torch.where(squares > 0, squares, torch.ones_like(squares))


def _bin(lag: Tensor, mask: Tensor, bins: int) -> Tensor:
    check_token_inputs(mask)
    check_integer("lag", lag)
    check_same_shape("lag", lag, "mask", mask)
    if bins < 1:
        raise ValueError(f"bins is {bins}, but must be at least 1")
    return torch.where(mask, lag, torch.zeros_like(lag)).clamp(0, bins - 1).long()
