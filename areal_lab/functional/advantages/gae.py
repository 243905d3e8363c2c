r"""Generalized advantage estimation, and the lambda returns of which it is made.

    gae              rewards and values of tokens
    gae_advantages   one reward per response, whitened: the advantages of PPO with a critic
    lambda_returns   what the values should have been

    V_1  r_1  V_2  r_2  V_3  r_3  bootstrap      k values and one beyond: k + 1 points

Values are those *before* each token, V(s_t); what lies beyond the last token is the caller's
choice, sequence by sequence: nothing for a response that ended, a value for one that was cut off.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from areal_lab.functional.advantages.recurrence import linear_recurrence, next_in_sequence
from areal_lab.functional.advantages.returns import (
    Discount,
    Holes,
    carry_over_holes,
    chosen,
    finite_or_none,
    per_token_or_number,
    step_discounts,
    terminal_rewards,
)
from areal_lab.functional.advantages.whitening import whiten
from areal_lab.functional.checks import check_token_inputs
from areal_lab.functional.segments import Segments, segment_reduce, sequences_or_rows


class AdvantagesAndReturns(NamedTuple):
    """Advantage and return of each token; 0 where masked. Not detached."""

    advantages: Tensor
    """A: how much better than the value it went from here on."""
    returns: Tensor
    """Target of the value loss."""


def gae(
    rewards: Float[Tensor, "*shape"],
    values: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    gamma: Discount = 1.0,
    lambda_: Discount = 1.0,
    bootstrap_values: Float[Tensor, "*sequences"] | None = None,
    holes: Holes = carry_over_holes,
    sequences: Segments | None = None,
) -> AdvantagesAndReturns:
    r"""Generalized advantage estimation.

    $$ A_t = \delta_t + \gamma \lambda A_{t+1}, \quad
    \delta_t = r_t + \gamma V_{t+1} - V_t, \quad R_t = A_t + V_t $$

    where t + 1 is the next unmasked token. Lambda 1 is return minus value, lambda 0 one step.

    Decoupled GAE (VAPO) is two calls: returns from lambda 1 for the value loss, advantages from
    another lambda for the policy. Gradients flow to rewards, values and bootstrap values, nothing
    is detached: policy losses detach their advantages; a value loss wants `returns.detach()`.

    Source: GAE (arXiv:1506.02438), section 3; decoupled and length-adaptive lambda: VAPO
    (arXiv:2504.05118).

    Args:
        rewards: r of each token, for the token itself (`terminal_rewards` places one per sequence).
        values: V before each token.
        mask: True = the policy chose this token. Rewards and values elsewhere do not count.
        gamma: discount of the step that leaves a token; one number, or one per token.
        lambda_: one number, or one per token: the weight that the token before gives to what was
            earned after this one, rather than to this token's value.
        bootstrap_values: value beyond the last token of each sequence: `[N]` for `[N, T]` tokens, a
            scalar for one sequence `[T]`, one per sequence when packed. None is 0: terminated.

    Raises:
        ValueError: shapes differ, rewards or values are not floating, an unmasked one or a
            bootstrap value is NaN or infinite, or gamma or lambda_ is not in 0 .. 1.
    """
    returns = lambda_returns(
        rewards,
        values,
        mask,
        gamma=gamma,
        lambda_=lambda_,
        bootstrap_values=bootstrap_values,
        holes=holes,
        sequences=sequences,
    )
    return AdvantagesAndReturns(returns - torch.where(mask, values, 0.0), returns)


def gae_advantages(
    rewards: Float[Tensor, "*sequences"],
    values: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    token_rewards: Float[Tensor, "*shape"] | None = None,
    bootstrap_values: Float[Tensor, "*sequences"] | None = None,
    gamma: float = 1.0,
    lambda_: float = 1.0,
    value_lambda: float | None = None,
    length_alpha: float | None = None,
    whitened: bool = True,
    eps: float = 1e-8,
    sequences: Segments | None = None,
) -> AdvantagesAndReturns:
    r"""Advantages and value targets of PPO with a critic: one reward per response, GAE, whitened.

    $$ r_t = r^{token}_t + R\,[t \text{ is the last unmasked token}] $$

    Returns are not whitened; nothing is detached.

    Args:
        rewards: R of each sequence: `[N]` for `[N, T]` tokens, a scalar for one sequence `[T]`.
        values: V before each token.
        mask: True = the policy chose this token.
        token_rewards: r of single tokens, such as -beta times a KL estimate; None is 0.
        bootstrap_values: value beyond the last token of each sequence; 0 where it ended. None is 0
            everywhere.
        gamma: discount of a token.
        lambda_: of the advantages.
        value_lambda: of the returns, where it differs (decoupled GAE); None takes `lambda_`.
        length_alpha: take `length_adaptive_lambda` with this alpha instead of `lambda_`.
        whitened: whiten the advantages over all unmasked tokens.
        eps: added to their variance, inside the root.

    Source: GAE (arXiv:1506.02438); InstructGPT (arXiv:2203.02155); whitened as in arXiv:2403.17031;
    `value_lambda` and `length_alpha`: VAPO (arXiv:2504.05118).

    Raises:
        ValueError: as `terminal_rewards`, `gae`, `length_adaptive_lambda` and `whiten`.
    """
    total = terminal_rewards(rewards, mask, sequences=sequences)
    if token_rewards is not None:
        total = total + chosen("token_rewards", token_rewards, mask)
    own: Discount = lambda_
    if length_alpha is not None:
        own = length_adaptive_lambda(
            mask, alpha=length_alpha, sequences=sequences, dtype=total.dtype
        )

    def estimate(weight: Discount) -> AdvantagesAndReturns:
        return gae(
            total,
            values,
            mask,
            gamma=gamma,
            lambda_=weight,
            bootstrap_values=bootstrap_values,
            sequences=sequences,
        )

    advantages, returns = estimate(own)
    if value_lambda is not None:
        returns = estimate(value_lambda).returns
    if whitened:
        advantages = whiten(advantages, mask, eps=eps)
    return AdvantagesAndReturns(advantages, returns)


def lambda_returns(
    rewards: Float[Tensor, "*shape"],
    values: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    gamma: Discount = 1.0,
    lambda_: Discount = 1.0,
    bootstrap_values: Float[Tensor, "*sequences"] | None = None,
    holes: Holes = carry_over_holes,
    sequences: Segments | None = None,
) -> Float[Tensor, "*shape"]:
    r"""Mixture of returns that look one, two, ... tokens ahead.

    $$ R_t = r_t + \gamma_t \left[ (1 - \lambda_{t+1}) V_{t+1} + \lambda_{t+1} R_{t+1} \right] $$

    where t + 1 is the next unmasked token. Equal to `gae(...).returns`.

    Source: Sutton and Barto, Reinforcement Learning (2nd ed.), section 12.8.

    Args:
        values: V before each token.
        gamma: discount of the step that leaves a token.
        lambda_: one number, or one per token: weight of R against V of that token.
        bootstrap_values: value beyond the last token of each sequence; None is 0.

    Raises:
        ValueError: as `gae`.
    """
    check_token_inputs(mask, rewards=rewards, values=values)
    rewards, values = chosen("rewards", rewards, mask), chosen("values", values, mask)
    dtype = torch.promote_types(rewards.dtype, values.dtype)
    rewards, values = rewards.to(dtype), values.to(dtype)
    discounts = step_discounts(gamma, mask, holes, sequences, dtype)
    lambda_ = per_token_or_number("lambda_", lambda_, mask, dtype)
    beyond = finite_or_none("bootstrap_values", bootstrap_values)
    # What the token before sees, s_t = (1 - lambda_t) V_t + lambda_t R_t, is one recurrence, and
    # what it sees across a hole is the s that is carried; V and R apart would need one each.
    seen = linear_recurrence(
        lambda_ * discounts,
        torch.lerp(values, rewards, lambda_),
        mask,
        beyond=beyond,
        sequences=sequences,
    )
    following = next_in_sequence(seen, beyond=beyond, sequences=sequences)
    return torch.where(mask, rewards + discounts * following, 0.0)


def length_adaptive_lambda(
    mask: Bool[Tensor, "*shape"],
    *,
    alpha: float = 0.05,
    sequences: Segments | None = None,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "*shape"]:
    r"""Lambda for the policy's GAE that looks further ahead in longer responses.

    $$ \lambda = \max\left(0,\ 1 - \frac{1}{\alpha |y|} \right) $$

    The sum of the weights of GAE, 1 / (1 - lambda), is then proportional to the length. Where the
    paper's formula is negative, for responses shorter than 1 / alpha, lambda is 0.

    Source: VAPO (arXiv:2504.05118), length-adaptive GAE; alpha = 0.05.

    Args:
        alpha: weights of GAE sum up to alpha times the length.
        dtype: of the result, which has no gradient.

    Raises:
        ValueError: alpha is not positive.
    """
    check_token_inputs(mask)
    if not alpha > 0:
        raise ValueError(f"alpha is {alpha}, but must be positive; VAPO takes 0.05")
    ids, count = sequences_or_rows(mask, sequences)
    lengths = segment_reduce(mask.to(dtype), ids, count).clamp(min=1)
    return (1 - 1 / (alpha * lengths)).clamp(min=0)[ids]
