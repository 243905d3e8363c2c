r"""Surrogates: the objective of each token, from its ratio to the anchor and its advantage.

A surrogate is a function `(policy, advantages) -> Surrogate`; bind its numbers with
`functools.partial` to pass it on. PPO's clip and its forms for stale tokens are in this file; the
others are in:

    reinforce_surrogates     w A log pi, the weight w without a gradient: CISPO, AIPO, IcePop, TOPR
    smooth_surrogates        SAPO's gate, GMPO's geometric mean, VESPO's kernel
    divergence_surrogates    trust regions in probabilities: DPPO
    squared_surrogates       A log pi minus a squared log ratio: Kimi k1.5, DRO
    covariance_surrogates    a few tokens treated apart: Clip-Cov, KL-Cov

Bounds are distances from ratio 1 everywhere, `1 - low` and `1 + high`; where a framework gives the
bound itself, such as a largest ratio of 5, take 1 off: `high = 4`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from areal_lab.functional.checks import check_token_inputs
from areal_lab.functional.masked import masked_quantiles, select
from areal_lab.functional.ratios import AnchoredPolicy

ClipEpsilon: TypeAlias = float | Sequence[float]
"""Half-width of the trust region around ratio 1, or (below, above) where they differ.

Any sequence of two numbers will do, such as the list that a configuration file gives.
"""


class Surrogate(NamedTuple):
    """A surrogate objective, to be maximized."""

    value: Float[Tensor, "*shape"]
    """Objective of each token; carries the gradient; 0 where masked."""
    clipped: Bool[Tensor, "*shape"]
    """True where the surrogate removed the gradient that the advantage of an unmasked token gives.

    Tokens with an advantage of 0 have no gradient to remove; a penalty may still have one.
    """


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
        clip_epsilon: one number, or (low, high). A low bound of 1 or more never clips.

    Source: PPO (arXiv:1707.06347), eq. 7; different bounds: DAPO (arXiv:2503.14476), eq. 10.

    Raises:
        ValueError: shapes differ, or a bound is negative or NaN.
    """
    return _clipped(policy, advantages, clip_epsilon, math.inf)


def dual_clip_surrogate(
    policy: AnchoredPolicy,
    advantages: Float[Tensor, "*shape"],
    *,
    clip_epsilon: ClipEpsilon = 0.2,
    dual_clip: float = 3.0,
) -> Surrogate:
    r"""PPO's clipped surrogate, with a floor of c A where A < 0.

    $$ \max(\min(r A, \mathrm{clip}(r, 1 - \epsilon_{low}, 1 + \epsilon_{high}) A),\ c A)
    \quad \text{where } A < 0 $$

    Without it a ratio of 100 multiplies a negative advantage by 100. TRL's and Liger-Kernel's
    `delta` is this c: they bound r by it before the minimum, the same in value and gradient.

    Args:
        clip_epsilon: one number, or (low, high). A low bound of 1 or more never clips.
        dual_clip: c, the largest ratio (not a distance from 1) that a negative advantage is
            multiplied with; infinity gives `clip_surrogate`.

    Source: dual-clip PPO (arXiv:1912.09729).

    Raises:
        ValueError: shapes differ, a bound is negative or NaN, or `dual_clip` is not above 1.
    """
    if not dual_clip > 1:
        raise ValueError(
            f"dual_clip is {dual_clip}, but must be > 1: the largest ratio itself, as in 3.0, not "
            "its distance from 1"
        )
    return _clipped(policy, advantages, clip_epsilon, dual_clip)


