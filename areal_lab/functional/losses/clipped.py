"""Named losses with PPO's clip: GRPO, Dr. GRPO, DAPO, dual clip, Clip-Cov, KL-Cov.

                    ratio    surrogate             aggregate
    grpo            token    clip                  sequence_mean
    dr_grpo         token    clip                  fixed_length_mean
    dapo            token    clip, wider above     token_mean
    dual_clip_ppo   token    dual clip             token_mean
    clip_cov        token    clip, except a few    token_mean
    kl_cov          token    r A, a few with KL    token_mean

All are `policy_loss` with other parts, anchored at the proximal policy, and a `PolicyLoss`, which
describes the arguments that losses share. Their papers have one old policy, which the samples came
from. Here there are two, and `correct` bounds the weight pi_prox / pi_behav, as in `decoupled_ppo`:
with equal proximal and behavior log-probs the loss is the paper's.

KL to a reference policy is a separate term (`kl_loss`), added to the loss, as only some need it.
"""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from areal_lab.functional.aggregate import Count, fixed_length_mean, sequence_mean, token_mean
from areal_lab.functional.corrections.weights import Correction, unbounded
from areal_lab.functional.losses.policy import PolicyLossResult, policy_loss
from areal_lab.functional.segments import Segments
from areal_lab.functional.surrogates.clip import ClipEpsilon, clip_surrogate, dual_clip_surrogate
from areal_lab.functional.surrogates.covariance import clip_cov_surrogate, kl_cov_surrogate


def grpo(
    logprobs: Float[Tensor, "*shape"],
    proximal_logprobs: Float[Tensor, "*shape"],
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    clip_epsilon: ClipEpsilon = 0.2,
    correct: Correction = unbounded,
    token_count: Count | None = None,  # noqa: ARG001 - part of the protocol
    sequences: Segments | None = None,
    sequence_count: Count | None = None,
) -> PolicyLossResult:
    r"""GRPO: the clipped objective, with equal weight for every sequence.

    $$ L = -\frac{1}{B} \sum_i \frac{1}{|y_i|} \sum_{t \in i}
    \min(r_t A_t, \mathrm{clip}(r_t, 1 \pm \epsilon) A_t) $$

    Source: DeepSeekMath (arXiv:2402.03300), eq. 3, without its KL term (there beta = 0.04 times k3
    of each token, inside the same mean).

    The arguments are those of `PolicyLoss`.
    """
    return policy_loss(
        logprobs,
        proximal_logprobs,
        behavior_logprobs,
        advantages,
        mask,
        surrogate=partial(clip_surrogate, clip_epsilon=clip_epsilon),
        aggregate=partial(sequence_mean, sequence_count=sequence_count),
        correct=correct,
        sequences=sequences,
    )


def dr_grpo(
    logprobs: Float[Tensor, "*shape"],
    proximal_logprobs: Float[Tensor, "*shape"],
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    max_tokens: Count,
    clip_epsilon: ClipEpsilon = 0.2,
    correct: Correction = unbounded,
    token_count: Count | None = None,  # noqa: ARG001 - part of the protocol
    sequences: Segments | None = None,
    sequence_count: Count | None = None,
) -> PolicyLossResult:
    r"""Dr. GRPO: the clipped objective summed over tokens, divided by one fixed length.

    $$ L = -\frac{1}{B\,L} \sum_i \sum_{t \in i}
    \min(r_t A_t, \mathrm{clip}(r_t, 1 \pm \epsilon) A_t) $$

    Goes with advantages that are not divided by a standard deviation (`scale=no_scale`).

    Source: Dr. GRPO (arXiv:2503.20783), section 3.

    Args:
        max_tokens: L, the generation budget of a sequence; must be bound, as in
            `partial(dr_grpo, max_tokens=3000)`.

    The other arguments are those of `PolicyLoss`.
    """
    return policy_loss(
        logprobs,
        proximal_logprobs,
        behavior_logprobs,
        advantages,
        mask,
        surrogate=partial(clip_surrogate, clip_epsilon=clip_epsilon),
        aggregate=partial(fixed_length_mean, max_tokens=max_tokens, sequence_count=sequence_count),
        correct=correct,
        sequences=sequences,
    )


