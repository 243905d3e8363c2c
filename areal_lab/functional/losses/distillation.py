r"""Distillation: on the student's own tokens, or from whole distributions.

    student's tokens, l_old, l_T --distillation_advantages--> A --> any policy loss
                                 --on_policy_distillation_loss--> loss
    logits of both               --distillation_loss--> loss         divergence is a function
    logits, teacher's top k      --topk_distillation_loss--> loss    so is the rest's treatment

Only the student gets a gradient. Masked values (NaN too) reach neither value nor gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from areal_lab.functional.aggregate import Aggregate, aggregated, token_mean
from areal_lab.functional.checks import (
    applied,
    check_integer,
    check_same_shape,
    check_token_inputs,
)
from areal_lab.functional.divergences.vocabulary import (
    VocabularyDivergence,
    forward_kl,
    log_distribution,
)
from areal_lab.functional.masked import log_difference, select
from areal_lab.functional.segments import Segments

Tail: TypeAlias = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""`(student [*shape, V], tokens [*shape, K], teacher [*shape, K])`, log-probabilities and the
tokens that the teacher's are of, to `(student, teacher)` as a divergence takes them."""


class OnPolicyDistillationLoss(NamedTuple):
    """A loss on the student's own tokens; everything except `loss` is detached."""

    loss: Tensor
    """Scalar, to be minimized."""
    log_ratio: Tensor
    """log pi_theta - log pi_T of each token, whose mean estimates the reverse KL; 0 if masked."""


class DistillationLoss(NamedTuple):
    """A loss of whole distributions; everything except `loss` is detached."""

    loss: Tensor
    """Scalar, to be minimized."""
    divergence: Tensor
    """Divergence at each token, in nats; 0 where masked."""


def distillation_advantages(
    advantages: Float[Tensor, "*shape"],
    logprobs: Float[Tensor, "*shape"],
    teacher_logprobs: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    coefficient: float = 1.0,
    baseline: Aggregate | None = None,
    sequences: Segments | None = None,
) -> Float[Tensor, "*shape"]:
    r"""Advantages that include the distance from the teacher, for any policy loss.

    $$ A_t - \kappa\,(d_t - b), \quad d_t = \log \pi_{old}(y_t) - \log \pi_T(y_t) $$

    A policy loss then descends the reverse KL from the teacher, token by token, in addition to its
    objective. The result has no gradient and is 0 where masked.

    Args:
        advantages: A of each token; zeros for distillation alone.
        logprobs: log-probs of the policy that sampled the tokens (the student before this batch).
        teacher_logprobs: log pi_T of the same tokens.
        coefficient: kappa.
        baseline: `(d, mask, sequences) -> b`, such as `token_mean`, which keeps the mean advantage
            as it was; None is 0.

    Source: MiniLLM (arXiv:2306.08543), section 2; Thinking Machines, On-policy distillation (2025).

    Raises:
        ValueError: shapes differ, or the coefficient is not finite.
    """
    check_token_inputs(
        mask, advantages=advantages, logprobs=logprobs, teacher_logprobs=teacher_logprobs
    )
    _check_coefficient(coefficient)
    distance = log_difference(
        select(logprobs.detach(), mask), select(teacher_logprobs.detach(), mask)
    )
    if baseline is not None:
        distance = distance - applied(
            "baseline", baseline, distance, mask, sequences, gives=Tensor, example="token_mean"
        )
    return select(advantages.detach() - coefficient * distance, mask)


