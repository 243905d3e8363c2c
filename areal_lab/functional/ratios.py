r"""How far the policy has moved from its anchor: $\log r = \log \pi_\theta - \log \pi_{anchor}$.

    theta ---ratio---> anchor (proximal) ---behavior weight---> behavior

The anchor is where the trust region is centred: the proximal policy in the decoupled objective,
the behavior policy in ordinary PPO. Only `logprobs` gets a gradient.
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


class AnchoredPolicy(NamedTuple):
    """The policy seen from its anchor; 0 where masked."""

    log_ratio: Tensor
    """log r of each token, as the surrogate shall see it; carries the gradient."""
    logprobs: Tensor
    """log pi_theta; carries the gradient. For surrogates of the REINFORCE family."""
    anchor_logprobs: Tensor
    """log pi_anchor, detached."""
    mask: Tensor
    """True where the policy chose the token."""
    sequences: Segments
    """Sequence of each token, for surrogates that look at whole sequences."""


AnchorRatio: TypeAlias = Callable[[Tensor, Tensor, Tensor, Segments | None], AnchoredPolicy]
"""`(logprobs, anchor_logprobs, mask, sequences) -> AnchoredPolicy`."""


def token_ratio(
    logprobs: Float[Tensor, "*shape"],
    anchor_logprobs: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    sequences: Segments | None = None,
) -> AnchoredPolicy:
    r"""Ratio of each token by itself.

    $$ \log r_t = \log \pi_\theta(y_t) - \log \pi_{anchor}(y_t) $$

    Args:
        logprobs: log pi_theta of the sampled tokens; the only input that gets a gradient.
        anchor_logprobs: log pi_anchor of the same tokens.
        mask: True where the policy chose the token; elsewhere everything is 0, ratio 1.
        sequences: handed on; None takes rows.

    Source: PPO (arXiv:1707.06347), section 3.

    Raises:
        ValueError: shapes differ.
    """
    check_token_inputs(mask, logprobs=logprobs, anchor_logprobs=anchor_logprobs)
    logprobs = select(logprobs, mask)
    anchor_logprobs = select(anchor_logprobs.detach(), mask)
    return AnchoredPolicy(
        log_ratio=logprobs - anchor_logprobs,
        logprobs=logprobs,
        anchor_logprobs=anchor_logprobs,
        mask=mask,
        sequences=sequences_or_rows(mask, sequences),
    )


def detached_ratio(policy: AnchoredPolicy) -> Float[Tensor, "*shape"]:
    """pi_theta / pi_anchor as a diagnostic: no gradient, 1 where masked."""
    return torch.exp(policy.log_ratio.detach())
