r"""Surrogates of the REINFORCE family: a weight without a gradient times $A \log \pi_\theta$.

Their gradient is $w A \nabla \log \pi_\theta$; they differ in the weight, of the ratio r:

    w(r)      reinforce   importance   AIPO      CISPO         IcePop           TOPR, A < 0
    r high    1           r            cap       1 + high      0                1
    r low     1           r            r         1 - low       0                r

Only IcePop clips tokens away. The value is not an estimate of the objective (except
`importance_surrogate`); watch the reward, not the loss.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from areal_lab.functional.checks import check_token_inputs
from areal_lab.functional.masked import select
from areal_lab.functional.ratios import AnchoredPolicy, capped_ratio
from areal_lab.functional.surrogates.clip import (
    ClipEpsilon,
    Surrogate,
    log_clip_bounds,
    surrogate_advantages,
)


def reinforce_surrogate(policy: AnchoredPolicy, advantages: Float[Tensor, "*shape"]) -> Surrogate:
    r"""REINFORCE: the ratio is ignored.

    $$ A \log \pi_\theta $$

    Args:
        policy: log-probs; wherever it is anchored.

    Source: Williams (1992), "Simple statistical gradient-following algorithms for connectionist
    reinforcement learning"; GPG (arXiv:2504.02546).
    """
    return weighted_logprobs(policy, advantages, torch.ones_like(policy.log_ratio))


def importance_surrogate(policy: AnchoredPolicy, advantages: Float[Tensor, "*shape"]) -> Surrogate:
    r"""The ratio times the advantage, without a trust region.

    $$ r A $$

    Unbiased, token by token, when anchored at the policy that sampled; nothing bounds its variance.
    A ratio beyond the range of the floating type makes it infinite.

    Source: the conservative policy iteration objective, as in PPO (arXiv:1707.06347), eq. 6.
    """
    advantages = surrogate_advantages(policy, advantages)
    # An infinite ratio times an advantage of 0 would be NaN.
    log_ratio = select(policy.log_ratio, advantages != 0)
    return Surrogate(torch.exp(log_ratio) * advantages, torch.zeros_like(policy.mask))


def cispo_surrogate(
    policy: AnchoredPolicy,
    advantages: Float[Tensor, "*shape"],
    *,
    clip_epsilon: ClipEpsilon = (1.0, 4.0),
) -> Surrogate:
    r"""CISPO: the clipped ratio is a weight, so every token keeps its gradient.

    $$ \mathrm{sg}(\mathrm{clip}(r, 1 - \epsilon_{low}, 1 + \epsilon_{high})) A \log \pi_\theta $$

    Args:
        policy: ratio to the anchor, in the paper the proximal policy.
        clip_epsilon: (low, high); a low bound of 1 or more is no bound. The paper has none, and
            does not give its high bound; the default is a largest weight of 5, as in SkyRL and TRL
            (whose `epsilon_high` is that weight itself: pass `epsilon_high - 1`).

    Source: MiniMax-M1 (arXiv:2506.13585).

    Raises:
        ValueError: shapes differ, or a bound is negative or NaN.
    """
    log_low, log_high = log_clip_bounds(clip_epsilon)
    weight = torch.exp(policy.log_ratio.detach().clamp(log_low, log_high))
    return weighted_logprobs(policy, advantages, weight)


def aipo_surrogate(
    policy: AnchoredPolicy, advantages: Float[Tensor, "*shape"], *, cap: float
) -> Surrogate:
    r"""AIPO: importance weights to the sampler, bounded from above only.

    $$ \mathrm{sg}(\min(r, c)) A \log \pi_\theta $$

    `cispo_surrogate` without a lower bound, anchored at the behavior policy rather than at the
    proximal one (`anchored_at_behavior`).

    Args:
        policy: ratio to the anchor, here the behavior policy.
        cap: c, the largest weight; 2 to 10 in the paper.

    Source: LlamaRL (arXiv:2505.24034).

    Raises:
        ValueError: shapes differ, or the cap is not positive.
    """
    return weighted_logprobs(policy, advantages, capped_ratio(policy.log_ratio, cap))


def truncated_reinforce_surrogate(
    policy: AnchoredPolicy, advantages: Float[Tensor, "*shape"], *, cap: float = 1.0
) -> Surrogate:
    r"""Truncated importance sampling: weights are never above 1, whatever A's sign.

    $$ \mathrm{sg}(\min(r, c)) A \log \pi_\theta $$

    The formula of `aipo_surrogate` with a cap of 1: a token that became more likely counts as if it
    were on policy, one that became less likely counts less. ROLL's `tis`.

    Args:
        cap: c, the largest weight.

    Source: ROLL's `tis`. TOPR (arXiv:2503.14286) compares with truncated importance sampling too,
    but there the ratio and its truncation are of the whole response: `sequence_product_ratio`.

    Raises:
        ValueError: shapes differ, or the cap is not positive.
    """
    return weighted_logprobs(policy, advantages, capped_ratio(policy.log_ratio, cap))


def icepop_surrogate(
    policy: AnchoredPolicy,
    advantages: Float[Tensor, "*shape"],
    *,
    clip_epsilon: ClipEpsilon = (0.5, 4.0),
) -> Surrogate:
    r"""IcePop as a loss: the importance weight within a band, 0 outside.

    $$ \mathrm{sg}(r\, [1 - \epsilon_{low} \le r \le 1 + \epsilon_{high}]) A \log \pi_\theta $$

    For a ratio to the behavior policy. Where the proximal policy is known too, the band belongs to
    the correction of the weight pi_prox / pi_behav, and a clip to the surrogate.

    Args:
        policy: ratio to the anchor, here the behavior policy.
        clip_epsilon: (low, high); the bounds themselves are inside. The default is the band of
            ratios from 0.5 to 5.

    Source: IcePop, as in Ring-1T (arXiv:2510.18855).

    Raises:
        ValueError: shapes differ, or a bound is negative or NaN.
    """
    log_low, log_high = log_clip_bounds(clip_epsilon)
    log_ratio = policy.log_ratio.detach()
    inside = (log_ratio >= log_low) & (log_ratio <= log_high)
    weight = select(torch.exp(log_ratio), inside)
    return weighted_logprobs(policy, advantages, weight)


def topr_surrogate(
    policy: AnchoredPolicy, advantages: Float[Tensor, "*shape"], *, cap: float = 1.0
) -> Surrogate:
    r"""TOPR: weight 1 where A >= 0, a truncated ratio where A < 0.

    $$ A \log \pi_\theta \text{ where } A \ge 0, \qquad
    \mathrm{sg}(\min(r, c)) A \log \pi_\theta \text{ where } A < 0 $$

    Pushing down a sample that is unlikely already has no end; its weight falls with its ratio.
    In the paper r is that of the whole response (`sequence_product_ratio`); ROLL takes the token's.

    Args:
        policy: ratio to the anchor, in the paper the behavior policy.
        cap: c, the largest weight where A < 0.

    Source: TOPR (arXiv:2503.14286).

    Raises:
        ValueError: shapes differ, or the cap is not positive.
    """
    truncated = capped_ratio(policy.log_ratio, cap)
    bad = surrogate_advantages(policy, advantages) < 0
    weight = torch.where(bad, truncated, torch.ones_like(truncated))
    return weighted_logprobs(policy, advantages, weight)


def weighted_logprobs(
    policy: AnchoredPolicy,
    advantages: Float[Tensor, "*shape"],
    weight: Float[Tensor, "*shape"],
) -> Surrogate:
    r"""General form of the family, $\mathrm{sg}(w) A \log \pi_\theta$, for a custom weight.

    Args:
        policy: log-probs, which carry the gradient.
        weight: w of each token, finite where unmasked; gets no gradient.

    Source: definition; the papers of the family differ in the weight.
    """
    advantages = surrogate_advantages(policy, advantages)
    check_token_inputs(policy.mask, weight=weight)
    weight = select(weight.detach(), policy.mask)
    factor = weight * advantages
    # A log-prob of minus infinity times a factor of 0 would be NaN.
    value = factor * select(policy.logprobs, factor != 0)
    return Surrogate(value, (weight == 0) & (advantages != 0) & policy.mask)
