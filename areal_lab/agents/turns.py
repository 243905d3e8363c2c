"""Sampled turns of a session: the rows in which they are trained, and their discounted returns.

Discounted returns of turns: how a reward reaches the turns before the one that got it.

    tree    turn 0 <- turn 1 <- turn 2      from each turn to the one that it follows
                   <- turn 3                turns 1 and 3 get nothing of each other
    linear  turn 0 <- turn 1 <- turn 2 <- turn 3      in order of creation, as in AReaL

A missing reward is None and stays one where no later turn has a reward: it is not a reward of 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, Literal, NamedTuple, TypeAlias

from areal_lab.agents.messages import Message
from areal_lab.config.unknown import nearest
from areal_lab.data.trajectory import FinishReason, Observation, Segment
from areal_lab.engines.protocol import Generated

Fork: TypeAlias = Literal[
    "system_changed",
    "tools_changed",
    "assistant_rewritten",
    "history_shortened",
    "history_changed",
    "thinking_stripped",
    "template_rewrote",
]
"""Why a prompt does not continue the turn before it.

system_changed       other instructions over the same messages (a hand-off)
tools_changed        other tools over the same messages
assistant_rewritten  the client sent other text or calls than were sampled
history_shortened    messages before a sampled response are gone
history_changed      messages of user or tools before a sampled response are different
thinking_stripped    the template leaves out sampled thinking
template_rewrote     the template writes earlier messages differently"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """Rendered prompt with placeholders for sampled responses: enough to recognize it as a
    prefix.
    """

    characters: int
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One sampled response, and the turn that its prompt continues."""

    number: int
    """Index in order of creation."""
    parent: int | None
    """Turn whose tokens its prompt continues; None if the prompt was encoded from text."""
    follows: int | None
    """Previous turn of the conversation, for rewards: the parent, or the turn before a fork."""
    fork: Fork | None
    added: tuple[int, ...]
    """Tokens between the parent's response and this one: the bridge; without a parent the
    prompt."""
    generated: Generated
    message: Message
    """The response as it was shown."""
    outline: Outline
    prompt_tokens: int
    """Tokens of the whole prompt."""
    key: int
    """Hash of prompt and response."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """The sampled tokens."""
        return self.generated.tokens


class TrainedTurn(NamedTuple):
    """A turn that a row trains."""

    turn: int
    tokens: int
    """Number of its sampled tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sequence to train on."""

    prompt_tokens: tuple[int, ...]
    parts: tuple[Segment | Observation, ...]
    """Sampled tokens that this row trains, and everything between them: bridges, and responses
    that another row trains. It ends with a sampled token."""
    trained: tuple[TrainedTurn, ...]
    """Turns of the segments, in order."""
    finish_reason: FinishReason
    """Finish reason of the last trained turn."""

    @property
    def token_turns(self) -> tuple[int, ...]:
        """Turn of each trained token, in order: maps rewards of turns to tokens."""
        return tuple(turn for turn, tokens in self.trained for _ in range(tokens))


def turn_path(turns: Sequence[Turn], number: int | None) -> list[Turn]:
    """Turns whose tokens a prompt after turn `number` contains, in order; that turn is the last."""
    path = []
    while number is not None:
        path.append(turns[number])
        number = turns[number].parent
    return path[::-1]


def tokens_through(turns: Sequence[Turn], number: int | None) -> tuple[int, ...]:
    """Prompt and response of a turn; empty without a turn."""
    path = turn_path(turns, number)
    return tuple(chain.from_iterable(part for turn in path for part in (turn.added, turn.tokens)))


def rows(turns: Sequence[Turn]) -> tuple[Row, ...]:
    """Rows that train every sampled token of a session once, in order of their leaves.

    A leaf without tokens (aborted before its first) gets no row.
    """
    inner = {turn.parent for turn in turns}
    trained: set[int] = set()
    found = []
    for leaf in turns:
        if leaf.number in inner:
            continue
        path = turn_path(turns, leaf.number)
        new = [turn for turn in path if turn.number not in trained and turn.tokens]
        if new:
            found.append(_row(path, {turn.number for turn in new}))
            trained.update(turn.number for turn in new)
    return tuple(found)


def _row(path: Sequence[Turn], new: set[int]) -> Row:
    parts: list[Segment | Observation] = []
    context: list[int] = []
    for turn in path:
        if turn is not path[0]:
            context += turn.added
        if turn.number not in new:
            context += turn.tokens
            continue
        if context:
            parts.append(Observation(tuple(context)))
            context = []
        parts += turn.generated.segments
    here = [turn for turn in path if turn.number in new]
    return Row(
        prompt_tokens=path[0].added,
        parts=tuple(parts),
        trained=tuple(TrainedTurn(turn.number, len(turn.tokens)) for turn in here),
        finish_reason=here[-1].generated.finish_reason,
    )


Returns: TypeAlias = Callable[
    [Sequence[int | None], Sequence[float | None], float], tuple[float | None, ...]
]
"""`(previous turn of each turn, rewards, discount) -> returns`."""


def tree_returns(
    parents: Sequence[int | None], rewards: Sequence[float | None], discount: float
) -> tuple[float | None, ...]:
    r"""Returns from each turn to the one that it follows; branches stay apart.

    $$ G_i = r_i + \gamma \, \mathrm{mean}_{c: p(c) = i} G_c $$

    The mean is over branches that have a return, so many branches are no advantage. A turn without
    a reward has the return of its branches, or none.

    Args:
        parents: the turn that each turn follows, an earlier one, or None.
        rewards: reward of each turn, or None.
        discount: gamma, in [0, 1].
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

    Concurrent sub-agents get each other's rewards. Right for one conversation without branches,
    where it equals `tree_returns`. Source: AReaL, `apply_reward_discount`. The parents are ignored.
    """
    _check(parents, rewards, discount)
    found: list[float | None] = []
    for reward in reversed(rewards):
        later = found[-1] if found else None
        found.append(_discounted(reward, [] if later is None else [later], discount))
    return tuple(reversed(found))


STYLES: Final[Mapping[str, Returns]] = {"tree": tree_returns, "linear": linear_returns}
"""Functions by the value of the setting `turn_discount_style`."""


def returns_named(style: str) -> Returns:
    """Return the function of a style."""
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
