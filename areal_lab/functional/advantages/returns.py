"""Returns: discounted sums of the rewards from each token on.

    terminal_rewards               R [N] at the last chosen token of each sequence
    discounted_returns             sum over what follows, discounted per token
    reinforce_plus_plus_returns    the two of them, with a reward per token added
    turn_returns                   discounted per turn, one number for all tokens of a turn

Padded `[N, T]` and packed `[T]` alike. Results are ordinary functions of the rewards: gradients
flow, and nothing is detached (policy losses detach their advantages themselves). Masked rewards
(NaN too) do not matter, and results are 0 where masked.

Treatment of gaps (masked tokens inside a response) in returns:

mask                 1 1 0 0 1 1 1 . .      0: a tool's output; .: padding
carry_over_holes     |<----------|          the hole is not there
restart_at_holes     |<| . . |<--|          each run of chosen tokens by itself
last_unmasked        - - - - - - 1 - -      where a reward for the sequence belongs
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from areal_lab.functional.advantages.recurrence import broadcast_to_tokens, linear_recurrence
from areal_lab.functional.checks import (
    check_finite,
    check_floating,
    check_same_shape,
    check_token_inputs,
    count_known,
    wide,
)
from areal_lab.functional.segments import (
    Segments,
    numbered,
    segment_reduce,
    sequence_edges,
    sequences_or_rows,
    unmasked_runs,
)

Discount: TypeAlias = float | Tensor
"""A number in 0 .. 1 for all tokens, or one per token."""


def terminal_rewards(
    rewards: Float[Tensor, "*sequences"],
    mask: Bool[Tensor, "*shape"],
    *,
    sequences: Segments | None = None,
) -> Float[Tensor, "*shape"]:
    """Put the reward of each sequence at its last unmasked token, 0 everywhere else.

    The reward of a sequence without an unmasked token is lost, NaN too. The tokens of a sequence
    need not be neighbors.

    Args:
        rewards: one per sequence: `[N]` for `[N, T]` tokens, a scalar for one sequence `[T]`.

    Source: definition; a reward of the whole response, as in InstructGPT (arXiv:2203.02155).

    Raises:
        ValueError: there is not one reward per sequence, rewards are not floating, or the reward
            of a sequence with an unmasked token is NaN or infinite.
    """
    return placed_at_end("rewards", rewards, mask, sequences)


def carry_over_holes(
    mask: Bool[Tensor, "*shape"],  # noqa: ARG001 - part of the signature
    sequences: Segments | None = None,  # noqa: ARG001 - part of the signature
) -> None:
    """Leave holes out: the token before a hole is followed by the token after it.

    Source: GAE of AReaL, verl and NeMo-RL.
    """
    return


def discounted_returns(
    rewards: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    gamma: Discount = 1.0,
    bootstrap_values: Float[Tensor, "*sequences"] | None = None,
    holes: Holes = carry_over_holes,
    sequences: Segments | None = None,
) -> Float[Tensor, "*shape"]:
    r"""Discounted sum of the rewards from each token on.

    $$ R_t = r_t + \gamma_t R_{t+1} $$

    where t + 1 is the next unmasked token: a hole takes no time.

    Source: Sutton and Barto, Reinforcement Learning (2nd ed.), section 3.3.

    Args:
        rewards: r of each token, for the token itself; gets a gradient.
        mask: True = the policy chose this token. Rewards elsewhere do not count.
        gamma: discount of the step that leaves a token; one number, or one per token.
        bootstrap_values: estimated return beyond the last token of each sequence, for responses
            that were cut off; None is 0, the sequence has ended. Gets a gradient.

    Raises:
        ValueError: shapes differ, rewards are not floating, an unmasked reward or a bootstrap
            value is NaN or infinite, or gamma is not in 0 .. 1.
    """
    rewards = chosen("rewards", rewards, mask)
    discounts = step_discounts(gamma, mask, holes, sequences, rewards.dtype)
    beyond = finite_or_none("bootstrap_values", bootstrap_values)
    returns = linear_recurrence(discounts, rewards, mask, beyond=beyond, sequences=sequences)
    return torch.where(mask, returns, 0.0)


def reinforce_plus_plus_returns(
    rewards: Float[Tensor, "*sequences"],
    mask: Bool[Tensor, "*shape"],
    *,
    token_rewards: Float[Tensor, "*shape"] | None = None,
    gamma: Discount = 1.0,
    holes: Holes = carry_over_holes,
    sequences: Segments | None = None,
) -> Float[Tensor, "*shape"]:
    r"""Return of REINFORCE++: a reward at the end, usually minus a KL penalty at each token.

    $$ R_t = \sum_{s \ge t} \gamma^{s-t} \left( r_s + [s = |y|]\, R \right) $$

    Its advantages are these returns whitened over all tokens of the batch.

    Source: REINFORCE++ (arXiv:2501.03262).

    Args:
        rewards: R of each sequence; gets a gradient.
        token_rewards: r of each token, such as -beta times a KL estimate; None is 0. Gets a
            gradient.
        gamma: discount of a token; one number, or one per token.

    Raises:
        ValueError: as `terminal_rewards` and `discounted_returns`.
    """
    total = terminal_rewards(rewards, mask, sequences=sequences)
    if token_rewards is not None:
        total = total + chosen("token_rewards", token_rewards, mask)
    return discounted_returns(total, mask, gamma=gamma, holes=holes, sequences=sequences)


def turn_returns(
    rewards: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    gamma: float = 1.0,
    turns: Segments | None = None,
    sequences: Segments | None = None,
) -> Float[Tensor, "*shape"]:
    r"""Return of each turn, discounted from turn to turn, the same for all its tokens.

    $$ R_k = \sum_{t \in k} r_t + \gamma R_{k+1} $$

    A turn without an unmasked token is ignored and costs no discount.

    Source: turn-level discount of ROLL (arXiv:2506.06122), its agentic REINFORCE.

    Args:
        rewards: r of each token; its position within a turn does not matter. Gets a gradient.
        gamma: discount of a turn.
        turns: turn of each token, the tokens of a turn being neighbors; numbers may start over in
            each sequence. None takes the runs of unmasked tokens, so that every hole ends a turn.

    Raises:
        ValueError: shapes differ, rewards are not floating, an unmasked reward is NaN or infinite,
            or gamma is not in 0 .. 1.
    """
    check_unit("gamma", gamma)
    rewards = chosen("rewards", rewards, mask)
    if turns is None:
        turns = unmasked_runs(mask, sequences)
    starts = sequence_edges(mask, turns, last=False) | sequence_edges(mask, sequences, last=False)
    turns = numbered(starts)
    one = torch.ones((), dtype=rewards.dtype, device=rewards.device)
    discounts = torch.where(last_unmasked(mask, turns), gamma * one, one)
    returns = linear_recurrence(discounts, rewards, mask, sequences=sequences)
    # A masked first token holds what is carried past it, the return of the first unmasked one.
    first = torch.where(starts, returns, 0.0)
    constant = linear_recurrence(1.0, first, sequences=turns, reverse=False)
    return torch.where(mask, constant, 0.0)


def placed_at_end(name: str, rewards: Tensor, mask: Tensor, sequences: Segments | None) -> Tensor:
    """`terminal_rewards` for an argument with another name."""
    check_token_inputs(mask)
    per_token = broadcast_to_tokens(name, floating(name, rewards), mask, sequences)
    placed = torch.where(last_unmasked(mask, sequences), per_token, 0.0)
    check_finite(name, placed)
    return placed


def chosen(name: str, values: Tensor, mask: Tensor) -> Tensor:
    """Values of the unmasked tokens, 0 elsewhere, in float32 at least; refused unless finite."""
    check_token_inputs(mask, **{name: values})
    kept = torch.where(mask, floating(name, values), 0.0)
    check_finite(name, kept)
    return kept


def finite_or_none(name: str, values: Tensor | None) -> Tensor | None:
    """Values in float32 at least, refused unless floating and finite; None stays None."""
    if values is None:
        return None
    values = floating(name, values)
    check_finite(name, values)
    return values


def floating(name: str, values: Tensor) -> Tensor:
    """Values in float32 at least: sums over a long response lose too much in bfloat16.

    Raises:
        ValueError: the values are not floating.
    """
    check_floating(name, values)
    return wide(values)


def step_discounts(
    gamma: Discount,
    mask: Tensor,
    holes: Holes,
    sequences: Segments | None,
    dtype: torch.dtype,
) -> Discount:
    """Discount of the step that leaves each token: 0 where the holes end an episode."""
    gamma = per_token_or_number("gamma", gamma, mask, dtype)
    cut = holes(mask, sequences)
    if cut is None:
        return gamma
    if not isinstance(gamma, Tensor):
        gamma = torch.full((), gamma, dtype=dtype, device=mask.device)
    return torch.where(cut, 0.0, gamma)


def per_token_or_number(name: str, value: Discount, mask: Tensor, dtype: torch.dtype) -> Discount:
    """A checked number, or the unmasked entries of a tensor, checked where they are known."""
    if isinstance(value, Tensor):
        check_same_shape(name, value, "mask", mask)
        value = torch.where(mask, value, 0.0)
        outside = count_known(~((value >= 0) & (value <= 1)))
        if outside:
            raise ValueError(
                f"{name} (shape {tuple(value.shape)}) has {outside} entries outside 0 .. 1; "
                "1 does not discount at all"
            )
        return value.to(dtype)
    check_unit(name, value)
    return value


def check_unit(name: str, value: float, meaning: str = "1 does not discount at all") -> None:
    """Refuse a number outside 0 .. 1.

    Raises:
        ValueError: the number is outside, or NaN.
    """
    if not (math.isfinite(value) and 0 <= value <= 1):
        raise ValueError(f"{name} is {value}, but must be in 0 .. 1; {meaning}")


Holes: TypeAlias = Callable[[Tensor, Segments | None], Tensor | None]
"""`(mask, sequences) -> True at tokens after which nothing counts`; None is True nowhere."""


def restart_at_holes(
    mask: Bool[Tensor, "*shape"], sequences: Segments | None = None
) -> Bool[Tensor, "*shape"]:
    """Cut at holes: the token before a hole is the last of its episode, with nothing after it.

    Masked tokens after the last chosen one (padding) are no hole, so what lies beyond the
    sequence still counts.

    Source: REINFORCE++ of SkyRL.
    """
    last = last_unmasked(mask, sequences)
    followed = pad(mask[..., 1:], (0, 1)) if mask.numel() else mask
    return mask & ~followed & ~last


def last_unmasked(
    mask: Bool[Tensor, "*shape"], segments: Segments | None = None
) -> Bool[Tensor, "*shape"]:
    """True at the last unmasked token of each segment; nowhere in one without such a token.

    Args:
        segments: sequences or turns; their tokens need not be neighbors. None takes rows.

    Source: definition.

    Raises:
        ValueError: as `sequences_or_rows`.
    """
    ids, count = sequences_or_rows(mask, segments)
    order = torch.arange(mask.numel(), device=mask.device).reshape(mask.shape)
    last = segment_reduce(order, ids, count, mask=mask, reduce="max")
    return mask & (order == last[ids])
