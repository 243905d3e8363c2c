r"""Named losses of the REINFORCE family: a weight without a gradient times $A \log \pi_\theta$.

                           anchor      weight of A log pi
    reinforce              -           1
    cispo                  proximal    clip(r)
    truncated_reinforce    proximal    min(r, 1)
    importance_sampling    behavior    r
    aipo                   behavior    min(r, C)
    topr                   behavior    1; where A < 0: min(product of r, 1)

All are a `PolicyLoss`, which describes the arguments that losses share.
With the behavior policy as anchor there is no further weight. With the proximal one, or none, the
weight pi_prox / pi_behav is applied, and bounded by `correct`. Except for `importance_sampling` the
value of such a loss has no meaning; its gradient has.
"""

from __future__ import annotations

from functools import partial

from jaxtyping import Bool, Float
from torch import Tensor

from areal_lab.functional.aggregate import Count, sequence_sum_mean, token_mean
from areal_lab.functional.checks import check_token_inputs
from areal_lab.functional.corrections.weights import Correction, unbounded
from areal_lab.functional.losses.policy import PolicyLossResult, policy_loss
from areal_lab.functional.ratios import sequence_product_ratio
from areal_lab.functional.segments import Segments
from areal_lab.functional.surrogates.clip import ClipEpsilon
from areal_lab.functional.surrogates.reinforce import (
    aipo_surrogate,
    cispo_surrogate,
    importance_surrogate,
    reinforce_surrogate,
    topr_surrogate,
    truncated_reinforce_surrogate,
)


def reinforce(
    logprobs: Float[Tensor, "*shape"],
    proximal_logprobs: Float[Tensor, "*shape"],
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    correct: Correction = unbounded,
    token_count: Count | None = None,
    sequences: Segments | None = None,
) -> PolicyLossResult:
    r"""REINFORCE on tokens; with the right advantages also RLOO, ReMax, GPG and MaxRL.

    $$ L = -\frac{1}{N} \sum_t \rho_t A_t \log \pi_\theta(y_t) $$

    Source: Williams (1992); for language models RLOO (arXiv:2402.14740), GPG (arXiv:2504.02546).

    The arguments are those of `PolicyLoss`.
    """
    return policy_loss(
        logprobs,
        proximal_logprobs,
        behavior_logprobs,
        advantages,
        mask,
        surrogate=reinforce_surrogate,
        aggregate=partial(token_mean, token_count=token_count),
        correct=correct,
        sequences=sequences,
    )


def cispo(
    logprobs: Float[Tensor, "*shape"],
    proximal_logprobs: Float[Tensor, "*shape"],
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    clip_epsilon: ClipEpsilon = (1.0, 4.0),
    correct: Correction = unbounded,
    token_count: Count | None = None,
    sequences: Segments | None = None,
) -> PolicyLossResult:
    r"""CISPO: the clipped ratio is a weight, so every token keeps its gradient.

    $$ L = -\frac{1}{N} \sum_t \rho_t\,
    \mathrm{sg}(\mathrm{clip}(r_t, 1 - \epsilon_{low}, 1 + \epsilon_{high})) A_t
    \log \pi_\theta(y_t) $$

    Source: MiniMax-M1 (arXiv:2506.13585), section 3.1, which has no lower bound and does not give
    the upper one; 5 as in SkyRL and TRL.

    Args:
        clip_epsilon: (low, high) as distances from ratio 1; low 1 is no lower bound.

    The other arguments are those of `PolicyLoss`.
    """
    return policy_loss(
        logprobs,
        proximal_logprobs,
        behavior_logprobs,
        advantages,
        mask,
        surrogate=partial(cispo_surrogate, clip_epsilon=clip_epsilon),
        aggregate=partial(token_mean, token_count=token_count),
        correct=correct,
        sequences=sequences,
    )


def truncated_reinforce(
    logprobs: Float[Tensor, "*shape"],
    proximal_logprobs: Float[Tensor, "*shape"],
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    cap: float = 1.0,
    correct: Correction = unbounded,
    token_count: Count | None = None,
    sequences: Segments | None = None,
) -> PolicyLossResult:
    r"""REINFORCE with a weight of at most C.

    $$ L = -\frac{1}{N} \sum_t \rho_t\, \mathrm{sg}(\min(r_t, C)) A_t \log \pi_\theta(y_t) $$

    Source: compared with in TOPR (arXiv:2503.14286); ROLL's `tis`.

    Args:
        cap: C.

    The other arguments are those of `PolicyLoss`.
    """
    return policy_loss(
        logprobs,
        proximal_logprobs,
        behavior_logprobs,
        advantages,
        mask,
        surrogate=partial(truncated_reinforce_surrogate, cap=cap),
        aggregate=partial(token_mean, token_count=token_count),
        correct=correct,
        sequences=sequences,
    )


