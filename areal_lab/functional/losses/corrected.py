r"""Named ways to bound the weight of decoupled PPO: truncated or masked importance sampling.

                     weight of a token, of rho = pi_prox / pi_behav
    token_tis        min(rho_t, C)
    sequence_tis     min(product of rho, C)
    icepop           rho_t where it is within a band, else 0
    sequence_mis     product of rho where it is within a band, else 0
    geometric_mis    rho_t where the sequence's geometric mean is within a band, else 0
    kpop             rho_t where the binary KL of proximal and behavior is small, else 0
    trm              rho_t where no token of the sequence has a large KL, else 0
    m2po             rho_t except the largest; no clip
    a3po             rho_t, pi_prox by interpolation

`..._tis` truncates importance weights and `..._mis` masks them, by token or by sequence. The first
seven are `decoupled_ppo` with one `correct`, which is how to get others. All are a `PolicyLoss`,
which describes the arguments that losses share. A dropped token adds 0 and stays in the count that
the mean divides by.
"""

from __future__ import annotations

import math
from functools import partial

from jaxtyping import Bool, Float, Int
from torch import Tensor

from areal_lab.functional.aggregate import Count, token_mean
from areal_lab.functional.corrections.proximal import a3po_proximal_logprobs
from areal_lab.functional.corrections.rejection import mask_binary_kl, reject
from areal_lab.functional.corrections.second_moment import mask_second_moment
from areal_lab.functional.corrections.sequence import (
    mask_sequences_outside,
    max_of_sequence,
    sequence_product,
)
from areal_lab.functional.corrections.weights import (
    Correction,
    chain,
    mask_outside,
    truncate,
    unbounded,
)
from areal_lab.functional.divergences.kl import k3
from areal_lab.functional.losses.policy import PolicyLossResult, decoupled_ppo, policy_loss
from areal_lab.functional.segments import Segments
from areal_lab.functional.surrogates.clip import ClipEpsilon
from areal_lab.functional.surrogates.reinforce import importance_surrogate


def token_tis(
    logprobs: Float[Tensor, "*shape"],
    proximal_logprobs: Float[Tensor, "*shape"],
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    clip_epsilon: ClipEpsilon = 0.2,
    cap: float = 2.0,
    token_count: Count | None = None,
    sequences: Segments | None = None,
) -> PolicyLossResult:
    r"""Decoupled PPO with the weight of each token truncated.

    $$ \min(\rho_t, C)\, \min(u_t A_t, \mathrm{clip}(u_t, 1 \pm \epsilon) A_t) $$

    Source: truncated importance sampling as in IMPALA (arXiv:1802.01561), section 4.1; cap: verl.

    Args:
        cap: C.

    The other arguments are those of `PolicyLoss`.
    """
    return decoupled_ppo(
        logprobs,
        proximal_logprobs,
        behavior_logprobs,
        advantages,
        mask,
        clip_epsilon=clip_epsilon,
        correct=truncate(cap),
        token_count=token_count,
        sequences=sequences,
    )


def sequence_tis(
    logprobs: Float[Tensor, "*shape"],
    proximal_logprobs: Float[Tensor, "*shape"],
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    clip_epsilon: ClipEpsilon = 0.2,
    cap: float = 2.0,
    token_count: Count | None = None,
    sequences: Segments | None = None,
) -> PolicyLossResult:
    r"""Decoupled PPO with the truncated weight of the whole sequence at each of its tokens.

    $$ \min\Big(\prod_{s \in i} \rho_s, C\Big)
    \min(u_t A_t, \mathrm{clip}(u_t, 1 \pm \epsilon) A_t) $$

    Source: verl's `sequence` mode, with its cap; SkyRL has 5.

    Args:
        cap: C.

    The other arguments are those of `PolicyLoss`.
    """
    return decoupled_ppo(
        logprobs,
        proximal_logprobs,
        behavior_logprobs,
        advantages,
        mask,
        clip_epsilon=clip_epsilon,
        correct=chain(sequence_product, truncate(cap)),
        token_count=token_count,
        sequences=sequences,
    )


