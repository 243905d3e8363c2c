r"""The distance from a reference as a part of the reward, and how strongly it counts.

    R of each sequence ---------------------------+--> at its last token
    logprobs, reference --kl_penalty--> -beta k --+--> at every token

A reward is paid for what a token brings about later, so here a token is also charged for where it
takes the rest of the sequence, as it does not in `kl_loss`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from areal_lab.functional.advantages.returns import placed_at_end
from areal_lab.functional.checks import check_token_inputs
from areal_lab.functional.divergences.kl import KLEstimator, check_coefficient, k1, kl_penalty
from areal_lab.functional.masked import select
from areal_lab.functional.segments import Segments


class KLShapedRewards(NamedTuple):
    """Rewards with the penalty inside; nothing has a gradient."""

    rewards: Tensor
    """Reward of each token; 0 where masked."""
    kl: Tensor
    """Estimate of each token, without the coefficient; 0 where masked."""


def kl_shaped_rewards(
    terminal_rewards: Float[Tensor, "*sequences"],
    logprobs: Float[Tensor, "*shape"],
    reference_logprobs: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    coefficient: float | Float[Tensor, ""],
    estimator: KLEstimator = k1,
    token_rewards: Float[Tensor, "*shape"] | None = None,
    sequences: Segments | None = None,
) -> KLShapedRewards:
    r"""Rewards per token: minus the penalty at each, plus the reward of the whole at the last.

    $$ r_t = -\beta\, k(x_t) + R\,[t \text{ is the last unmasked token}] $$

    The penalty is charged at the last token too; R is placed by `terminal_rewards`, hence a
    sequence without an unmasked token gets nothing. No result has a gradient.

    Args:
        terminal_rewards: R of each sequence: `[N]` for rows, `[count]` for `sequences`, a scalar
            for a single axis without `sequences`.
        logprobs: log-probs of the policy that is charged: pi_theta, or the one that sampled.
        coefficient: beta.
        estimator: here it is the value that matters; `k1` is unbiased.
        token_rewards: rewards of single tokens, added where unmasked.
        sequences: sequence of each token; None takes rows. Turns put R at the end of each turn.

    Source: Ziegler et al. (arXiv:1909.08593), eq. 2; InstructGPT (arXiv:2203.02155), eq. 2.

    Raises:
        ValueError: shapes differ, terminal rewards are not floating, that of a sequence with an
            unmasked token is not finite, or the coefficient is negative or not finite.
    """
    check_coefficient(coefficient)
    kl = kl_penalty(logprobs, reference_logprobs, mask, estimator=estimator).detach()
    placed = placed_at_end("terminal_rewards", terminal_rewards.detach(), mask, sequences)
    rewards = placed - coefficient * kl
    if token_rewards is not None:
        check_token_inputs(mask, token_rewards=token_rewards)
        rewards = rewards + select(token_rewards.detach(), mask)
    return KLShapedRewards(rewards.detach(), kl)


def adaptive_kl_coefficient(
    coefficient: float | Float[Tensor, ""],
    measured_kl: float | Float[Tensor, ""],
    *,
    target_kl: float,
    gain: float,
    error_bound: float = 0.2,
) -> Float[Tensor, ""]:
    r"""Coefficient of the next batch: larger if the policy is too far from the reference.

    $$ \beta' = \beta\,(1 + K\, \mathrm{clip}(\mathrm{KL} / \mathrm{target} - 1, \pm 0.2)) $$

    Args:
        coefficient: beta of the last batch.
        measured_kl: KL of the last batch, in the unit of the target: nats per sequence in the
            source, or per token.
        target_kl: the distance to keep.
        gain: K; 0.1 in the source, whose followers write samples of a batch / horizon.
        error_bound: largest relative error that counts.

    Source: Ziegler et al. (arXiv:1909.08593), section 2.2.

    Raises:
        ValueError: the target or the bound is not positive, or the gain is negative.
    """
    if not (target_kl > 0 and error_bound > 0 and gain >= 0):
        raise ValueError(
            f"target_kl is {target_kl}, error_bound {error_bound}, gain {gain}, but the first two "
            "must be > 0 and the gain >= 0; a gain of 0 keeps the coefficient"
        )
    error = torch.as_tensor(measured_kl).detach() / target_kl - 1
    return torch.as_tensor(coefficient).detach() * (
        1 + gain * error.clamp(-error_bound, error_bound)
    )
