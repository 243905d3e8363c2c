"""The loss of the study of corrections that no combination of named ones is."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from areal_lab.functional.aggregate import Count
from areal_lab.functional.losses.policy import PolicyLossResult, ppo


def proximal_anchor_only(
    logprobs: Float[Tensor, " R"],
    proximal_logprobs: Float[Tensor, " R"],
    behavior_logprobs: Float[Tensor, " R"],  # noqa: ARG001 - `PolicyLoss` has both old policies
    advantages: Float[Tensor, " R"],
    mask: Bool[Tensor, " R"],
    *,
    token_count: Count,
) -> PolicyLossResult:
    """Decoupled PPO (AReaL, eq. 5) without its factor pi_prox / pi_behav."""
    return ppo(logprobs, proximal_logprobs, advantages, mask, token_count=token_count)
