"""Losses of the study of corrections that differ from the core's in their anchor only.

The core's losses have the proximal policy as their anchor and multiply by pi_prox / pi_behav. Where
a paper knows a single old policy, it is the one that sampled: the behavior policy. `actor.loss_fn`
takes a function without arguments of its own, so each of them is one.
"""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from areal_lab.functional.aggregate import Count
from areal_lab.functional.losses.clipped import dual_clip_ppo
from areal_lab.functional.losses.policy import PolicyLossResult, ppo
from areal_lab.functional.losses.reinforce import cispo, reinforce
from areal_lab.functional.losses.sequence import gspo
from areal_lab.functional.segments import Segments

# ruff: noqa: ARG001 - `PolicyLoss` has both old policies


def proximal_anchor_only(
    logprobs: Float[Tensor, " R"],
    proximal_logprobs: Float[Tensor, " R"],
    behavior_logprobs: Float[Tensor, " R"],
    advantages: Float[Tensor, " R"],
    mask: Bool[Tensor, " R"],
    *,
    token_count: Count,
) -> PolicyLossResult:
    """Decoupled PPO (AReaL, eq. 5) without its factor pi_prox / pi_behav."""
    return ppo(logprobs, proximal_logprobs, advantages, mask, token_count=token_count)


def no_ratio(
    logprobs: Float[Tensor, " R"],
    proximal_logprobs: Float[Tensor, " R"],
    behavior_logprobs: Float[Tensor, " R"],
    advantages: Float[Tensor, " R"],
    mask: Bool[Tensor, " R"],
    *,
    token_count: Count,
) -> PolicyLossResult:
    """REINFORCE (Williams, 1992) as if the samples were on policy."""
    behavior = behavior_logprobs
    return reinforce(logprobs, behavior, behavior, advantages, mask, token_count=token_count)


def behavior_dual_clip(
    logprobs: Float[Tensor, " R"],
    proximal_logprobs: Float[Tensor, " R"],
    behavior_logprobs: Float[Tensor, " R"],
    advantages: Float[Tensor, " R"],
    mask: Bool[Tensor, " R"],
    *,
    token_count: Count,
) -> PolicyLossResult:
    """Dual-clip PPO (arXiv:1912.09729), c = 3."""
    behavior = behavior_logprobs
    return dual_clip_ppo(logprobs, behavior, behavior, advantages, mask, token_count=token_count)


def behavior_cispo(
    logprobs: Float[Tensor, " R"],
    proximal_logprobs: Float[Tensor, " R"],
    behavior_logprobs: Float[Tensor, " R"],
    advantages: Float[Tensor, " R"],
    mask: Bool[Tensor, " R"],
    *,
    token_count: Count,
) -> PolicyLossResult:
    """CISPO (arXiv:2506.13585): the weight pi_theta / pi_behav is at most 5."""
    behavior = behavior_logprobs
    return cispo(logprobs, behavior, behavior, advantages, mask, token_count=token_count)


def behavior_gspo(
    logprobs: Float[Tensor, " R"],
    proximal_logprobs: Float[Tensor, " R"],
    behavior_logprobs: Float[Tensor, " R"],
    advantages: Float[Tensor, " R"],
    mask: Bool[Tensor, " R"],
    *,
    sequences: Segments,
    sequence_count: Count,
) -> PolicyLossResult:
    """GSPO (arXiv:2507.18071) with its clip, (3e-4, 4e-4), for responses of thousands of tokens."""
    return gspo(
        logprobs,
        behavior_logprobs,
        behavior_logprobs,
        advantages,
        mask,
        sequences=sequences,
        sequence_count=sequence_count,
    )


def behavior_gspo_wide(
    logprobs: Float[Tensor, " R"],
    proximal_logprobs: Float[Tensor, " R"],
    behavior_logprobs: Float[Tensor, " R"],
    advantages: Float[Tensor, " R"],
    mask: Bool[Tensor, " R"],
    *,
    sequences: Segments,
    sequence_count: Count,
) -> PolicyLossResult:
    """GSPO with the clip of PPO, 0.2: the mean over five tokens moves as far as one of them."""
    return gspo(
        logprobs,
        behavior_logprobs,
        behavior_logprobs,
        advantages,
        mask,
        clip_epsilon=0.2,
        sequences=sequences,
        sequence_count=sequence_count,
    )
