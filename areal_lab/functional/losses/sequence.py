"""Named losses of whole responses: GSPO, GSPO-token, LUSPO, GMPO, SAPO, VESPO.

                 ratio                       surrogate             aggregate
    gspo         sequence, geometric mean    clip                  sequence_mean
    gspo_token   the same, gradient by token clip                  sequence_mean
    luspo        sequence, geometric mean    clip                  sequence_sum_mean
    gmpo         mean of clipped log ratios  -                     sequence_mean
    sapo         token                       sigmoid gate          sequence_mean
    vespo        product, behavior policy    reshaping kernel      token_mean

All are a `PolicyLoss`, which describes the arguments that losses share. Except for VESPO they are
anchored at the proximal policy, and each token's term is multiplied by its own pi_prox / pi_behav,
which `correct` bounds or replaces: `chain(sequence_product, truncate(2.0))` is the weight of the
whole response. With equal proximal and behavior log-probs they are the papers' losses.
"""

from __future__ import annotations

from functools import partial

from jaxtyping import Bool, Float
from torch import Tensor

from areal_lab.functional.aggregate import Count, sequence_mean, sequence_sum_mean, token_mean
from areal_lab.functional.corrections.weights import Correction, unbounded
from areal_lab.functional.losses.policy import PolicyLossResult, policy_loss
from areal_lab.functional.ratios import sequence_ratio, sequence_token_ratio
from areal_lab.functional.segments import Segments
from areal_lab.functional.surrogates.clip import ClipEpsilon, clip_surrogate
from areal_lab.functional.surrogates.smooth import (
    gmpo_surrogate,
    sapo_surrogate,
    vespo_surrogate,
)


def gspo(
    logprobs: Float[Tensor, "*shape"],
    proximal_logprobs: Float[Tensor, "*shape"],
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    clip_epsilon: ClipEpsilon = (3e-4, 4e-4),
    correct: Correction = unbounded,
    token_count: Count | None = None,  # noqa: ARG001 - part of the protocol
    sequences: Segments | None = None,
    sequence_count: Count | None = None,
) -> PolicyLossResult:
    r"""GSPO: the clip of PPO on the geometric mean ratio of the response.

    $$ L = -\frac{1}{B} \sum_i \min(s_i A_i, \mathrm{clip}(s_i, 1 \pm \epsilon) A_i), \quad
    s_i = \Big(\frac{\pi_\theta(y_i)}{\pi_{prox}(y_i)}\Big)^{1 / |y_i|} $$

    Tokens of a response may differ in A; the mean over them is then inside the sum.

    Source: GSPO (arXiv:2507.18071), eq. 5 to 7; bounds: section 5.1.

    The arguments are those of `PolicyLoss`.
    """
    return policy_loss(
        logprobs,
        proximal_logprobs,
        behavior_logprobs,
        advantages,
        mask,
        surrogate=partial(clip_surrogate, clip_epsilon=clip_epsilon),
        ratio=sequence_ratio,
        aggregate=partial(sequence_mean, sequence_count=sequence_count),
        correct=correct,
        sequences=sequences,
    )


def gspo_token(
    logprobs: Float[Tensor, "*shape"],
    proximal_logprobs: Float[Tensor, "*shape"],
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    clip_epsilon: ClipEpsilon = (3e-4, 4e-4),
    correct: Correction = unbounded,
    token_count: Count | None = None,  # noqa: ARG001 - part of the protocol
    sequences: Segments | None = None,
    sequence_count: Count | None = None,
) -> PolicyLossResult:
    r"""GSPO-token: the value of GSPO's ratio, the gradient of each token itself.

    $$ s_{i,t} = \mathrm{sg}(s_i)\, \pi_\theta(y_t) / \mathrm{sg}(\pi_\theta(y_t)) $$

    Equal to `gspo` in value and gradient when all tokens of a response have the same advantage.

    Source: GSPO (arXiv:2507.18071), section 4.3; bounds: section 5.1.

    The arguments are those of `PolicyLoss`.
    """
    return policy_loss(
        logprobs,
        proximal_logprobs,
        behavior_logprobs,
        advantages,
        mask,
        surrogate=partial(clip_surrogate, clip_epsilon=clip_epsilon),
        ratio=sequence_token_ratio,
        aggregate=partial(sequence_mean, sequence_count=sequence_count),
        correct=correct,
        sequences=sequences,
    )


