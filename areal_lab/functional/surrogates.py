r"""What is maximised per token, given the ratio to the anchor and the advantage.

A surrogate is a function `(policy, advantages) -> Surrogate`; bind its numbers with
`functools.partial` to pass it on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from areal_lab.functional.checks import check_token_inputs
from areal_lab.functional.masked import select
from areal_lab.functional.ratios import AnchoredPolicy

ClipEpsilon: TypeAlias = float | tuple[float, float]
"""Half-width of the trust region around ratio 1, or (below, above) where they differ."""


class Surrogate(NamedTuple):
    """A surrogate objective, to be maximised."""

    value: Tensor
    """Objective of each token; carries the gradient; 0 where masked."""
    clipped: Tensor
    """True where the surrogate removed the gradient of an unmasked token."""


SurrogateFunction: TypeAlias = Callable[[AnchoredPolicy, Tensor], Surrogate]
"""`(policy, advantages) -> Surrogate`."""


def clip_surrogate(
    policy: AnchoredPolicy,
    advantages: Float[Tensor, "*shape"],
    *,
    clip_epsilon: ClipEpsilon = 0.2,
) -> Surrogate:
    r"""PPO's clipped surrogate, with the same or different bounds on both sides.

    $$ \min(r A,\ \mathrm{clip}(r, 1 - \epsilon_{low}, 1 + \epsilon_{high}) A) $$

    The minimum only ever bounds r from above where A > 0 and from below where A < 0, so log r is
    bounded before exp: same value and gradient, but no `0 * inf` when a ratio overflows.

    Args:
        policy: ratio to the anchor.
        advantages: A; gets no gradient.
        clip_epsilon: one number, or (low, high). A low bound of 1 or more never clips.

    Source: PPO (arXiv:1707.06347), eq. 7; different bounds: DAPO (arXiv:2503.14476), eq. 10.

    Raises:
        ValueError: shapes differ, or a bound is negative or NaN.
    """
    check_token_inputs(policy.mask, advantages=advantages)
    low, high = clip_bounds(clip_epsilon)
    advantages = select(advantages.detach(), policy.mask)
    log_low = math.log1p(-low) if low < 1 else -math.inf
    bounded = torch.where(
        advantages >= 0,
        policy.log_ratio.clamp(max=math.log1p(high)),
        policy.log_ratio.clamp(min=log_low),
    )
    clipped = (bounded != policy.log_ratio).detach() & (advantages != 0) & policy.mask
    return Surrogate(torch.exp(bounded) * advantages, clipped)


def clip_bounds(clip_epsilon: ClipEpsilon) -> tuple[float, float]:
    """(low, high) of a clip range given as one number or as a pair.

    Raises:
        ValueError: a bound is negative or NaN.
    """
    low, high = clip_epsilon if isinstance(clip_epsilon, tuple) else (clip_epsilon, clip_epsilon)
    if not (low >= 0 and high >= 0):
        raise ValueError(
            f"clip_epsilon is {clip_epsilon}, but bounds are distances from ratio 1 and must be "
            ">= 0, as in 0.2 or (0.2, 0.28)"
        )
    return low, high
