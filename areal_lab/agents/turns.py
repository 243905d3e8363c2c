"""Sampled turns of a session, and the rows in which they are trained.

    turn 0 --bridge--> turn 1 --bridge--> turn 2        row 0 trains 0, 1, 2
                          '----bridge--> turn 3         row 1 trains 3; 0 and 1 are its context

Each sampled token is trained in exactly one row: in that of the first leaf behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple, TypeAlias

from areal_lab.agents.messages import Message
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
assistant_rewritten  the client sent another text, or other calls, than were sampled
history_shortened    messages before a sampled answer are gone
history_changed      messages of user or tools before a sampled answer are different
thinking_stripped    the template leaves out thinking that was sampled
template_rewrote     the template writes earlier messages in another way
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """Text of a prompt with stand-ins for sampled answers: enough to recognize it as a prefix."""

    characters: int
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One sampled answer, and what its prompt continues."""

    number: int
    """In order of creation."""
    parent: int | None
    """The turn whose tokens its prompt continues; None if the prompt was encoded from text."""
    follows: int | None
    """The turn before it in the conversation, for rewards: the parent, or what a fork left."""
    fork: Fork | None
    added: tuple[int, ...]
    """Tokens between the parent's answer and this one: the bridge; without a parent the prompt."""
    generated: Generated
    message: Message
    """The answer as it was shown."""
    outline: Outline
    prompt_tokens: int
    """Tokens of the whole prompt."""
    key: int
    """Hash of prompt and answer."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """The sampled tokens."""
        return tuple(token for segment in self.generated.segments for token in segment.tokens)


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
    """What the policy sampled and is trained here, and everything between: bridges, and answers
    that another row trains. It ends with a sampled token."""
    trained: tuple[TrainedTurn, ...]
    """The turns of the segments, in order."""
    finish_reason: FinishReason
    """Of the last trained turn."""

    @property
    def token_turns(self) -> tuple[int, ...]:
        """The turn of each trained token, in order: maps rewards of turns to tokens."""
        return tuple(turn for turn, tokens in self.trained for _ in range(tokens))


def turn_path(turns: Sequence[Turn], number: int | None) -> list[Turn]:
    """The turns whose tokens a prompt after turn `number` contains, in order; it is the last."""
    path = []
    while number is not None:
        path.append(turns[number])
        number = turns[number].parent
    return path[::-1]


def tokens_through(turns: Sequence[Turn], number: int | None) -> tuple[int, ...]:
    """Prompt and answer of a turn; no token without a turn."""
    path = turn_path(turns, number)
    return tuple(chain.from_iterable(part for turn in path for part in (turn.added, turn.tokens)))


def rows(turns: Sequence[Turn]) -> tuple[Row, ...]:
    """The rows that train every sampled token of a session once, in order of their leaves.

    A leaf without tokens (aborted before its first) has no row of its own.
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
