r"""Whiten over the unmasked tokens of a batch, which may be split over ranks.

    tokens of rank 0 --moments--+
                                +--add_moments (an all-reduce)--> whiten(..., moments=sum)
    tokens of rank 1 --moments--+

Moments are sums, so those of the parts add up to those of the whole.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from areal_lab.functional.advantages.group import group_advantages, no_scale
from areal_lab.functional.advantages.returns import (
    Discount,
    Holes,
    carry_over_holes,
    reinforce_plus_plus_returns,
)
from areal_lab.functional.checks import wide
from areal_lab.functional.masked import select
from areal_lab.functional.segments import Segments, sequences_or_rows, value_of_segment


class Moments(NamedTuple):
    """Sums as float64 scalars: `torch.stack(moments)` can be all-reduced."""

    size: Tensor
    """Number of values."""
    total: Tensor
    """Their sum."""
    squares: Tensor
    """Sum of their squares."""

    def mean(self) -> Tensor:
        """Mean; 0 of nothing."""
        return self.total / self.size.clamp(min=1)

    def variance(self, *, unbiased: bool = True) -> Tensor:
        """Variance; 0 of a single number and of nothing.

        From sums in float64: exact to about 1e-16 of the mean's square.
        """
        squares = (self.squares - self.total * self.mean()).clamp(min=0)
        return squares / (self.size - int(unbiased)).clamp(min=1)


def token_moments(values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Moments:
    """Moments of the unmasked values. Split a batch, and the moments of its parts add up.

    Source: definition.

    Raises:
        ValueError: shapes differ, or the mask is not boolean.
    """
    chosen = select(values, mask).double()
    return Moments(mask.sum().to(chosen.dtype), chosen.sum(), chosen.square().sum())


def add_moments(first: Moments, *others: Moments) -> Moments:
    """Moments of all the numbers together.

    Source: definition.
    """
    return Moments(*(sum(parts[1:], start=parts[0]) for parts in zip(first, *others, strict=True)))


def whiten(
    values: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    moments: Moments | None = None,
    unbiased: bool = True,
    keep_mean: bool = False,
    eps: float = 1e-8,
) -> Float[Tensor, "*shape"]:
    r"""Normalize the unmasked values to mean 0 and variance 1.

    $$ \hat x_t = \frac{x_t - \mu}{\sqrt{\sigma^2 + \epsilon}}, \quad
    \mu = \frac{1}{N} \sum_t m_t x_t, \quad \sigma^2 = \frac{1}{N - 1} \sum_t m_t (x_t - \mu)^2 $$

    In float32 at least. A single unmasked value gives 0, as do equal ones (in float64 up to
    rounding); an empty mask gives zeros.

    Source: Huang et al., implementation details of RLHF with PPO (arXiv:2403.17031).

    Args:
        values: one number per token; the only input that gets a gradient, through the moments too
            when they are taken here.
        mask: True where a value counts; elsewhere the result is 0.
        moments: of the whole batch, where it is split over micro-batches or ranks; None takes
            those of these values.
        keep_mean: add the mean again, so that only the scale changes.
        eps: added to the variance, inside the root.

    Raises:
        ValueError: shapes differ, or `eps` is not positive.
    """
    if not eps > 0:
        raise ValueError(f"eps is {eps}, but must be > 0: equal values have variance 0")
    if moments is None:
        moments = token_moments(values, mask)
    else:
        moments = Moments(*(moment.detach() for moment in moments))
    values = wide(values)
    mean = moments.mean().to(values.dtype)
    scale = torch.rsqrt(moments.variance(unbiased=unbiased) + eps).to(values.dtype)
    whitened = (select(values, mask) - mean) * scale
    return select(whitened + mean if keep_mean else whitened, mask)


def spread_to_tokens(
    values: Float[Tensor, " sequences"],
    mask: Bool[Tensor, "*shape"],
    *,
    sequences: Segments | None = None,
) -> Float[Tensor, "*shape"]:
    """Give each unmasked token the number of its sequence, such as an advantage; 0 elsewhere.

    Args:
        values: one number per sequence; gets the gradient of its tokens.

    Source: definition.

    Raises:
        ValueError: there are more or fewer values than sequences.
    """
    ids, count = sequences_or_rows(mask, sequences)
    if values.shape != (count,):
        raise ValueError(
            f"values has shape {tuple(values.shape)}, but mask (shape {tuple(mask.shape)}) has "
            f"{count} sequences; give one value per sequence, or the sequences of the tokens"
        )
    return select(value_of_segment(values, ids), mask)


def reinforce_plus_plus_advantages(
    rewards: Float[Tensor, "*sequences"],
    mask: Bool[Tensor, "*shape"],
    *,
    token_rewards: Float[Tensor, "*shape"] | None = None,
    gamma: Discount = 1.0,
    holes: Holes = carry_over_holes,
    sequences: Segments | None = None,
    moments: Moments | None = None,
    unbiased: bool = True,
    eps: float = 1e-8,
) -> Float[Tensor, "*shape"]:
    r"""Returns of tokens, whitened over all tokens of the batch, without groups or a critic.

    $$ A_t = \mathrm{whiten}_t(R_t), \quad
    R_t = \sum_{s \ge t} \gamma^{s-t} \left( r_s + [s = |y|]\, R \right) $$

    Source: REINFORCE++ (arXiv:2501.03262).

    Args:
        rewards: R of each sequence: `[N]` for `[N, T]` tokens, a scalar for one sequence `[T]`.
        mask: True where the policy chose the token; elsewhere the result is 0.
        token_rewards: r of each token, such as -beta times a KL estimate; None is 0. These two get
            a gradient.
        gamma: discount of a token; one number, or one per token.
        moments: `token_moments` of `reinforce_plus_plus_returns` over a whole batch that is split;
            None takes those of this part.
        eps: added to the variance, inside the root.

    Raises:
        ValueError: as `reinforce_plus_plus_returns` and `whiten`.
    """
    returns = reinforce_plus_plus_returns(
        rewards, mask, token_rewards=token_rewards, gamma=gamma, holes=holes, sequences=sequences
    )
    return whiten(returns, mask, moments=moments, unbiased=unbiased, eps=eps)


def reinforce_plus_plus_baseline_advantages(
    rewards: Float[Tensor, " sequences"],
    groups: Int[Tensor, " sequences"],
    mask: Bool[Tensor, "*shape"],
    *,
    sequences: Segments | None = None,
    moments: Moments | None = None,
    unbiased: bool = True,
    eps: float = 1e-8,
) -> Float[Tensor, "*shape"]:
    r"""Center rewards by their group, then whiten over all tokens of the batch.

    $$ A_t = \mathrm{whiten}_t(R_{i(t)} - \bar R_{g(i(t))}) $$

    Long responses weigh more in the mean and variance, as tokens are counted. A group of one and a
    group of equal rewards are centered to 0, but whitening moves them off it unless the mean over
    tokens is 0.

    Source: REINFORCE++ (arXiv:2501.03262), its variant with a baseline.

    Args:
        rewards: R of each sequence; the only input that gets a gradient.
        groups: integer id of each sequence's prompt.
        mask: True where the policy chose the token; elsewhere the result is 0.
        moments: `token_moments` of the centered rewards, spread to tokens, over a whole batch
            that is split; None takes those of this part.
        eps: added to the variance, inside the root.

    Raises:
        ValueError: as `group_advantages`, `spread_to_tokens` and `whiten`.
    """
    centered = group_advantages(rewards, groups, scale=no_scale)
    tokens = spread_to_tokens(centered, mask, sequences=sequences)
    return whiten(tokens, mask, moments=moments, unbiased=unbiased, eps=eps)