def icepop(
    logprobs: Float[Tensor, "*shape"],
    proximal_logprobs: Float[Tensor, "*shape"],
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    clip_epsilon: ClipEpsilon = 0.2,
    low: float = 0.5,
    high: float = 5.0,
    token_count: Count | None = None,
    sequences: Segments | None = None,
) -> PolicyLossResult:
    r"""IcePop: decoupled PPO without the tokens whose weight is outside of a band.

    $$ \rho_t\,[low \le \rho_t \le high]\, \min(u_t A_t, \mathrm{clip}(u_t, 1 \pm \epsilon) A_t) $$

    As a loss with one ratio, to the behavior policy, it is `icepop_surrogate`.

    Source: IcePop, as in Ring-1T (arXiv:2510.18855); the bounds are inside, as in most frameworks.

    Args:
        low: smallest weight that is kept; 0 for no lower bound.
        high: largest weight that is kept.

    The other arguments are those of `PolicyLoss`.
    """
    return decoupled_ppo(
        logprobs,
        proximal_logprobs,
        behavior_logprobs,
        advantages,
        mask,
        clip_epsilon=clip_epsilon,
        correct=mask_outside(low, high),
        token_count=token_count,
        sequences=sequences,
    )


def sequence_mis(
    logprobs: Float[Tensor, "*shape"],
    proximal_logprobs: Float[Tensor, "*shape"],
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    clip_epsilon: ClipEpsilon = 0.2,
    low: float = 0.0,
    high: float = 3.0,
    token_count: Count | None = None,
    sequences: Segments | None = None,
) -> PolicyLossResult:
    r"""Decoupled PPO without the sequences whose weight is outside of a band.

    $$ \rho_i\,[low \le \rho_i \le high]\, \min(u_t A_t, \mathrm{clip}(u_t, 1 \pm \epsilon) A_t),
    \quad \rho_i = \prod_{s \in i} \rho_s $$

    Source: masked importance sampling, TRL's default `sequence_mask`, with its bound.

    Args:
        low: smallest weight that is kept; 0 for no lower bound.
        high: largest weight that is kept.

    The other arguments are those of `PolicyLoss`.
    """
    return decoupled_ppo(
        logprobs,
        proximal_logprobs,
        behavior_logprobs,
        advantages,
        mask,
        clip_epsilon=clip_epsilon,
        correct=chain(sequence_product, mask_outside(low, high)),
        token_count=token_count,
        sequences=sequences,
    )


def geometric_mis(
    logprobs: Float[Tensor, "*shape"],
    proximal_logprobs: Float[Tensor, "*shape"],
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    clip_epsilon: ClipEpsilon = 0.2,
    low: float = 0.99,
    high: float = 1.01,
    token_count: Count | None = None,
    sequences: Segments | None = None,
) -> PolicyLossResult:
    r"""Decoupled PPO without the sequences whose mean log weight is outside of a band.

    $$ \rho_t\,[low \le \bar\rho_i \le high]\,
    \min(u_t A_t, \mathrm{clip}(u_t, 1 \pm \epsilon) A_t),
    \quad \bar\rho_i = \Big(\prod_{s \in i} \rho_s\Big)^{1 / |y_i|} $$

    Source: SkyRL's geometric sequence mask, with its band; NeMo-RL has (0.999, 1.002).

    Args:
        low: smallest geometric mean that is kept.
        high: largest geometric mean that is kept.

    The other arguments are those of `PolicyLoss`.
    """
    return decoupled_ppo(
        logprobs,
        proximal_logprobs,
        behavior_logprobs,
        advantages,
        mask,
        clip_epsilon=clip_epsilon,
        correct=mask_sequences_outside(low, high),
        token_count=token_count,
        sequences=sequences,
    )


def kpop(
    logprobs: Float[Tensor, "*shape"],
    proximal_logprobs: Float[Tensor, "*shape"],
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    delta: float,
    clip_epsilon: ClipEpsilon = 0.2,
    cap: float = math.inf,
    token_count: Count | None = None,
    sequences: Segments | None = None,
) -> PolicyLossResult:
    r"""KPop: decoupled PPO without the tokens on which sampler and trainer differ, by binary KL.

    $$ \min(\rho_t, C)\,[\max(\mathrm{KL}(p_t, q_t), \mathrm{KL}(q_t, p_t)) \le \delta]\,
    \min(u_t A_t, \mathrm{clip}(u_t, 1 \pm \epsilon) A_t), \quad
    p = \pi_{prox},\ q = \pi_{behav} $$

    Source: AReaL 2.0, as retold; see `mask_binary_kl`, which is the correction alone.

    Args:
        delta: largest divergence of "this token or another one" that is kept, in nats.
        cap: C.

    The other arguments are those of `PolicyLoss`.
    """
    return decoupled_ppo(
        logprobs,
        proximal_logprobs,
        behavior_logprobs,
        advantages,
        mask,
        clip_epsilon=clip_epsilon,
        correct=chain(mask_binary_kl(delta), truncate(cap)),
        token_count=token_count,
        sequences=sequences,
    )


