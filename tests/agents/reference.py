"""A slow session: compares every request with the whole history of every turn, message by message.

For ChatML as SmolLM2 writes it, in texts that spell no special token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from areal_lab.agents.messages import Message, Tool
from tests.agents import smollm2


def chatml(messages: Sequence[Message]) -> str:
    return "".join(f"<|im_start|>{m.role}\n{text(m)}<|im_end|>\n" for m in messages)


def text(message: Message) -> str:
    """The content, with calls in the form that SmolLM2 was measured to write."""
    written = [message.content] if message.content else []
    for name, arguments in calls(message):
        one = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        written.append(f"<tool_call>{one}</tool_call>")
    return "\n".join(written)


def encoded(text: str) -> tuple[int, ...]:
    return smollm2.codec().encode(text)


@dataclass(frozen=True)
class Entry:
    message: Message
    sampled: bool


@dataclass(frozen=True)
class Known:
    """A recorded turn."""

    tools: tuple[Tool, ...]
    history: tuple[Entry, ...]
    """Down to its answer."""
    prompt: tuple[int, ...]
    sampled: tuple[int, ...]


@dataclass
class SlowSession:
    turns: list[Known] = field(default_factory=list)

    def candidates(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """The turns with the longest history that the messages begin with."""
        found = [
            number
            for number, turn in enumerate(self.turns)
            if turn.tools == tuple(tools)
            and len(turn.history) <= len(messages)
            and all(same(own, sent) for own, sent in zip(turn.history, messages, strict=False))
        ]
        longest = max((len(self.turns[number].history) for number in found), default=0)
        return [number for number in found if len(self.turns[number].history) == longest]

    def prompt(self, messages: Sequence[Message], parent: int | None) -> tuple[int, ...]:
        """The prompt of a request that continues a turn, or none."""
        if parent is None:
            return encoded(chatml(messages) + "<|im_start|>assistant\n")
        turn = self.turns[parent]
        new = messages[len(turn.history) :]
        end = "" if turn.sampled[-1:] == (smollm2.END,) else "<|im_end|>"
        bridge = f"{end}\n{chatml(new)}<|im_start|>assistant\n"
        return turn.prompt + turn.sampled + encoded(bridge)

    def record(
        self,
        *,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        parent: int | None,
        prompt: tuple[int, ...],
        sampled: tuple[int, ...],
        shown: Message,
    ) -> None:
        before = () if parent is None else self.turns[parent].history
        new = [Entry(message, sampled=False) for message in messages[len(before) :]]
        history = (*before, *new, Entry(shown, sampled=True))
        self.turns.append(Known(tuple(tools), history, prompt, sampled))


def same(own: Entry, sent: Message) -> bool:
    """Whether a message is the one that is known, allowing for what clients do to answers."""
    known = own.message
    if (known.role, known.call_id) != (sent.role, sent.call_id):
        return False
    if sent.reasoning and sent.reasoning.strip() != (known.reasoning or "").strip():
        return False
    if not own.sampled:
        return known.content == sent.content and calls(known) == calls(sent)
    stripped = known.content.strip() == sent.content.strip()
    ids = [call.call_id for call in known.tool_calls]
    if ids and ids == [call.call_id for call in sent.tool_calls]:
        return stripped or not sent.content.strip()
    return stripped and calls(known) == calls(sent)


def calls(message: Message) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for call in message.tool_calls:
        try:
            found.append((call.name, json.loads(call.arguments)))
        except ValueError:
            found.append((call.name, call.arguments.strip()))
    return found
