"""Conversations in one form, whatever protocol they came in: messages, tools, a request, a reply.

    OpenAI chat, OpenAI responses, Anthropic messages --> ChatRequest --> ChatReply --> the same

Records have what changes the prompt or what is sampled; the rest of a protocol stays with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from areal_lab.engines.protocol import Generated

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
"""`developer` messages are `system`, and `function` messages are `tool`."""

ChatFinish: TypeAlias = Literal["stop", "length", "tool_calls", "context"]
"""Why a reply ended: end token or stop string, its token limit, calls of tools, or the context of
the model, which leaves no room for a further token."""

ToolChoice: TypeAlias = Literal["auto", "none", "required", "named"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the model asked for."""

    call_id: str
    """Issued by us; the client sends it back with the call and with its result."""
    name: str
    arguments: str
    """JSON text: of the model in a reply; of the client, who may have rewritten it, in a
    request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation."""

    role: Role
    content: str = ""
    """Its text parts, joined."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Of an assistant."""
    call_id: str = ""
    """Of a tool's result: the call that it answers."""
    reasoning: str | None = None
    """Thinking text of an assistant; None if the client sent none, which many leave out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """JSON schema of its arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """What a client asks for: one reply, or several to the same messages."""

    messages: tuple[Message, ...]
    """The whole conversation so far."""
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = "auto"
    tool_name: str = ""
    """The tool of a `named` choice; calls of other tools are content."""
    max_new_tokens: int | None = None
    """None leaves it to the session."""
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    """Strings that end the reply and are not shown."""
    replies: int = 1
    """`n`: replies to the same messages; each is a branch of its own."""
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """One reply, with the tokens behind it."""

    message: Message
    """Of the assistant; its tool calls have ids."""
    finish: ChatFinish
    generated: Generated
    """As sampled, before it was decoded."""
    prompt_tokens: int
    shown: tuple[tuple[str, float], ...] = ()
    """Text and log-prob of each token that the message was made from, in order; a token inside a
    character has no text of its own."""
    malformed_calls: int = 0
    """Texts that begin like a call of a tool and are none; they are content."""
    unknown_calls: int = 0
    """Calls of tools that the request does not have; they are content."""
    stop: str | None = None
    """The stop string that ended it, if one did."""
