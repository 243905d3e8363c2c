"""Lag of the data, its histograms, and the effective sample size.

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
from areal_lab.functional.segments import Segments, segment_reduce, sequences_or_rows


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
        trainer_version: version of the weights at the start of the training step.

    Source: definition.

    Raises:
        ValueError: shapes differ, or versions are not integers.
    """
    check_integer("versions", versions)
    check_token_inputs(mask, versions=versions)
    lag = trainer_version - versions
    return torch.where(mask, lag, torch.zeros_like(lag))


def trajectory_lag(
    lag: Int[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    sequences: Segments | None = None,
) -> TrajectoryLag:
    """Head, tail and mean lag of each trajectory.

    Args:
        lag: lag of each token, from `token_lag`.
        sequences: trajectory of each token (`packed_sequences`); None takes rows.

    Source: definition.
    """
    check_token_inputs(mask, lag=lag)
    ids, trajectories = sequences_or_rows(mask, sequences)
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

    Source: definition.

    Raises:
        ValueError: shapes differ, or `bins` is not positive.
    """
    return segment_reduce(mask.long(), _bin(lag, mask, bins), bins)


def mean_by_lag(
    values: Float[Tensor, "*shape"],
    lag: Int[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    bins: int,
) -> Float[Tensor, " bins"]:
    """Mean of the values of each lag, such as a divergence, a weight, or a clipped share; float64.

    Args:
        values: one value per token; pass `x.double()` for a boolean.
        lag: lag of each token, from `token_lag`.
        bins: the bins are those of `lag_histogram`; one without a token gives 0.

    Source: definition.

    Raises:
        ValueError: shapes differ, or `bins` is not positive.
    """
    check_token_inputs(mask, values=values)
    index = _bin(lag, mask, bins)
    return segment_reduce(values.detach().double(), index, bins, mask=mask, reduce="mean")


def effective_sample_size(
    weights: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]
) -> Float[Tensor, ""]:
    r"""Number of equally weighted tokens that the weighted tokens are worth; at most their
    number.

    $$ \mathrm{ESS} = \frac{(\sum_t w_t)^2}{\sum_t w_t^2} $$

    Args:
        weights: non-negative, finite importance weights, such as `PolicyLossResult.behavior_weight`
            or its product with `ratio`. Their scale does not matter.
        mask: True where a token counts. 0 when none does, or when all weights are 0.

    Summed in float64: float32 stops counting at 16,777,216 equal weights.

    Source: Kong, Liu, Wong (1994), as in Owen, Monte Carlo theory, methods and examples, eq. 9.13.
    """
    check_token_inputs(mask, weights=weights)
    everything = torch.zeros(mask.shape, dtype=torch.long, device=mask.device)
    return effective_sample_size_by_lag(weights, everything, mask, bins=1)[0]


def effective_sample_share(
    weights: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]
) -> Float[Tensor, ""]:
    r"""Effective sample size over the number of tokens, in 0 .. 1.

    $$ \frac{\mathrm{ESS}}{N} = \frac{1}{\mathrm{mean}((w / \bar w)^2)} $$

    Args:
        weights: non-negative, finite importance weights; their scale does not matter.
        mask: True where a token counts, dropped ones with weight 0 included: each lowers the
            share. 0 when none counts, or when all weights are 0.

    Source: Owen, Monte Carlo theory, methods and examples, eq. 9.13, divided by n.
    """
    return effective_sample_size(weights, mask) / mask.sum().clamp(min=1)


def effective_sample_size_of_logs(
    log_weights: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]
) -> Float[Tensor, ""]:
    r"""Effective sample size of weights that are too large or small to be written as numbers.

    $$ \mathrm{ESS} = \frac{(\sum_i e^{l_i - l^*})^2}{\sum_i e^{2 (l_i - l^*)}},
    \quad l^* = \max_i l_i $$

    For products of weights over sequences, `segment_reduce(log_ratio, ids, count, mask=mask)`, or
    for weights of several ratios, the sum of their logs.

    Args:
        log_weights: log w of each token, or of each sequence; minus infinity is a weight of 0.
        mask: True where it counts. 0 when none does, or when all weights are 0.

    Source: see `effective_sample_size`.
    """
    check_token_inputs(mask, log_weights=log_weights)
    limits = torch.finfo(log_weights.dtype)
    logs = select(log_weights.detach(), mask, fill=-float("inf")).clamp(max=limits.max)
    # The sum over nothing is not an error, its maximum is: hence a neutral first entry.
    largest = torch.cat([logs.new_full((1,), -float("inf")), logs.reshape(-1)]).amax()
    shift = torch.where(largest > limits.min, largest, torch.zeros_like(largest))
    return effective_sample_size(torch.exp(logs - shift), mask)


def effective_sample_size_by_lag(
    weights: Float[Tensor, "*shape"],
    lag: Int[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    bins: int,
) -> Float[Tensor, " bins"]:
    """Effective sample size of the tokens of each lag, float64; bins as in `lag_histogram`.

    Divide by the histogram for the share that is left of the tokens of each age.

    Source: see `effective_sample_size`.

    Raises:
        ValueError: shapes differ, or `bins` is not positive.
    """
    check_token_inputs(mask, weights=weights)
    weights = select(weights.detach(), mask).double()
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