def sat_surrogate(
    policy: AnchoredPolicy,
    advantages: Float[Tensor, "*shape"],
    *,
    clip_epsilon: ClipEpsilon = 0.2,
    quantile: float = 0.9,
    exponent: float = 2.0,
) -> Surrogate:
    r"""PPO's clipped surrogate, whose outward end is nearer to 1 for tokens that moved far.

    $$ \min(r A,\ \mathrm{clip}(r, 1 - \epsilon_{low} c^-, 1 + \epsilon_{high} c^+) A), \qquad
    d = \mathrm{sg}(\log r),\quad q = Q_{0.9}(|d|) $$

    $$ h = \frac{1}{1 + (|d| / q)^n}, \qquad (c^-, c^+) = \begin{cases} (1, h) & d > q \\
    (h, 1) & d < -q \\ (1, 1) & \text{otherwise} \end{cases} $$

    q is over the unmasked tokens of this call, so micro-batches have their own. Inside of q, and
    for the pull back to ratio 1, it is PPO. With q = 0 (every ratio is 1) it is PPO, too.

    Args:
        policy: ratio to the anchor, the behavior policy; with the proximal one, d is only the
            distance that this batch went.
        clip_epsilon: one number, or (low, high). A low bound of 1 or more never clips.
        quantile: share of tokens, by |d|, that keep PPO's bounds, in [0, 1]; 1 is PPO.
        exponent: n of the Hill kernel; 0 halves both bounds beyond q.

    Source: SAT, "Stale but Stable" (arXiv:2607.18722), as retold: the gate, the quantile of 0.9,
    the chosen end and a "Hill kernel with exponent 2". The paper was not at hand; the kernel here
    is the plain Hill function, which is 1/2 at q.

    Raises:
        ValueError: shapes differ, a bound is negative or NaN, `quantile` is not in [0, 1], or
            `exponent` is negative.
    """
    if not 0 <= quantile <= 1:
        raise ValueError(f"quantile is {quantile}, but must be in [0, 1]; 1 is PPO's clip")
    if not exponent >= 0:
        raise ValueError(f"exponent is {exponent}, but must be >= 0, as 2")
    advantages = surrogate_advantages(policy, advantages)
    low, high = clip_bounds(clip_epsilon)
    moved = policy.log_ratio.detach()
    far = moved.abs()
    levels = torch.tensor([quantile], dtype=far.dtype, device=far.device)
    edge = masked_quantiles(far, policy.mask, levels)[0]
    # NaN without an unmasked token, 0 where nothing moved: neither gates anything.
    gated = far > torch.where(edge > 0, edge, torch.inf)
    relative = far / torch.where(edge > 0, edge, torch.ones_like(edge))
    kernel = torch.where(gated, 1 / (1 + relative.pow(exponent)), torch.ones_like(far))
    highest = torch.log1p(high * torch.where(moved > 0, kernel, torch.ones_like(kernel)))
    # log 0, of a bound of 1 or more, is the minus infinity that never clips.
    lowest = (1 - low * torch.where(moved < 0, kernel, torch.ones_like(kernel))).clamp(min=0).log()
    return _bounded(policy, advantages, lowest, highest, math.inf)


def _clipped(
    policy: AnchoredPolicy, advantages: Tensor, clip_epsilon: ClipEpsilon, dual_clip: float
) -> Surrogate:
    advantages = surrogate_advantages(policy, advantages)
    log_low, log_high = log_clip_bounds(clip_epsilon)
    return _bounded(policy, advantages, log_low, log_high, dual_clip)


def _bounded(
    policy: AnchoredPolicy,
    advantages: Tensor,
    log_low: float | Tensor,
    log_high: float | Tensor,
    dual_clip: float,
) -> Surrogate:
    """The minimum of r A and of clip(r) A, with the log ratio bounded by numbers or by token."""
    above = torch.clamp(policy.log_ratio, max=log_high)
    below = torch.clamp(policy.log_ratio, min=log_low).clamp(max=math.log(dual_clip))
    bounded = torch.where(advantages >= 0, above, below)
    clipped = (bounded != policy.log_ratio).detach() & (advantages != 0) & policy.mask
    return Surrogate(torch.exp(bounded) * advantages, clipped)


def surrogate_advantages(policy: AnchoredPolicy, advantages: Tensor) -> Float[Tensor, "*shape"]:
    """Advantages as a surrogate uses them: of the right shape, detached, 0 where masked.

    Raises:
        ValueError: they are not of the shape of the mask.
    """
    check_token_inputs(policy.mask, advantages=advantages)
    return select(advantages.detach(), policy.mask)


def log_clip_bounds(clip_epsilon: ClipEpsilon) -> tuple[float, float]:
    """(log(1 - low), log(1 + high)) of a clip range; minus infinity for a low bound from 1 on.

    Raises:
        ValueError: a bound is negative or NaN.
    """
    low, high = clip_bounds(clip_epsilon)
    return math.log1p(-low) if low < 1 else -math.inf, math.log1p(high)


def clip_bounds(clip_epsilon: ClipEpsilon, *, name: str = "clip_epsilon") -> tuple[float, float]:
    """(low, high) of a trust region given as one number or as a pair.

    Raises:
        ValueError: a bound is negative or NaN, or there are not one or two of them; the sentence
            calls it by `name`.
    """
    bounds = clip_epsilon if isinstance(clip_epsilon, Sequence) else (clip_epsilon, clip_epsilon)
    if len(bounds) != 2:
        raise ValueError(
            f"{name} is {clip_epsilon}, but must be one number or the two of (low, high), as in "
            "0.2 or (0.2, 0.28)"
        )
    low, high = bounds
    if not (low >= 0 and high >= 0):
        raise ValueError(
            f"{name} is {clip_epsilon}, but its bounds are distances to both sides and must be "
            ">= 0, as in 0.2 or (0.2, 0.28)"
        )
    return low, high
