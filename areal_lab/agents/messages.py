"""Conversations in one form for all protocols: messages, tools, a request, a reply.

    OpenAI chat, OpenAI responses, Anthropic messages --> ChatRequest --> ChatReply --> the same

Records have only what changes the prompt or the samples; the rest stays in the protocol's module.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from areal_lab.engines.protocol import Generated

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
"""`developer` messages are `system`, and `function` messages are `tool`."""

ChatFinish: TypeAlias = Literal["stop", "length", "tool_calls", "context"]
"""Reason for a reply's end: end token or stop string, its token limit, tool calls, or the
model's context, which has no room for another token."""

ToolChoice: TypeAlias = Literal["auto", "none", "required", "named"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call of the model."""

    call_id: str
    """Issued by us; the client sends it back with the call and with its result."""
    name: str
    arguments: str
    """JSON text: from the model in a reply; from the client, who may have rewritten it, in a
    request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation."""

    role: Role
    content: str = ""
    """Its text parts, joined."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls of an assistant message."""
    call_id: str = ""
    """Id of the call, in a tool result."""
    reasoning: str | None = None
    """Thinking text of an assistant; None if the client sent none, as many do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """JSON schema of its arguments."""


def message_characters(message: Message) -> int:
    """Characters of a message without thinking: most templates leave it out."""
    return len(message.content) + sum(
        len(call.name) + len(call.arguments) for call in message.tool_calls
    )


def tool_characters(tool: Tool) -> int:
    """Characters of the description of a tool."""
    return len(tool.name) + len(tool.description) + len(json.dumps(tool.parameters))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """Parsed chat request of a client: messages, tools, and sampling options."""

    messages: tuple[Message, ...]
    """The whole conversation so far."""
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = "auto"
    tool_name: str = ""
    """Tool of a `named` choice; calls of other tools are content."""
    max_new_tokens: int | None = None
    """None leaves it to the session."""
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    """Strings that end the reply and are hidden from it."""
    replies: int = 1
    """`n`: replies to the same messages; each is a separate branch."""
    seed: int | None = None
    top_logprobs: int = 0
    """Most likely tokens to report at the place of each token; served to evaluation keys."""
    json_schema: str = ""
    """JSON schema that the engine must enforce, for evaluation keys; empty for any text."""

    @property
    def characters(self) -> int:
        """Characters that a template reads, without thinking."""
        return sum(map(message_characters, self.messages)) + sum(map(tool_characters, self.tools))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """One reply, with the tokens behind it."""

    message: Message
    """Message of the assistant; its tool calls have ids."""
    finish: ChatFinish
    generated: Generated
    """Sampled tokens, before decoding."""
    prompt_tokens: int
    shown: tuple[tuple[str, float], ...] = ()
    """Text and log-prob of each token of the message, in order; a token inside a character has
    no text."""
    top: tuple[tuple[tuple[str, float], ...], ...] = ()
    """The most likely tokens at the place of each sampled token, if the request asks for them."""
    malformed_calls: int = 0
    """Texts that start like a tool call but cannot be parsed; they are content."""
    unknown_calls: int = 0
    """Calls of tools that the request does not have; they are content."""
    stop: str | None = None
    """Stop string that ended it, if any."""
