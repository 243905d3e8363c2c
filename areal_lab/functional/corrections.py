r"""The weight $\rho = \pi_{prox} / \pi_{behav}$ that makes up for the sampler's older policy.

A correction maps a `BehaviorWeight` to one; chain several with `chain`. The weight itself is always
part of the decoupled objective; what is chosen here is how it is bounded.

    behavior_weight(...) --> truncate(2.0) --> ... --> weight * surrogate
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from areal_lab.functional.checks import check_token_inputs
from areal_lab.functional.masked import select
from areal_lab.functional.segments import Segments, sequences_or_rows


class BehaviorWeight(NamedTuple):
    """A weight per token on its way through a chain of corrections; nothing has a gradient."""

    weight: Tensor
    """What the surrogate is multiplied with; 0 drops the token from the sum."""
    log_ratio: Tensor
    """log pi_prox - log pi_behav, as it was at the start of the chain; 0 where masked."""
    mask: Tensor
    """True where the policy chose the token."""
    sequences: Segments
    """Sequence of each token, for corrections of whole sequences."""


Correction: TypeAlias = Callable[[BehaviorWeight], BehaviorWeight]
"""One link of the chain."""


def behavior_weight(
    proximal_logprobs: Float[Tensor, "*shape"],
    behavior_logprobs: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    sequences: Segments | None = None,
) -> BehaviorWeight:
    r"""Importance weight of each token, unbounded.

    $$ \rho_t = \pi_{prox}(y_t) / \pi_{behav}(y_t) $$

    Args:
        proximal_logprobs: log pi_prox of the sampled tokens.
        behavior_logprobs: log pi_behav, as the sampler reported them.
        mask: True where the policy chose the token; elsewhere the weight is 1.
        sequences: sequence of each token; None takes rows.

    Source: AReaL (arXiv:2505.24298), eq. 5.

    Raises:
        ValueError: shapes differ.
    """
    check_token_inputs(
        mask, proximal_logprobs=proximal_logprobs, behavior_logprobs=behavior_logprobs
    )
    log_ratio = select(proximal_logprobs.detach(), mask) - select(behavior_logprobs.detach(), mask)
    return BehaviorWeight(torch.exp(log_ratio), log_ratio, mask, sequences_or_rows(mask, sequences))


def unbounded(weight: BehaviorWeight) -> BehaviorWeight:
    """Leave the weight as it is: unbiased, and of unbounded variance."""
    return weight


def truncate(cap: float) -> Correction:
    r"""Bound the weight from above: $\min(\rho, cap)$. Biased, every token still learns.

    Source: IMPALA (arXiv:1802.01561), section 4.1; for language models "TIS".

    Raises:
        ValueError: the cap is not positive.
    """
    _check_cap(cap)

    def truncated(weight: BehaviorWeight) -> BehaviorWeight:
        return weight._replace(weight=weight.weight.clamp(max=cap))

    return truncated


def mask_above(cap: float) -> Correction:
    r"""Drop tokens whose weight is above the cap: $\rho\,[\rho \le cap]$.

    The count that a mean divides by does not change: a dropped token adds 0.

    Source: IcePop, as in Ring-1T (arXiv:2510.18855), with the upper bound only.

    Raises:
        ValueError: the cap is not positive.
    """
    _check_cap(cap)

    def masked(weight: BehaviorWeight) -> BehaviorWeight:
        kept = select(weight.weight, weight.weight <= cap)
        return weight._replace(weight=kept)

    return masked


def chain(*corrections: Correction) -> Correction:
    """Apply corrections from left to right."""

    def chained(weight: BehaviorWeight) -> BehaviorWeight:
        for correct in corrections:
            weight = correct(weight)
        return weight

    return chained


def _check_cap(cap: float) -> None:
    if not cap > 0:
        raise ValueError(
            f"cap is {cap}, but pi_prox/pi_behav is positive, so its bound must be > 0; "
            "infinity switches it off"
        )