def on_policy_distillation_loss(
    logprobs: Float[Tensor, "*shape"],
    old_logprobs: Float[Tensor, "*shape"],
    teacher_logprobs: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    coefficient: float = 1.0,
    aggregate: Aggregate = token_mean,
    sequences: Segments | None = None,
) -> OnPolicyDistillationLoss:
    r"""Reverse KL from the teacher on the student's own tokens, by the score function.

    $$ \kappa\ \mathrm{aggregate}\left(\frac{\pi_\theta}{\pi_{old}}(y_t)\
    \mathrm{sg}(\log \pi_\theta(y_t) - \log \pi_T(y_t))\right) $$

    A token that theta cannot sample, of log-prob -infinity, adds 0 and has no gradient.

    On average its gradient is that of KL(theta || teacher) over the next token, whatever policy
    sampled the tokens. The distance is that of the current student, where `distillation_advantages`
    has that of the old one; the first step of a batch is the same.

    Args:
        old_logprobs: log-probs of the policy that sampled them.
        teacher_logprobs: log pi_T of the same tokens.
        coefficient: kappa.

    Source: MiniLLM (arXiv:2306.08543), section 2, with single tokens instead of returns.

    Raises:
        ValueError: shapes differ, or the coefficient is not finite.
    """
    check_token_inputs(
        mask, logprobs=logprobs, old_logprobs=old_logprobs, teacher_logprobs=teacher_logprobs
    )
    _check_coefficient(coefficient)
    logprobs = select(logprobs, mask)
    log_ratio = log_difference(logprobs.detach(), select(teacher_logprobs.detach(), mask))
    # r log r goes to 0 with r, and so does its gradient.
    possible = logprobs.detach() != -math.inf
    weight = torch.exp(select(logprobs, possible) - select(old_logprobs.detach(), mask & possible))
    values = weight * select(log_ratio, possible)
    loss = coefficient * aggregated(aggregate, values, mask, sequences)
    return OnPolicyDistillationLoss(loss, log_ratio)


def distillation_loss(
    student_logits: Float[Tensor, "*shape V"],
    teacher_logits: Float[Tensor, "*shape V"],
    mask: Bool[Tensor, "*shape"],
    *,
    divergence: VocabularyDivergence = forward_kl,
    temperature: float = 1.0,
    aggregate: Aggregate = token_mean,
    sequences: Segments | None = None,
) -> DistillationLoss:
    r"""Divergence between student and teacher over the whole vocabulary, at every position.

    $$ \mathrm{aggregate}(D(\mathrm{softmax}(z_S / \tau), \mathrm{softmax}(z_T / \tau))) $$

    Args:
        student_logits: z_S; the only input that gets a gradient.
        teacher_logits: z_T, of the same vocabulary.
        divergence: `forward_kl`, `reverse_kl`, `partial(generalized_jsd, beta=0.1)` or your own.
        temperature: tau of both; the loss is not multiplied by its square.

    Source: GKD (arXiv:2306.13649).

    Raises:
        ValueError: shapes differ, or the temperature is not positive and finite.
    """
    check_same_shape("teacher_logits", teacher_logits, "student_logits", student_logits)
    student = log_distribution(student_logits, mask, temperature=temperature)
    teacher = log_distribution(teacher_logits.detach(), mask, temperature=temperature)
    values = _divergence(divergence, student, teacher, mask)
    return DistillationLoss(aggregated(aggregate, values, mask, sequences), values.detach())


def lump_tail(
    student: Float[Tensor, "*shape V"],
    tokens: Int[Tensor, "*shape K"],
    teacher: Float[Tensor, "*shape K"],
) -> tuple[Float[Tensor, "*shape outcomes"], Float[Tensor, "*shape outcomes"]]:
    """Add the outcome "any other token" with the probability outside the teacher's k tokens.

    Both are distributions of k + 1 outcomes, hence a divergence is least where they are equal.
    It is never above that of the whole vocabulary, and equal to it when k is V. Where the
    teacher's k add up to more than 1, as rounded log-probs may, nothing is left over.

    Source: definition.
    """
    if tokens.shape[-1] == student.shape[-1]:
        return drop_tail(student, tokens, teacher)  # there is no other token
    # Far below any log-prob, yet finite, so that the gradient is too.
    others = student.scatter(-1, tokens, -1e4).logsumexp(-1, keepdim=True)
    taken = torch.exp(teacher).sum(-1, keepdim=True)
    rest = (1 - taken).clamp(min=torch.finfo(teacher.dtype).tiny)
    return (
        torch.cat([student.gather(-1, tokens), others], -1),
        torch.cat([teacher, torch.log(rest)], -1),
    )


