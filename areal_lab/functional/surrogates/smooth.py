r"""Trust regions without a hard clip per token: a gate, a geometric mean, a kernel.

    SAPO     gradient falls off smoothly on both sides of r = 1      per token
    GMPO     log ratios are clipped, then averaged                   per sequence
    VESPO    gradient weight W^k exp(-lambda W) of a product   per sequence, not normalized

Those per sequence take the ratio of each token and use `policy.sequences`.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from areal_lab.functional.masked import select
from areal_lab.functional.ratios import AnchoredPolicy
from areal_lab.functional.segments import segment_reduce, value_of_segment
from areal_lab.functional.surrogates.clip import (
    ClipEpsilon,
    Surrogate,
    clip_bounds,
    surrogate_advantages,
)
from areal_lab.functional.surrogates.reinforce import weighted_logprobs

# sigmoid(40) is 1 in every floating type, and its gradient an exact 0.
_SATURATED = 40.0


def sapo_surrogate(
    policy: AnchoredPolicy,
    advantages: Float[Tensor, "*shape"],
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> Surrogate:
    r"""SAPO: a sigmoid instead of the clip.

    $$ \frac{4}{\tau}\, \sigma(\tau (r - 1))\, A, \qquad
    \tau = \tau_+ \text{ where } A > 0, \text{ else } \tau_- $$

    The gradient is that of r A times $\mathrm{sech}^2(\tau (r - 1) / 2)$: all of it at r = 1, half
    of it where |r - 1| = 1.76 / tau. `clipped` is True where the gate is shut to the last bit, from
    tau (r - 1) = 40 on.

    Args:
        tau_positive: sharpness where A > 0; larger is a narrower trust region.
        tau_negative: sharpness where A < 0; slightly larger for stability.

    Source: SAPO (arXiv:2511.20347).

    Raises:
        ValueError: shapes differ, or a sharpness is not positive and finite.
    """
    for name, tau in (("tau_positive", tau_positive), ("tau_negative", tau_negative)):
        if not 0 < tau < math.inf:
            raise ValueError(f"{name} is {tau}, but must be positive and finite, as in 1.0")
    advantages = surrogate_advantages(policy, advantages)
    # Beyond this the sigmoid is flat; bounded before exp, as an infinite ratio times a slope of 0
    # would be NaN.
    bounded = torch.where(
        advantages > 0,
        policy.log_ratio.clamp(max=math.log1p(_SATURATED / tau_positive)),
        policy.log_ratio.clamp(max=math.log1p(_SATURATED / tau_negative)),
    )
    clipped = (bounded != policy.log_ratio).detach() & (advantages != 0) & policy.mask
    # Below, r - 1 is -1 to the last bit; its slope of 0 times an infinite weight would be NaN.
    moved = torch.expm1(bounded.clamp(min=-_SATURATED))
    gate = torch.where(
        advantages > 0,
        torch.sigmoid(tau_positive * moved) * (4 / tau_positive),
        torch.sigmoid(tau_negative * moved) * (4 / tau_negative),
    )
    return Surrogate(gate * advantages, clipped)


def gmpo_surrogate(
    policy: AnchoredPolicy,
    advantages: Float[Tensor, "*shape"],
    *,
    log_clip_epsilon: ClipEpsilon = 0.4,
) -> Surrogate:
    r"""GMPO: clip each token's ratio, then take the geometric mean over the sequence.

    $$ A \exp\Big(\frac{1}{|y|} \sum_t d_t\Big), \qquad
    d_t = \begin{cases} \min(\log r_t, \epsilon_{high}) & A \ge 0 \\
    \max(\log r_t, -\epsilon_{low}) & A < 0 \end{cases} $$

    The same value at each token of a sequence; averaged per sequence (`sequence_mean`) it is the
    paper's. Wants one advantage per sequence; where a sequence has several, a token's own decides
    the side of its clip and multiplies its copy of the mean. As in the paper nothing bounds the
    mean from above where A < 0.

    Args:
        policy: ratio of each token (`token_ratio`) to the anchor; carries the gradient.
        log_clip_epsilon: one number, or (low, high), in log r: 0.4 allows ratios from exp(-0.4) to
            exp(0.4). Not a distance from ratio 1 as `clip_epsilon` is.

    Source: GMPO (arXiv:2507.20673).

    Raises:
        ValueError: shapes differ, or a bound is negative or NaN.
    """
    low, high = clip_bounds(log_clip_epsilon, name="log_clip_epsilon")
    advantages = surrogate_advantages(policy, advantages)
    bounded = torch.where(
        advantages >= 0, policy.log_ratio.clamp(max=high), policy.log_ratio.clamp(min=-low)
    )
    ids, count = policy.sequences
    means = segment_reduce(bounded, ids, count, mask=policy.mask, reduce="mean")
    mean = value_of_segment(means, ids)
    # A token with no advantage of its own still moves the mean of a sequence that has one.
    has_advantage = segment_reduce(advantages.abs(), ids, count)[ids] > 0
    clipped = (bounded != policy.log_ratio).detach() & has_advantage & policy.mask
    return Surrogate(torch.exp(select(mean, advantages != 0)) * advantages, clipped)


def vespo_surrogate(
    policy: AnchoredPolicy,
    advantages: Float[Tensor, "*shape"],
    *,
    positive: tuple[float, float] = (2.0, 3.0),
    negative: tuple[float, float] = (3.0, 2.0),
) -> Surrogate:
    r"""VESPO: the ratio of the whole sequence, mapped to a bounded weight.

    $$ \mathrm{sg}(\phi(W)) A \log \pi_\theta, \qquad \phi(W) = W^k e^{\lambda (1 - W)}, \qquad
    W = \prod_t r_t $$

    phi(1) = 1, phi is largest at W = k / lambda and vanishes on both sides. It is computed in logs:
    a weight that over- or underflows is 0 and `clipped`, also that of an infinite W.

    Args:
        policy: ratio of each token (`token_ratio`) to the anchor, which must be the policy that
            sampled for W to be an importance weight; their product over the sequence is taken here.
        advantages: A; gets no gradient. Its sign at a token chooses the numbers there.
        positive: (k, lambda) where A >= 0.
        negative: (k, lambda) where A < 0.

    Source: VESPO (arXiv:2602.10693); numbers as in TRL.

    Raises:
        ValueError: shapes differ, or a number is not positive.
    """
    for name, pair in (("positive", positive), ("negative", negative)):
        if not (pair[0] > 0 and pair[1] > 0):
            raise ValueError(f"{name} is {pair}, but k and lambda must be > 0, as in (2.0, 3.0)")
    good = surrogate_advantages(policy, advantages) >= 0
    ids, count = policy.sequences
    log_ratio = policy.log_ratio.detach()
    log_product = segment_reduce(log_ratio, ids, count, mask=policy.mask)[ids]

    def kernel(power: float, decay: float) -> Tensor:
        # exp may overflow to infinity: exp(power * x - infinity) is 0, as it should be. Only with
        # an infinite power * x it would be NaN; exp(1000) is infinite in every type too.
        x = log_product.clamp(max=1000.0)
        return torch.exp(power * x - decay * torch.expm1(x))

    return weighted_logprobs(
        policy, advantages, torch.where(good, kernel(*positive), kernel(*negative))
    )
