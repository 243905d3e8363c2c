"""Discounted returns of turns: how a reward reaches the turns before the one that got it.

    tree    turn 0 <- turn 1 <- turn 2      from each turn to the one that it follows
                   <- turn 3                turns 1 and 3 get nothing of each other
    linear  turn 0 <- turn 1 <- turn 2 <- turn 3      in order of creation, as in AReaL

A missing reward is None and stays one where no later turn has a reward: it is not a reward of 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

from areal_lab.config.suggest import nearest

Returns: TypeAlias = Callable[
    [Sequence[int | None], Sequence[float | None], float], tuple[float | None, ...]
]
"""`(the turn that each turn follows, rewards, discount) -> returns`."""


def tree_returns(
    parents: Sequence[int | None], rewards: Sequence[float | None], discount: float
) -> tuple[float | None, ...]:
    r"""Returns from each turn to the one that it follows; branches stay apart.

    $$ G_i = r_i + \gamma \, \mathrm{mean}_{c: p(c) = i} G_c $$

    The mean is over branches that have a return, so that a turn gains nothing from having many. A
    turn without a reward has what comes from its branches, or no return.

    Args:
        parents: the turn that each turn follows, an earlier one, or None.
        rewards: reward of each turn, or None.
        discount: gamma, in [0, 1].

    Raises:
        ValueError: a length, a parent, a reward or the discount is out of range.
    """
    _check(parents, rewards, discount)
    found: list[float | None] = list(rewards)
    branches: list[list[float]] = [[] for _ in rewards]
    for turn in reversed(range(len(rewards))):
        found[turn] = _discounted(rewards[turn], branches[turn], discount)
        value, parent = found[turn], parents[turn]
        if value is not None and parent is not None:
            branches[parent].append(value)
    return tuple(found)


def linear_returns(
    parents: Sequence[int | None], rewards: Sequence[float | None], discount: float
) -> tuple[float | None, ...]:
    r"""Returns in order of creation, whatever follows what.

    $$ G_i = r_i + \gamma G_{i + 1} $$

    It leaks: turns of sub-agents that run at the same time get each other's rewards. Right for one
    conversation without branches, where it equals `tree_returns`. Source: AReaL,
    `apply_reward_discount`.

    Args and Raises: as for `tree_returns`; the parents do not matter.
    """
    _check(parents, rewards, discount)
    found: list[float | None] = []
    for reward in reversed(rewards):
        later = found[-1] if found else None
        found.append(_discounted(reward, [] if later is None else [later], discount))
    return tuple(reversed(found))


STYLES: Final[Mapping[str, Returns]] = {"tree": tree_returns, "linear": linear_returns}
"""By the value of the setting `turn_discount_style`."""


def returns_named(style: str) -> Returns:
    """The function of a style.

    Raises:
        ValueError: in one line, if there is no such style.
    """
    found = STYLES.get(style)
    if found is None:
        raise ValueError(
            f"turn_discount_style is {style!r}, but must be one of {', '.join(STYLES)}"
            f"{nearest(style, list(STYLES))}"
        )
    return found


def _discounted(reward: float | None, later: Sequence[float], discount: float) -> float | None:
    if not later:
        return reward
    mean = math.fsum(later) / len(later)
    return (0.0 if reward is None else reward) + discount * mean


def _check(parents: Sequence[int | None], rewards: Sequence[float | None], discount: float) -> None:
    if len(parents) != len(rewards):
        raise ValueError(f"{len(parents)} parents for {len(rewards)} rewards, but must be as many")
    if not 0 <= discount <= 1:
        raise ValueError(f"discount is {discount}, but must be in [0, 1]")
    for turn, (parent, reward) in enumerate(zip(parents, rewards, strict=True)):
        if parent is not None and not 0 <= parent < turn:
            raise ValueError(f"turn {turn} follows turn {parent}, but must follow an earlier one")
        if reward is not None and not math.isfinite(reward):
            raise ValueError(f"the reward of turn {turn} is {reward}, but must be finite")
