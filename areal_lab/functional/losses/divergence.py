r"""Named losses that stay near their anchor without a clip of the ratio: DPPO, prime-rl, Kimi, DRO.

                anchor      objective of a token, p = pi_theta, q = pi_mu
    dppo_tv     behavior    r A while |p - q| is small or shrinks
    dppo_kl     behavior    r A while the KL of "this token or another" is small or shrinks
    prime_rl    behavior    as dppo_tv, minus kappa (log r)^2
    kimi        proximal    A log pi, minus tau/2 (log r)^2 of the whole response
    dro         proximal    A log pi, minus beta/2 (log r)^2

All are a `PolicyLoss`, which describes the arguments that losses share.
With the behavior policy as anchor there is no further weight. With the proximal one the weight
pi_prox / pi_behav is applied, and bounded by `correct`. Leaving samples without an advantage out
of a batch changes the last three, whose pull is on every token.
"""

from __future__ import annotations

import math
from functools import partial

from jaxtyping import Bool, Float
from torch import Tensor

from areal_lab.functional.aggregate import Count, sequence_sum_mean, token_mean
from areal_lab.functional.corrections.weights import Correction, unbounded
from areal_lab.functional.losses.policy import PolicyLossResult, policy_loss
from areal_lab.functional.segments import Segments
from areal_lab.functional.surrogates.clip import ClipEpsilon
from areal_lab.functional.surrogates.divergence import (
    dppo_kl_surrogate,
    dppo_tv_surrogate,
    prime_rl_surrogate,
)
from areal_lab.functional.surrogates.squared import dro_surrogate, kimi_sequence_surrogate


def dppo_tv(
    logprobs: Float[Tensor, "*shape"],
    proximal_logprobs: Float[Tensor, "*shape"],  # noqa: ARG001 - part of the protocol
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    divergence: ClipEpsilon = 0.15,
    cap: float = math.inf,
    token_count: Count | None = None,
) -> PolicyLossResult:
    r"""DPPO with total variation: drop tokens whose probability would move further away.

    $$ L = -\frac{1}{N} \sum_t r_t A_t\,[A_t > 0: p - q \le \delta,\ A_t < 0: q - p \le \delta],
    \quad p = \pi_\theta(y_t),\ q = \pi_\mu(y_t) $$

    The authors' run script in verl has advantages without a standard deviation
    (`dr_grpo_advantages`) and divides sums over tokens by one length: `policy_loss` with
    `dppo_tv_surrogate` and `fixed_length_mean`.

    Source: DPPO (arXiv:2602.04879).

    Args:
        divergence: delta, a difference of probabilities, one number or (low, high). The default is
            that of the run script, and of TRL.
        cap: bound of the ratio as a factor of the gradient; 20 in verl.

    The other arguments are those of `PolicyLoss`.
    """
    return policy_loss(
        logprobs,
        behavior_logprobs,
        behavior_logprobs,
        advantages,
        mask,
        surrogate=partial(dppo_tv_surrogate, divergence=divergence, cap=cap),
        aggregate=partial(token_mean, token_count=token_count),
    )


def dppo_kl(
    logprobs: Float[Tensor, "*shape"],
    proximal_logprobs: Float[Tensor, "*shape"],  # noqa: ARG001 - part of the protocol
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    divergence: ClipEpsilon = 0.05,
    cap: float = math.inf,
    token_count: Count | None = None,
) -> PolicyLossResult:
    """DPPO with the KL divergence of "this token or another one" instead of total variation.

    Source: DPPO (arXiv:2602.04879); the formula is that of `dppo_kl_surrogate`.

    Args:
        divergence: delta in nats, one number or (low, high).
        cap: bound of the ratio as a factor of the gradient; 20 in verl.

    The other arguments are those of `PolicyLoss`.
    """
    return policy_loss(
        logprobs,
        behavior_logprobs,
        behavior_logprobs,
        advantages,
        mask,
        surrogate=partial(dppo_kl_surrogate, divergence=divergence, cap=cap),
        aggregate=partial(token_mean, token_count=token_count),
    )