def luspo(
    logprobs: Float[Tensor, "*shape"],
    proximal_logprobs: Float[Tensor, "*shape"],
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    clip_epsilon: ClipEpsilon = (2e-3, 2.5e-3),
    correct: Correction = unbounded,
    token_count: Count | None = None,  # noqa: ARG001 - part of the protocol
    sequences: Segments | None = None,
    sequence_count: Count | None = None,
) -> PolicyLossResult:
    r"""LUSPO: GSPO with the loss of each response multiplied by its length.

    $$ L = -\frac{1}{B} \sum_i |y_i| \min(s_i A_i, \mathrm{clip}(s_i, 1 \pm \epsilon) A_i) $$

    Source: LUSPO (arXiv:2602.05261); bounds: section 5.1.

    The arguments are those of `PolicyLoss`.
    """
    return policy_loss(
        logprobs,
        proximal_logprobs,
        behavior_logprobs,
        advantages,
        mask,
        surrogate=partial(clip_surrogate, clip_epsilon=clip_epsilon),
        ratio=sequence_ratio,
        aggregate=partial(sequence_sum_mean, sequence_count=sequence_count),
        correct=correct,
        sequences=sequences,
    )


def gmpo(
    logprobs: Float[Tensor, "*shape"],
    proximal_logprobs: Float[Tensor, "*shape"],
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    log_clip_epsilon: ClipEpsilon = 0.4,
    correct: Correction = unbounded,
    token_count: Count | None = None,  # noqa: ARG001 - part of the protocol
    sequences: Segments | None = None,
    sequence_count: Count | None = None,
) -> PolicyLossResult:
    r"""GMPO: the geometric mean of clipped ratios times the advantage.

    $$ L = -\frac{1}{B} \sum_i A_i \exp\Big(\frac{1}{|y_i|} \sum_{t \in i} d_t\Big), \quad
    d_t = \min(\log r_t, \epsilon) \text{ where } A \ge 0,
    \text{ else } \max(\log r_t, -\epsilon) $$

    Source: GMPO (arXiv:2507.20673).

    Args:
        log_clip_epsilon: bounds of log r, one number or (low, high).

    The other arguments are those of `PolicyLoss`.
    """
    return policy_loss(
        logprobs,
        proximal_logprobs,
        behavior_logprobs,
        advantages,
        mask,
        surrogate=partial(gmpo_surrogate, log_clip_epsilon=log_clip_epsilon),
        aggregate=partial(sequence_mean, sequence_count=sequence_count),
        correct=correct,
        sequences=sequences,
    )


def sapo(
    logprobs: Float[Tensor, "*shape"],
    proximal_logprobs: Float[Tensor, "*shape"],
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    correct: Correction = unbounded,
    token_count: Count | None = None,  # noqa: ARG001 - part of the protocol
    sequences: Segments | None = None,
    sequence_count: Count | None = None,
) -> PolicyLossResult:
    r"""SAPO: a sigmoid of the ratio instead of a clip, with equal weight for every response.

    $$ L = -\frac{1}{B} \sum_i \frac{1}{|y_i|} \sum_{t \in i}
    \frac{4}{\tau} \sigma(\tau (r_t - 1)) A_t $$

    AReaL takes the mean over tokens; that is `policy_loss` with `sapo_surrogate`.

    Source: SAPO (arXiv:2511.20347).

    Args:
        tau_positive: sharpness of the gate where A > 0.
        tau_negative: sharpness of the gate elsewhere.

    The other arguments are those of `PolicyLoss`.
    """
    return policy_loss(
        logprobs,
        proximal_logprobs,
        behavior_logprobs,
        advantages,
        mask,
        surrogate=partial(sapo_surrogate, tau_positive=tau_positive, tau_negative=tau_negative),
        aggregate=partial(sequence_mean, sequence_count=sequence_count),
        correct=correct,
        sequences=sequences,
    )


def vespo(
    logprobs: Float[Tensor, "*shape"],
    proximal_logprobs: Float[Tensor, "*shape"],  # noqa: ARG001 - part of the protocol
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    positive: tuple[float, float] = (2.0, 3.0),
    negative: tuple[float, float] = (3.0, 2.0),
    token_count: Count | None = None,
    sequences: Segments | None = None,
) -> PolicyLossResult:
    r"""VESPO: REINFORCE, weighted by a kernel of the ratio of the whole response.

    $$ L = -\frac{1}{N} \sum_i \mathrm{sg}(\phi(W_i)) \sum_{t \in i} A_t
    \log \pi_\theta(y_t), \quad \phi(W) = W^k e^{\lambda (1 - W)}, \quad
    W_i = \frac{\pi_\theta(y_i)}{\pi_\mu(y_i)} $$

    Anchored at the behavior policy: W is the importance weight, there is no further one.

    Source: VESPO (arXiv:2602.10693); numbers and mean over tokens as in TRL.

    Args:
        positive: (k, lambda) where A >= 0.
        negative: (k, lambda) where A < 0.

    The other arguments are those of `PolicyLoss`.
    """
    return policy_loss(
        logprobs,
        behavior_logprobs,
        behavior_logprobs,
        advantages,
        mask,
        surrogate=partial(vespo_surrogate, positive=positive, negative=negative),
        aggregate=partial(token_mean, token_count=token_count),
        sequences=sequences,
    )