def renormalize_tail(
    student: Float[Tensor, "*shape V"],
    tokens: Int[Tensor, "*shape K"],
    teacher: Float[Tensor, "*shape K"],
) -> tuple[Float[Tensor, "*shape K"], Float[Tensor, "*shape K"]]:
    """Both conditioned on the teacher's k tokens; the student's other tokens are ignored.

    Source: definition.
    """
    return student.gather(-1, tokens).log_softmax(-1), teacher.log_softmax(-1)


def drop_tail(
    student: Float[Tensor, "*shape V"],
    tokens: Int[Tensor, "*shape K"],
    teacher: Float[Tensor, "*shape K"],
) -> tuple[Float[Tensor, "*shape K"], Float[Tensor, "*shape K"]]:
    """Sum over the teacher's k tokens and leave out the rest.

    These are not distributions: the sum can be negative, and with `forward_kl` it is least at a
    student that puts nothing on the rest, whatever the teacher puts there.

    Source: verl's top-k forward KL.
    """
    return student.gather(-1, tokens), teacher


def topk_distillation_loss(
    student_logits: Float[Tensor, "*shape V"],
    teacher_tokens: Int[Tensor, "*shape K"],
    teacher_logprobs: Float[Tensor, "*shape K"],
    mask: Bool[Tensor, "*shape"],
    *,
    divergence: VocabularyDivergence = forward_kl,
    tail: Tail = lump_tail,
    temperature: float = 1.0,
    aggregate: Aggregate = token_mean,
    sequences: Segments | None = None,
) -> DistillationLoss:
    r"""Divergence from a teacher of which only the k largest log-probs are known.

    $$ \mathrm{aggregate}(D(\mathrm{tail}(p_T, p_S))) $$

    Args:
        student_logits: of the whole vocabulary; the only input that gets a gradient.
        teacher_tokens: the teacher's k tokens at each position, all different.
        teacher_logprobs: their log-probs over the whole vocabulary, as the teacher reported them.
        divergence: see `distillation_loss`.
        tail: treatment of the other tokens: `lump_tail`, `renormalize_tail` or `drop_tail`.
        temperature: tau of the student; the teacher's log-probs must be at the same.

    Source: the k largest of a teacher: Tan et al. (arXiv:1902.10461) for translation; what becomes
    of the others differs by framework, see docs/functional/supervised.md.

    Raises:
        ValueError: shapes differ, tokens are not integers, or the temperature is not positive
            and finite.
    """
    check_integer("teacher_tokens", teacher_tokens)
    check_same_shape("teacher_logprobs", teacher_logprobs, "teacher_tokens", teacher_tokens)
    student = log_distribution(student_logits, mask, temperature=temperature)
    if teacher_tokens.dim() != student.dim() or teacher_tokens.shape[:-1] != mask.shape:
        raise ValueError(
            f"teacher_tokens has shape {tuple(teacher_tokens.shape)} and mask "
            f"{tuple(mask.shape)}, but the first must be the second with an axis of k tokens"
        )
    chosen = mask.unsqueeze(-1)
    tokens = torch.where(chosen, teacher_tokens, torch.zeros_like(teacher_tokens)).long()
    teacher = teacher_logprobs.detach().to(student.dtype)
    teacher = torch.where(chosen, teacher, torch.zeros_like(teacher))
    pair = applied("tail", tail, student, tokens, teacher, gives=tuple, example="lump_tail")
    values = _divergence(divergence, pair[0], pair[1], mask)
    return DistillationLoss(aggregated(aggregate, values, mask, sequences), values.detach())


def _divergence(
    divergence: VocabularyDivergence, student: Tensor, teacher: Tensor, mask: Tensor
) -> Tensor:
    """Divergence at each position; 0 where masked."""
    values = applied("divergence", divergence, student, teacher, gives=Tensor, example="forward_kl")
    return select(values, mask)


def _check_coefficient(coefficient: float) -> None:
    if not math.isfinite(coefficient):
        raise ValueError(f"coefficient is {coefficient}, but must be finite")