def prime_rl(
    logprobs: Float[Tensor, "*shape"],
    proximal_logprobs: Float[Tensor, "*shape"],  # noqa: ARG001 - part of the protocol
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    divergence: ClipEpsilon = 0.2,
    penalty: float = 1e-3,
    token_count: Count | None = None,
) -> PolicyLossResult:
    r"""prime-rl's default: DPPO with total variation and a squared log ratio.

    $$ L = -\frac{1}{N} \sum_t (r_t A_t\,[\text{kept}] - \kappa (\log r_t)^2), \quad
    r = \pi_\theta / \pi_\mu $$

    Does not vanish where all advantages are 0.

    Source: prime-rl; the penalty is that of Kimi k1.5 (arXiv:2501.12599).

    Args:
        divergence: delta, a difference of probabilities, one number or (low, high).
        penalty: kappa.

    The other arguments are those of `PolicyLoss`.
    """
    return policy_loss(
        logprobs,
        behavior_logprobs,
        behavior_logprobs,
        advantages,
        mask,
        surrogate=partial(prime_rl_surrogate, divergence=divergence, penalty=penalty),
        aggregate=partial(token_mean, token_count=token_count),
    )


def kimi(
    logprobs: Float[Tensor, "*shape"],
    proximal_logprobs: Float[Tensor, "*shape"],
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    tau: float = 0.1,
    correct: Correction = unbounded,
    token_count: Count | None = None,  # noqa: ARG001 - part of the protocol
    sequences: Segments | None = None,
    sequence_count: Count | None = None,
) -> PolicyLossResult:
    r"""Kimi k1.5: REINFORCE with a pull of the squared log ratio of the response.

    $$ L = -\frac{1}{B} \sum_i \Big(A_i \log \pi_\theta(y_i) - \frac{\tau}{2}
    \Big(\log \frac{\pi_\theta(y_i)}{\pi_{prox}(y_i)}\Big)^2\Big) $$

    The proximal policy is that at the start of the iteration. The weight pi_prox / pi_behav of a
    token multiplies its share of both terms. Does not vanish where all advantages are 0. ROLL
    squares the log ratio of each token: `policy_loss` with `kimi_surrogate`.

    Source: Kimi k1.5 (arXiv:2501.12599), section 2.3.2; tau as in ROLL.

    Args:
        tau: strength of the pull.

    The other arguments are those of `PolicyLoss`.
    """
    return policy_loss(
        logprobs,
        proximal_logprobs,
        behavior_logprobs,
        advantages,
        mask,
        surrogate=partial(kimi_sequence_surrogate, tau=tau),
        aggregate=partial(sequence_sum_mean, sequence_count=sequence_count),
        correct=correct,
        sequences=sequences,
    )


def dro(
    logprobs: Float[Tensor, "*shape"],
    proximal_logprobs: Float[Tensor, "*shape"],
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    beta: float,
    correct: Correction = unbounded,
    token_count: Count | None = None,
    sequences: Segments | None = None,
) -> PolicyLossResult:
    r"""DRO's policy objective by token: REINFORCE with a pull of the squared log ratio.

    $$ L = -\frac{1}{N} \sum_t \rho_t \Big(A_t \log \pi_\theta(y_t) - \frac{\beta}{2}
    (\log r_t)^2\Big) $$

    Goes with advantages against a learned value. Does not vanish where all advantages are 0.

    Source: DRO (arXiv:2405.19107), by token as in verl.

    Args:
        beta: strength of the pull; must be bound, as in `partial(dro, beta=0.1)`.

    The other arguments are those of `PolicyLoss`.
    """
    return policy_loss(
        logprobs,
        proximal_logprobs,
        behavior_logprobs,
        advantages,
        mask,
        surrogate=partial(dro_surrogate, beta=beta),
        aggregate=partial(token_mean, token_count=token_count),
        correct=correct,
        sequences=sequences,
    )