def dapo(
    logprobs: Float[Tensor, "*shape"],
    proximal_logprobs: Float[Tensor, "*shape"],
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    clip_epsilon: ClipEpsilon = (0.2, 0.28),
    correct: Correction = unbounded,
    token_count: Count | None = None,
    sequences: Segments | None = None,
) -> PolicyLossResult:
    r"""DAPO: a clip range that is wider above ("clip-higher"), with equal weight for every token.

    $$ L = -\frac{1}{N} \sum_t
    \min(r_t A_t, \mathrm{clip}(r_t, 1 - \epsilon_{low}, 1 + \epsilon_{high}) A_t) $$

    N is that of the batch, as in every framework; read literally the paper's mean is over the
    tokens of a prompt (`prompt_mean`). The other parts of DAPO, no KL, a penalty for overlong
    responses and no groups of equal rewards, are about rewards and samples. The policy loss of VAPO
    is this too.

    Source: DAPO (arXiv:2503.14476), eq. 8 and 10; bounds: section 4.1.

    The arguments are those of `PolicyLoss`.
    """
    return policy_loss(
        logprobs,
        proximal_logprobs,
        behavior_logprobs,
        advantages,
        mask,
        surrogate=partial(clip_surrogate, clip_epsilon=clip_epsilon),
        aggregate=partial(token_mean, token_count=token_count),
        correct=correct,
        sequences=sequences,
    )


def dual_clip_ppo(
    logprobs: Float[Tensor, "*shape"],
    proximal_logprobs: Float[Tensor, "*shape"],
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    clip_epsilon: ClipEpsilon = 0.2,
    dual_clip: float = 3.0,
    correct: Correction = unbounded,
    token_count: Count | None = None,
    sequences: Segments | None = None,
) -> PolicyLossResult:
    r"""PPO with a second clip: a negative advantage is multiplied by at most c.

    $$ \max(\min(r A, \mathrm{clip}(r, 1 \pm \epsilon) A), c A) \text{ where } A < 0 $$

    Source: dual-clip PPO (arXiv:1912.09729).

    Args:
        dual_clip: c, the largest ratio itself; infinity gives `decoupled_ppo`.

    The other arguments are those of `PolicyLoss`.
    """
    return policy_loss(
        logprobs,
        proximal_logprobs,
        behavior_logprobs,
        advantages,
        mask,
        surrogate=partial(dual_clip_surrogate, clip_epsilon=clip_epsilon, dual_clip=dual_clip),
        aggregate=partial(token_mean, token_count=token_count),
        correct=correct,
        sequences=sequences,
    )


def clip_cov(
    logprobs: Float[Tensor, "*shape"],
    proximal_logprobs: Float[Tensor, "*shape"],
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    clip_epsilon: ClipEpsilon = 0.2,
    fraction: float = 2e-4,
    band: tuple[float, float] = (1.0, 5.0),
    noise: Float[Tensor, "*shape"] | None = None,
    correct: Correction = unbounded,
    token_count: Count | None = None,
    sequences: Segments | None = None,
) -> PolicyLossResult:
    """Clip-Cov: the clipped objective without a few random tokens of high covariance.

    Keeps entropy up by sparing tokens whose log-prob and advantage are both high, see
    `clip_cov_surrogate`. The covariance is that of the tokens of this call.

    Source: arXiv:2505.22617, section 4.

    Args:
        fraction: share of the tokens to leave out.
        band: covariances that can be left out.
        noise: uniform numbers that choose the tokens. None draws them from torch's generator, which
            makes the function random; under `vmap` they must be given.

    The other arguments are those of `PolicyLoss`.
    """
    if noise is None:
        noise = torch.rand_like(logprobs)
    return policy_loss(
        logprobs,
        proximal_logprobs,
        behavior_logprobs,
        advantages,
        mask,
        surrogate=partial(
            clip_cov_surrogate,
            noise=noise,
            fraction=fraction,
            band=band,
            surrogate=partial(clip_surrogate, clip_epsilon=clip_epsilon),
        ),
        aggregate=partial(token_mean, token_count=token_count),
        correct=correct,
        sequences=sequences,
    )


def kl_cov(
    logprobs: Float[Tensor, "*shape"],
    proximal_logprobs: Float[Tensor, "*shape"],
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    fraction: float = 2e-4,
    penalty: float = 1.0,
    correct: Correction = unbounded,
    token_count: Count | None = None,
    sequences: Segments | None = None,
) -> PolicyLossResult:
    """KL-Cov: r A, with the few tokens of highest covariance pulled to the anchor.

    See `kl_cov_surrogate`. The covariance is that of the tokens of this call. A pulled token has a
    gradient without an advantage too.

    Source: arXiv:2505.22617, section 4.

    Args:
        fraction: share of the tokens that is pulled: for 7B parameters the authors have 2e-3, for
            32B 2e-4. SkyRL's default is 0.2.
        penalty: strength of the pull.

    The other arguments are those of `PolicyLoss`.
    """
    return policy_loss(
        logprobs,
        proximal_logprobs,
        behavior_logprobs,
        advantages,
        mask,
        surrogate=partial(kl_cov_surrogate, fraction=fraction, penalty=penalty),
        aggregate=partial(token_mean, token_count=token_count),
        correct=correct,
        sequences=sequences,
    )
