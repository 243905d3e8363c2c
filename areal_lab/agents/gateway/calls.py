"""Calls in one form for all dialects, the protocol of conversations, and token counts.

What the gateway needs of whatever samples and records: one conversation for each session.

A conversation keeps the sampled tokens; the gateway keeps ids, rewards and what was delivered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeAlias

from areal_lab.agents.gateway.errors import ApiError
from areal_lab.agents.messages import ChatReply, ChatRequest, Message, Tool


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """Parsed request to complete plain texts."""

    prompts: tuple[str | tuple[int, ...], ...]
    """Texts, or tokens."""
    max_new_tokens: int | None
    """0 only scores the prompts; None is OpenAI's default, 16, or the longest that is served."""
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    replies: int = 1
    """Completions of each prompt."""
    seed: int | None = None
    echo: bool = False
    """True if the text begins with the prompt."""
    logprobs: int | None = None
    """Most likely tokens to report at each place; None reports no log-probs."""
    json_schema: str = ""
    """JSON schema that the engine must enforce; empty for any text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScore:
    """A token of a text with its log-prob."""

    text: str
    logprob: float | None
    """None for the first token of a sequence."""
    top: tuple[tuple[str, float], ...] = ()
    """The most likely tokens at its place."""
    visible: bool = True
    """False for an end token, which the text leaves out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One completion of a plain text."""

    text: str
    finish: Literal["stop", "length"]
    scores: tuple[TokenScore, ...]
    """Scores of the prompt, if it is echoed, and of the new tokens; empty if not requested."""
    prompt_tokens: int
    """0 for further completions of the same prompt."""
    cached_tokens: int
    generated_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Parsed request of a client, and the form of its reply."""

    request: ChatRequest
    """Request without `system` and without the continued conversation."""
    completion: CompletionRequest | None = None
    """Set if the request is about plain texts; `request` then has no messages."""
    system: tuple[Message, ...] = ()
    """Instructions outside of the messages."""
    model: str = ""
    """Model name that the client uses; the reply repeats it."""
    stream: bool = False
    stream_usage: bool = False
    """True if the stream ends with token counts."""
    logprobs: bool = False
    follows: str = ""
    """Id of the reply whose conversation this continues; `messages` has only the new ones."""
    inherits: bool = False
    """True if system and tools of the earlier call apply if this one has none."""
    keep: bool = False
    """True if a later call may continue this one."""
    instruction: str = ""
    """Text at the end of the first system message, which the client did not send as a message."""
    schema_field: str = ""
    """Field of the body that asks for JSON; empty if any text will do."""
    user: str = ""
    """Name of the client's own user, if it gives one."""
    notes: tuple[str, ...] = ()
    """Requested options that are not served, for a header of the reply."""
    echo: Mapping[str, Any] = field(default_factory=dict)
    """Fields that the reply repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Replies to one call."""

    interaction_id: str
    created_s: int
    """Seconds since 1970."""
    replies: tuple[ChatReply, ...]
    """One reply for each of `n`."""
    completions: tuple[Completion, ...] = ()
    """Completions of plain texts, by prompt; a call has either these or `replies`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A conversation up to and including a reply, for calls that send only new messages."""

    system: tuple[Message, ...]
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Pure functions that convert between one protocol and ours."""

    name: str
    id_prefix: str
    """Prefix of reply ids."""
    parse: Callable[[Mapping[str, Any]], Call]
    reply: Callable[[Call, Answer], dict[str, Any]]
    events: Callable[[Call, Answer], Iterator[bytes]]
    """Complete stream of server-sent events."""
    unknown: Callable[[str], ApiError]
    """Error of a call that follows a dropped reply."""
    error: Callable[[ApiError], dict[str, Any]]
    error_event: Callable[[ApiError], bytes]
    """Error within a stream."""
    keep_alive: bytes
    """Event that clients ignore."""


def continued(call: Call, earlier: Turn) -> Call:
    """Prepend the continued conversation to a call."""
    request = replace(
        call.request,
        messages=earlier.messages + call.request.messages,
        tools=call.request.tools or (earlier.tools if call.inherits else ()),
    )
    return replace(
        call, request=request, system=call.system or (earlier.system if call.inherits else ())
    )


def prompt(call: Call) -> ChatRequest:
    """Whole request of a call that continues nothing, or was `continued`."""
    messages = call.system + call.request.messages
    if call.instruction:
        # Many templates permit one system message only, and only as the first.
        first = messages[:1] if messages and messages[0].role == "system" else ()
        text = "\n\n".join([*(each.content for each in first if each.content), call.instruction])
        messages = (Message(role="system", content=text), *messages[len(first) :])
    return replace(call.request, messages=messages)


def turn_after(call: Call, answer: Answer) -> Turn:
    """Turn that a later call continues if it follows this answer."""
    return Turn(
        system=call.system,
        messages=(*call.request.messages, answer.replies[0].message),
        tools=call.request.tools,
    )


ExportStyle: TypeAlias = Literal["individual", "concat"]
"""AReaL's names: one row for each reply, or for each branch of the conversation."""


class PromptTooLong(ValueError):
    """The prompt leaves no room for a token of the reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Rewards of an ended session, and the style of its rows."""

    style: ExportStyle = "individual"
    discount: float = 1.0
    """Factor of a reward for each turn that it is carried back."""
    final: float | None = None
    """Reward of the whole session, for its last reply; None means none was set, which differs
    from 0."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards of single replies, by the `request_id` of the generation."""
    undelivered: frozenset[str] = frozenset()
    """Replies, by `request_id`, that no client received although they were sampled and recorded."""


class Conversation(Protocol):
    """Protocol between the gateway and the code that samples and records the replies of one
    session.
    """

    async def reply(self, request: ChatRequest) -> list[ChatReply]:
        """Sample `request.replies` replies; concurrent calls are branches.

        Waits while engines are paused or lost instead of failing: a client would send the request
        again, which is a second sample. If the call is canceled, it records the tokens sampled so
        far.

        Raises:
            PromptTooLong: no room for a token.
            ValueError: the request cannot be served; the message is for the agent's developer.
        """
        ...

    async def prompt_tokens(self, request: ChatRequest) -> int:
        """Number of prompt tokens of this request."""
        ...

    def rows(self, scores: Scores) -> list[dict[str, Any]]:
        """Recorded trajectories of an ended session as plain JSON."""
        ...


class Completing(Conversation, Protocol):
    """Conversation of an evaluation key, which completes plain texts, too, and keeps nothing."""

    async def complete(self, request: CompletionRequest) -> list[Completion]:
        """Complete all prompts, `request.replies` times each, in order."""
        ...


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one answer; the prompt counts once for several replies."""

    prompt: int
    cached: int
    """Prompt tokens whose keys and values were shared with another request."""
    generated: int
    """Tokens of all replies, including hidden ones."""


def generated_tokens(reply: ChatReply) -> int:
    """Tokens that were sampled for a reply."""
    return len(reply.generated.tokens)


def usage_of(answer: Answer) -> Usage:
    """Token counts of an answer."""
    if answer.completions:
        return Usage(
            prompt=sum(each.prompt_tokens for each in answer.completions),
            cached=sum(each.cached_tokens for each in answer.completions if each.prompt_tokens),
            generated=sum(each.generated_tokens for each in answer.completions),
        )
    first = answer.replies[0]
    return Usage(
        prompt=first.prompt_tokens,
        cached=min(first.generated.cached_tokens, first.prompt_tokens),
        generated=sum(generated_tokens(reply) for reply in answer.replies),
    )
