r"""Divergences of two distributions over the vocabulary: exact, one number per position.

A divergence maps `(student, teacher)`, log-probabilities `[*shape, V]`, to `[*shape]`. A token that
cannot be sampled has -infinity. Both get gradients; detach those that should have none.

    forward_kl       KL(teacher || student)   covers all that the teacher does
    reverse_kl       KL(student || teacher)   avoids what the teacher does not do
    generalized_jsd  between the two, bounded
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from areal_lab.functional.checks import check_token_inputs, wide

VocabularyDivergence: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""`(student, teacher)` log-probabilities to one number per position."""

_NEVER = -1e4
"""Finite log-probability whose exp is 0 in every floating type."""


def forward_kl(
    student: Float[Tensor, "*shape V"], teacher: Float[Tensor, "*shape V"]
) -> Float[Tensor, "*shape"]:
    r"""$\mathrm{KL}(p_T \| p_S) = \sum_v p_T (\log p_T - \log p_S)$, as in supervised learning.

    Infinite when the student cannot sample what the teacher can.

    Source: Hinton, Vinyals, Dean (arXiv:1503.02531), section 2, up to the teacher's entropy.
    """
    return _kl(teacher, student)


def reverse_kl(
    student: Float[Tensor, "*shape V"], teacher: Float[Tensor, "*shape V"]
) -> Float[Tensor, "*shape"]:
    r"""$\mathrm{KL}(p_S \| p_T) = \sum_v p_S (\log p_S - \log p_T)$.

    Infinite when the teacher cannot sample what the student can.

    Source: MiniLLM (arXiv:2306.08543), section 2.
    """
    return _kl(student, teacher)


def generalized_jsd(
    student: Float[Tensor, "*shape V"],
    teacher: Float[Tensor, "*shape V"],
    *,
    beta: float = 0.5,
) -> Float[Tensor, "*shape"]:
    r"""Generalized Jensen-Shannon divergence, finite whatever the two can sample.

    $$ \beta\, \mathrm{KL}(p_T \| m) + (1 - \beta)\, \mathrm{KL}(p_S \| m),
    \quad m = \beta p_T + (1 - \beta) p_S $$

    Divided by beta it tends to `forward_kl` as beta goes to 0; divided by 1 - beta, to
    `reverse_kl` as beta goes to 1. The ends themselves are 0 everywhere, hence refused.

    Args:
        student: log p_S.
        teacher: log p_T.
        beta: share of the teacher in the mixture m.

    Source: GKD (arXiv:2306.13649).

    Raises:
        ValueError: beta is not inside (0, 1).
    """
    if not 0 < beta < 1:
        raise ValueError(
            f"beta is {beta}, but must be inside (0, 1); at the ends the divergence is 0, and "
            "forward_kl (for 0) or reverse_kl (for 1) is meant"
        )
    # Two times -infinity would have a NaN gradient; nothing is lost, as exp gives 0 for both.
    student, teacher = student.clamp(min=_NEVER), teacher.clamp(min=_NEVER)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    p = torch.exp(log_p)
    # 0 log 0 = 0, whatever q is. NaN is not 0 and goes through, so that it is seen.
    possible = p != 0
    zero = torch.zeros_like(p)
    difference = torch.where(possible, log_p, zero) - torch.where(possible, log_q, zero)
    return (p * difference).sum(-1)


def log_distribution(
    logits: Float[Tensor, "*shape V"],
    mask: Bool[Tensor, "*shape"],
    *,
    temperature: float = 1.0,
) -> Float[Tensor, "*shape V"]:
    r"""$\log \mathrm{softmax}(z / \tau)$ in float32 at least; uniform where masked.

    Masked logits, NaN too, reach neither value nor gradient.

    Args:
        logits: unnormalized log-probabilities.
        mask: True where the position counts.
        temperature: tau.

    Source: Hinton, Vinyals, Dean (arXiv:1503.02531), eq. 1.

    Raises:
        ValueError: shapes differ, or the temperature is not positive and finite.
    """
    check_token_inputs(mask)
    if logits.shape[:-1] != mask.shape or logits.dim() != mask.dim() + 1:
        raise ValueError(
            f"logits have shape {tuple(logits.shape)} and mask {tuple(mask.shape)}, but the first "
            "must be the second with an axis for the vocabulary"
        )
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature is {temperature}, but must be positive and finite")
    kept = wide(logits)
    chosen = torch.where(mask.unsqueeze(-1), kept, torch.zeros_like(kept))
    return torch.log_softmax(chosen / temperature, dim=-1)
