r"""Trust regions in probabilities rather than ratios.

A ratio of 1.3 is nothing for a token of probability 1e-5 and much for one of 0.7. These surrogates
measure how far the *probability* has moved, and drop a token that would move further; they keep
the plain r A, with the ratio unchanged. The anchor is the policy that sampled.

    dppo_tv       p - q > delta and A > 0, or p - q < -delta and A < 0      p = pi_theta
    dppo_kl       KL(q, p) of "this token or another" > delta, moving away  q = pi_anchor
    prime_rl      dppo_tv, and a pull of (log r)^2 on every token
    prime_rl_ipo  the same with |p - q| > delta, whatever the sign of A
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from areal_lab.functional.divergences.sampled import binary_kl
from areal_lab.functional.masked import select
from areal_lab.functional.ratios import AnchoredPolicy, check_cap
from areal_lab.functional.surrogates.clip import (
    ClipEpsilon,
    Surrogate,
    clip_bounds,
    surrogate_advantages,
)


def dppo_tv_surrogate(
    policy: AnchoredPolicy,
    advantages: Float[Tensor, "*shape"],
    *,
    divergence: ClipEpsilon = 0.15,
    cap: float = math.inf,
) -> Surrogate:
    r"""DPPO with the total variation of "this token or another one", |p - q|.

    $$ r A\ [A > 0:\ p - q \le \delta_{high},\quad A < 0:\ p - q \ge -\delta_{low}], \qquad
    p = \pi_\theta(y_t),\ q = \pi_{anchor}(y_t) $$

    Args:
        policy: ratio and log-probs; the anchor is the behavior policy.
        divergence: delta, one number or (low, high), a difference of probabilities. The default is
            that of the run script of the method's authors in verl, and of TRL.
        cap: bound of the ratio as a factor of the gradient, which continues beyond it as in
            `cispo_surrogate`. Infinity, as in the paper and SkyRL; 20 in verl.

    Source: DPPO (arXiv:2602.04879).

    Raises:
        ValueError: shapes differ, `divergence` is negative or NaN, or the cap is not positive.
    """
    low, high = clip_bounds(divergence, name="divergence")
    advantages = surrogate_advantages(policy, advantages)
    shift = _probability_shift(policy)
    outside = torch.where(advantages > 0, shift > high, shift < -low)
    return _kept(policy, advantages, ~outside, cap)


def dppo_kl_surrogate(
    policy: AnchoredPolicy,
    advantages: Float[Tensor, "*shape"],
    *,
    divergence: ClipEpsilon = 0.05,
    cap: float = math.inf,
) -> Surrogate:
    r"""DPPO with the KL divergence of "this token or another one".

    $$ r A\ [\neg (D > \delta \wedge A (p - q) > 0)], \qquad
    D = q \log \frac{q}{p} + (1 - q) \log \frac{1 - q}{1 - p} $$

    Args:
        policy: ratio and log-probs; the anchor is the behavior policy.
        divergence: delta in nats, one number or (low, high): high where p > q. The default is that
            of the authors' run script in verl, and of TRL.
        cap: bound of the ratio as a factor of the gradient, which continues beyond it. Infinity, as
            in the paper and SkyRL; 20 in verl.

    Source: DPPO (arXiv:2602.04879).

    Raises:
        ValueError: shapes differ, `divergence` is negative or NaN, or the cap is not positive.
    """
    low, high = clip_bounds(divergence, name="divergence")
    advantages = surrogate_advantages(policy, advantages)
    shift = _probability_shift(policy)
    distance = binary_kl(policy.anchor_logprobs, policy.logprobs)
    outside = torch.where(
        advantages > 0, (shift > 0) & (distance > high), (shift < 0) & (distance > low)
    )
    return _kept(policy, advantages, ~outside, cap)


def prime_rl_surrogate(
    policy: AnchoredPolicy,
    advantages: Float[Tensor, "*shape"],
    *,
    divergence: ClipEpsilon = 0.2,
    penalty: float = 1e-3,
) -> Surrogate:
    r"""prime-rl's default: `dppo_tv_surrogate` minus a squared log ratio.

    $$ r A\ [\text{kept}] - \kappa (\log r)^2 $$

    The penalty pulls every unmasked token towards the anchor: those dropped, and those whose
    advantage is 0. Groups of equal rewards hence have a gradient.

    Args:
        policy: ratio and log-probs; the anchor is the behavior policy.
        divergence: delta, one number or (low, high), a difference of probabilities.
        penalty: kappa.

    Source: prime-rl's default loss; the term is that of Kimi k1.5 (arXiv:2501.12599) without 1/2.

    Raises:
        ValueError: shapes differ, or a number is negative or NaN.
    """
    kept = dppo_tv_surrogate(policy, advantages, divergence=divergence)
    return _penalized(policy, kept, penalty)


def prime_rl_ipo_surrogate(
    policy: AnchoredPolicy,
    advantages: Float[Tensor, "*shape"],
    *,
    divergence: ClipEpsilon = 0.1,
    penalty: float = 1e-3,
) -> Surrogate:
    r"""prime-rl's `ipo`: drop tokens whose probability moved far, for either sign of A.

    $$ r A\ [-\delta_{low} \le p - q \le \delta_{high}] - \kappa (\log r)^2 $$

    Unlike `prime_rl_surrogate` it does not pull back a token that went too far, except by the
    penalty, which every unmasked token has. Not the IPO of preference learning.

    Args:
        policy: ratio and log-probs; the anchor is the behavior policy.
        divergence: delta, one number or (low, high), a difference of probabilities.
        penalty: kappa.

    Source: prime-rl; no paper defines it.

    Raises:
        ValueError: shapes differ, or a number is negative or NaN.
    """
    low, high = clip_bounds(divergence, name="divergence")
    shift = _probability_shift(policy)
    inside = (shift <= high) & (shift >= -low)
    kept = _kept(policy, surrogate_advantages(policy, advantages), inside, math.inf)
    return _penalized(policy, kept, penalty)


def _kept(
    policy: AnchoredPolicy, advantages: Tensor, keep: Bool[Tensor, "*shape"], cap: float
) -> Surrogate:
    """Surrogate r A where kept; above the cap its value is cap A and its gradient cap A grad log
    pi.
    """
    check_cap(cap)
    log_ratio = select(policy.log_ratio, keep & (advantages != 0))
    value = log_ratio.detach().clamp(max=math.log(cap))
    # An exact 0 that carries the gradient; of an anchor that cannot sample the token, inf - inf.
    carrier = torch.where(log_ratio.isfinite(), log_ratio, 0.0)
    return Surrogate(
        torch.exp(value + (carrier - carrier.detach())) * select(advantages, keep),
        ~keep & (advantages != 0) & policy.mask,
    )


def _penalized(policy: AnchoredPolicy, kept: Surrogate, penalty: float) -> Surrogate:
    if not penalty >= 0:
        raise ValueError(f"penalty is {penalty}, but must be >= 0; 0 switches it off")
    if penalty == 0:  # 0 * inf would be NaN
        return kept
    return kept._replace(value=kept.value - penalty * policy.log_ratio.square())


def _probability_shift(policy: AnchoredPolicy) -> Tensor:
    return torch.exp(policy.logprobs.detach()) - torch.exp(policy.anchor_logprobs)