def trm(
    logprobs: Float[Tensor, "*shape"],
    proximal_logprobs: Float[Tensor, "*shape"],
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    delta: float,
    clip_epsilon: ClipEpsilon = 0.2,
    cap: float = math.inf,
    token_count: Count | None = None,
    sequences: Segments | None = None,
) -> PolicyLossResult:
    r"""Trust region masking: decoupled PPO without the sequences that hold a token of large KL.

    $$ \min(\rho_t, C)\,[\max_{s \in i} k_3(-\log \rho_s) \le \delta]\,
    \min(u_t A_t, \mathrm{clip}(u_t, 1 \pm \epsilon) A_t) $$

    The mask of the paper is by $\max_t D_{KL}$ over the whole vocabulary of each context, which no
    log-prob of a sampled token gives; $k_3 = \rho - 1 - \log \rho$ estimates it without a bias and
    is never negative. Long sequences are dropped more often: theirs is the largest of more tokens.

    Source: Trust Region Masking (arXiv:2512.23075), as retold; the paper was not at hand.

    Args:
        delta: largest estimate that any token of a sequence may have, in nats.
        cap: C.

    The other arguments are those of `PolicyLoss`.
    """
    return decoupled_ppo(
        logprobs,
        proximal_logprobs,
        behavior_logprobs,
        advantages,
        mask,
        clip_epsilon=clip_epsilon,
        correct=chain(reject(k3, high=delta, statistic=max_of_sequence), truncate(cap)),
        token_count=token_count,
        sequences=sequences,
    )


def m2po(
    logprobs: Float[Tensor, "*shape"],
    proximal_logprobs: Float[Tensor, "*shape"],
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    threshold: float = 0.04,
    token_count: Count | None = None,
) -> PolicyLossResult:
    r"""M2PO: no clip; the tokens furthest off policy are dropped until the second moment is small.

    $$ L = -\frac{1}{N} \sum_t [t \in K]\, \rho_t u_t A_t, \qquad
    \frac{1}{|K|} \sum_{t \in K} (\log \rho_t)^2 < \tau $$

    $\rho u$ is the ratio of theta to the behavior policy. K is chosen among the tokens of this
    call, by the ratio of proximal to behavior, as AReaL does; the paper's is by that of theta to
    behavior, the same as long as theta is the proximal policy.

    Source: M2PO (arXiv:2510.01161); AReaL's example has the same threshold.

    Args:
        threshold: tau.

    The other arguments are those of `PolicyLoss`.
    """
    return policy_loss(
        logprobs,
        proximal_logprobs,
        behavior_logprobs,
        advantages,
        mask,
        surrogate=importance_surrogate,
        correct=mask_second_moment(threshold),
        aggregate=partial(token_mean, token_count=token_count),
    )


def a3po(
    logprobs: Float[Tensor, "*shape"],
    proximal_logprobs: Float[Tensor, "*shape"],  # noqa: ARG001 - part of the protocol
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    versions: Int[Tensor, "*shape"],
    trainer_version: int | Int[Tensor, ""],
    clip_epsilon: ClipEpsilon = 0.2,
    correct: Correction = unbounded,
    token_count: Count | None = None,
    sequences: Segments | None = None,
) -> PolicyLossResult:
    r"""A-3PO: decoupled PPO whose proximal log-probs are interpolated rather than computed.

    $$ \log \pi_{prox} \approx \log \pi_\mu + \alpha (\log \pi_\theta - \log \pi_\mu), \quad
    \alpha = \mathrm{clip}((v - 1 - v_\mu) / (v - v_\mu); 0, 1) $$

    `proximal_logprobs` is ignored. The interpolated ones get no gradient.

    Source: A-3PO (arXiv:2512.06547).

    Args:
        versions: $v_\mu$, version that sampled each token.
        trainer_version: v, see `a3po_proximal_logprobs`.

    The other arguments are those of `PolicyLoss`.

    Raises:
        ValueError: shapes differ, versions are not integers, or a number is out of range.
    """
    approximated = a3po_proximal_logprobs(
        logprobs, behavior_logprobs, versions, mask, trainer_version=trainer_version
    )
    return decoupled_ppo(
        logprobs,
        approximated,
        behavior_logprobs,
        advantages,
        mask,
        clip_epsilon=clip_epsilon,
        correct=correct,
        token_count=token_count,
        sequences=sequences,
    )
