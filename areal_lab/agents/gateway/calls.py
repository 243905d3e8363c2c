"""A call in one form, whatever dialect it came in, and how it continues an earlier one.

body --Dialect.parse--> Call --prompt--> ChatRequest --Conversation--> Answer
Call, Answer --Dialect.reply, Dialect.events--> the reply, whole or streamed
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from areal_lab.agents.gateway.errors import ApiError
from areal_lab.agents.messages import ChatReply, ChatRequest, Message, Tool


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a client asks for, and how it wants the reply."""

    request: ChatRequest
    """Without `system` in front of its messages, and without what it continues."""
    system: tuple[Message, ...] = ()
    """Instructions that stand outside of the messages."""
    model: str = ""
    """The name that the client uses; the reply repeats it."""
    stream: bool = False
    stream_usage: bool = False
    """Whether the stream ends with the numbers of tokens."""
    logprobs: bool = False
    follows: str = ""
    """Id of the reply whose conversation this continues; the messages are the new ones only."""
    inherits: bool = False
    """Whether system and tools of the earlier call hold if this has none."""
    keep: bool = False
    """Whether a later call may continue this one."""
    notes: tuple[str, ...] = ()
    """What was asked for and is not served, in a header of the reply."""
    echo: Mapping[str, Any] = field(default_factory=dict)
    """Fields that the reply repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The replies to one call."""

    interaction_id: str
    created_s: int
    """Seconds since 1970."""
    replies: tuple[ChatReply, ...]
    """One for each of `n`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A conversation up to and including a reply, for calls that send only what is new."""

    system: tuple[Message, ...]
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The functions between one protocol and ours; all are pure."""

    name: str
    id_prefix: str
    """Of the ids of replies."""
    parse: Callable[[Mapping[str, Any]], Call]
    reply: Callable[[Call, Answer], dict[str, Any]]
    events: Callable[[Call, Answer], Iterator[bytes]]
    """A complete stream of server-sent events."""
    unknown: Callable[[str], ApiError]
    """The error of a call that follows a reply which is not kept."""
    error: Callable[[ApiError], dict[str, Any]]
    error_event: Callable[[ApiError], bytes]
    """An error after a stream has begun."""
    keep_alive: bytes
    """An event that clients ignore."""


def continued(call: Call, earlier: Turn) -> Call:
    """The call with what it continues in front of it."""
    request = replace(
        call.request,
        messages=earlier.messages + call.request.messages,
        tools=call.request.tools or (earlier.tools if call.inherits else ()),
    )
    return replace(
        call, request=request, system=call.system or (earlier.system if call.inherits else ())
    )


def prompt(call: Call) -> ChatRequest:
    """The whole request of a call that continues nothing, or was `continued`."""
    return replace(call.request, messages=call.system + call.request.messages)


def turn_after(call: Call, answer: Answer) -> Turn:
    """What a later call continues if it follows this answer."""
    return Turn(
        system=call.system,
        messages=(*call.request.messages, answer.replies[0].message),
        tools=call.request.tools,
    )
