"""Numbers of tokens of an answer."""

from __future__ import annotations

from dataclasses import dataclass

from areal_lab.agents.gateway.calls import Answer
from areal_lab.agents.messages import ChatReply


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one answer; the prompt counts once, however many replies it has."""

    prompt: int
    cached: int
    """Of the prompt, whose keys and values were shared with another request."""
    generated: int
    """Of all replies, with those that are not shown."""


def generated_tokens(reply: ChatReply) -> int:
    """Tokens that were sampled for a reply."""
    return sum(len(segment.tokens) for segment in reply.generated.segments)


def usage_of(answer: Answer) -> Usage:
    """The tokens of an answer."""
    first = answer.replies[0]
    return Usage(
        prompt=first.prompt_tokens,
        cached=min(first.generated.cached_tokens, first.prompt_tokens),
        generated=sum(generated_tokens(reply) for reply in answer.replies),
    )