def importance_sampling(
    logprobs: Float[Tensor, "*shape"],
    proximal_logprobs: Float[Tensor, "*shape"],  # noqa: ARG001 - part of the protocol
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    token_count: Count | None = None,
) -> PolicyLossResult:
    r"""The ratio to the behavior policy times the advantage: unbiased per token, never bounded.

    $$ L = -\frac{1}{N} \sum_t \frac{\pi_\theta(y_t)}{\pi_\mu(y_t)} A_t $$

    Source: PPO (arXiv:1707.06347), eq. 6; tinker-cookbook's default.

    The arguments are those of `PolicyLoss`.
    """
    return policy_loss(
        logprobs,
        behavior_logprobs,
        behavior_logprobs,
        advantages,
        mask,
        surrogate=importance_surrogate,
        aggregate=partial(token_mean, token_count=token_count),
    )


def aipo(
    logprobs: Float[Tensor, "*shape"],
    proximal_logprobs: Float[Tensor, "*shape"],  # noqa: ARG001 - part of the protocol
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    cap: float = 2.0,
    token_count: Count | None = None,
) -> PolicyLossResult:
    r"""AIPO: importance weights to the behavior policy, bounded from above.

    $$ L = -\frac{1}{N} \sum_t \mathrm{sg}(\min(\pi_\theta / \pi_\mu, C)) A_t
    \log \pi_\theta(y_t) $$

    Source: LlamaRL (arXiv:2505.24034), where C is 2 to 10.

    Args:
        cap: C.

    The other arguments are those of `PolicyLoss`.
    """
    return policy_loss(
        logprobs,
        behavior_logprobs,
        behavior_logprobs,
        advantages,
        mask,
        surrogate=partial(aipo_surrogate, cap=cap),
        aggregate=partial(token_mean, token_count=token_count),
    )


def topr(
    logprobs: Float[Tensor, "*shape"],
    proximal_logprobs: Float[Tensor, "*shape"],  # noqa: ARG001 - part of the protocol
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    cap: float = 1.0,
    token_count: Count | None = None,  # noqa: ARG001 - part of the protocol
    sequences: Segments | None = None,
    sequence_count: Count | None = None,
) -> PolicyLossResult:
    r"""TOPR: good responses have weight 1, bad ones the ratio of the whole response, at most C.

    $$ L = -\frac{1}{B} \sum_i w_i A_i \sum_{t \in i} \log \pi_\theta(y_t), \quad
    w_i = 1 \text{ where } A_i \ge 0, \text{ else }
    \mathrm{sg}\Big(\min\Big(\prod_{t \in i} \frac{\pi_\theta}{\pi_\mu}, C\Big)\Big) $$

    ROLL takes the ratio of each token: `policy_loss` with `topr_surrogate` and `token_ratio`.

    Source: TOPR (arXiv:2503.14286), section 3.

    Args:
        cap: C.

    The other arguments are those of `PolicyLoss`.
    """
    return policy_loss(
        logprobs,
        behavior_logprobs,
        behavior_logprobs,
        advantages,
        mask,
        surrogate=partial(topr_surrogate, cap=cap),
        ratio=sequence_product_ratio,
        aggregate=partial(sequence_sum_mean, sequence_count=sequence_count),
        sequences=sequences,
    )


def positive_nll(
    logprobs: Float[Tensor, "*shape"],
    rewards: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    coefficient: float = 0.1,
    token_count: Count | None = None,
) -> Float[Tensor, ""]:
    r"""VAPO's term to add to a policy loss: imitate the responses with a positive reward.

    $$ -\frac{\mu}{\sum_{i \in P} |y_i|} \sum_{i \in P} \sum_{t \in i} \log \pi_\theta(y_t),
    \quad P = \{i: R_i > 0\} $$

    Args:
        rewards: R of the response at each of its tokens, before any baseline.
        coefficient: mu.
        token_count: tokens of the positive responses of the whole batch; None counts these. Without
            a positive response the term is 0.

    Source: VAPO (arXiv:2504.05118), positive example language-model loss.

    Raises:
        ValueError: shapes differ, or `token_count` is a number that is not positive.
    """
    check_token_inputs(mask, logprobs=logprobs, rewards=rewards)
    return -coefficient * token_mean(logprobs, mask & (rewards > 0), token_count=token_count)
