r"""Named losses made for data of older policies: SAT, mu-GRPO, R2VPO.

                anchor      what happens to a token whose ratio r to the sampler is far from 1
    sat         behavior    its outward clip end moves towards 1
    mu_grpo     behavior    where A < 0, what follows it in its response has no loss
    r2vpo       behavior    (r - 1)^2 costs lambda, which grows while the mean exceeds a bound

The ratio is to the behavior policy, and there is no further weight: a clip around the proximal
policy sees only the steps within a batch. Others against stale data: `kpop` and `trm` mask by
divergence, `m2po` by the second moment (`corrected`), and `areal_lab.functional.staleness.control`
scales the optimizer step. All are a `PolicyLoss`, which describes the arguments that losses share.
"""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from areal_lab.functional.aggregate import Count, token_mean
from areal_lab.functional.corrections.rejection import veto_suffix_mask
from areal_lab.functional.corrections.weights import keep
from areal_lab.functional.losses.policy import (
    ConstrainedLossResult,
    PolicyLossResult,
    policy_loss,
)
from areal_lab.functional.masked import masked_sum
from areal_lab.functional.segments import Segments
from areal_lab.functional.surrogates.clip import ClipEpsilon, clip_surrogate, sat_surrogate
from areal_lab.functional.surrogates.squared import ratio_variance_surrogate


def sat(
    logprobs: Float[Tensor, "*shape"],
    proximal_logprobs: Float[Tensor, "*shape"],  # noqa: ARG001 - part of the protocol
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    clip_epsilon: ClipEpsilon = 0.2,
    quantile: float = 0.9,
    exponent: float = 2.0,
    token_count: Count | None = None,
) -> PolicyLossResult:
    r"""SAT: PPO whose outward clip end is nearer to 1 for the tokens that moved furthest.

    $$ L = -\frac{1}{N} \sum_t \min(r_t A_t, \mathrm{clip}(r_t, 1 - \epsilon_{low} c^-_t,
    1 + \epsilon_{high} c^+_t) A_t), \quad r = \pi_\theta / \pi_{behav} $$

    c is that of `sat_surrogate`: 1, except on the side that a token beyond the 0.9 quantile of
    $|\log r|$ moved to. The quantile is over the tokens of this call, hence of the micro-batch.

    Source: SAT, "Stale but Stable" (arXiv:2607.18722), as retold; see `sat_surrogate`.

    Args:
        quantile: share of tokens that keep PPO's bounds; 1 is `ppo`.
        exponent: of the Hill kernel.

    The other arguments are those of `PolicyLoss`.
    """
    surrogate = partial(
        sat_surrogate, clip_epsilon=clip_epsilon, quantile=quantile, exponent=exponent
    )
    return policy_loss(
        logprobs,
        behavior_logprobs,
        behavior_logprobs,
        advantages,
        mask,
        surrogate=surrogate,
        aggregate=partial(token_mean, token_count=token_count),
    )


def mu_grpo(
    logprobs: Float[Tensor, "*shape"],
    proximal_logprobs: Float[Tensor, "*shape"],  # noqa: ARG001 - part of the protocol
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    threshold: float,
    clip_epsilon: ClipEpsilon = 0.2,
    token_count: Count | None = None,
    sequences: Segments | None = None,
) -> PolicyLossResult:
    r"""mu-GRPO: a clip, and no loss behind the first veto of a response with A < 0.

    $$ L = -\frac{1}{N} \sum_t M_t \min(r_t A_t, \mathrm{clip}(r_t, 1 \pm \epsilon) A_t),
    \quad r = \pi_\theta / \pi_{behav} $$

    M is `veto_suffix_mask`. A dropped token adds 0 and stays in the count. The paper also relaxes
    the clip: set `clip_epsilon`, whose default here is PPO's, because its numbers were not at hand.

    Source: mu-GRPO (arXiv:2605.17570), as retold; the paper was not at hand.

    Args:
        threshold: c, the largest ratio that vetoes nothing; infinity is `ppo`.
        sequences: sequence of each token, its tokens in order; None takes rows.

    The other arguments are those of `PolicyLoss`.
    """
    stay = veto_suffix_mask(
        logprobs, behavior_logprobs, advantages, mask, threshold=threshold, sequences=sequences
    )
    return policy_loss(
        logprobs,
        behavior_logprobs,
        behavior_logprobs,
        advantages,
        mask,
        surrogate=partial(clip_surrogate, clip_epsilon=clip_epsilon),
        correct=keep(stay),
        aggregate=partial(token_mean, token_count=token_count),
        sequences=sequences,
    )


def r2vpo(
    logprobs: Float[Tensor, "*shape"],
    proximal_logprobs: Float[Tensor, "*shape"],  # noqa: ARG001 - part of the protocol
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    variance: float,
    rate: float,
    penalty: float = 0.0,
    dual_variable: float | Float[Tensor, ""] = 0.0,
    token_count: Count | None = None,
) -> ConstrainedLossResult:
    r"""R2VPO: the ratio times the advantage, with a bound on the variance of the ratio.

    $$ L = -\frac{1}{N} \sum_t (r_t A_t - \lambda (r_t - 1)^2), \quad
    \lambda = \lambda_0 + \nu, \qquad
    \nu \leftarrow \max\Big(0, \nu + \eta \Big(\frac{1}{N} \sum_t (r_t - 1)^2 - \delta\Big)\Big),
    \quad r = \pi_\theta / \pi_{behav} $$

    Nothing is clipped. The caller keeps $\nu$ between steps, as a trainer does for a loss that asks
    for `dual_variable`, and adds `dual_step` after each. Does not vanish where A = 0.

    Source: R2VPO (arXiv:2605.26784), as retold: the variance of the ratio is penalized, with a dual
    variable, in place of clipping. The paper was not at hand; this is plain dual ascent.

    Args:
        variance: delta, the bound of the mean of (r - 1)^2.
        rate: eta, step size of the dual variable.
        penalty: lambda_0, which the dual variable is added to; with 0 the first steps are free.
        dual_variable: nu, one number of 0 or more.

    The other arguments are those of `PolicyLoss`.

    Raises:
        ValueError: `variance`, `rate` or `penalty` is negative or NaN.
    """
    for name, value in (("variance", variance), ("rate", rate), ("penalty", penalty)):
        if not value >= 0:
            raise ValueError(f"{name} is {value}, but must be >= 0")
    multiplier = torch.as_tensor(dual_variable, dtype=torch.float32, device=mask.device) + penalty
    result = policy_loss(
        logprobs,
        behavior_logprobs,
        behavior_logprobs,
        advantages,
        mask,
        surrogate=partial(ratio_variance_surrogate, penalty=multiplier),
        aggregate=partial(token_mean, token_count=token_count),
    )
    count = mask.sum().clamp(min=1) if token_count is None else token_count
    # Each token brings its share of the bound along, so that parts of a batch add up.
    excess = (result.ratio - 1).square() - variance
    return ConstrainedLossResult(
        *result, dual_step=(rate * masked_sum(excess, mask) / count).detach()
    )
