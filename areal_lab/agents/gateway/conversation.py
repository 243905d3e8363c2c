"""What the gateway needs of whatever samples and records: one conversation for each session.

A conversation keeps the sampled tokens; the gateway keeps ids, rewards and what was delivered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from areal_lab.agents.messages import ChatReply, ChatRequest

ExportStyle: TypeAlias = Literal["individual", "concat"]
"""AReaL's names: a row for each reply, or for each branch of the conversation."""


class PromptTooLong(ValueError):
    """The prompt leaves no room for a token of the reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The rewards of an ended session, and how to make rows of it."""

    style: ExportStyle = "individual"
    discount: float = 1.0
    """What a reward is multiplied with for each turn that it is carried back."""
    final: float | None = None
    """Reward of the session as a whole, for its last reply; None if there is none, which is
    something else than 0."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards of single replies, by the `request_id` of what was generated."""
    undelivered: frozenset[str] = frozenset()
    """Replies, by `request_id`, that no client has received: sampled, recorded, and unseen."""


class Conversation(Protocol):
    """Samples and records the replies of one session."""

    async def reply(self, request: ChatRequest) -> list[ChatReply]:
        """Sample `request.replies` replies; concurrent calls are branches.

        Waits while engines are paused or lost, rather than fail: a client would send the request
        again, which is a second sample. If the call is canceled, it records what was sampled.

        Raises:
            PromptTooLong: there is no room for a token.
            ValueError: the request cannot be served; the message is for the agent's developer.
        """
        ...

    def prompt_tokens(self, request: ChatRequest) -> int:
        """Tokens of the prompt that this request would have."""
        ...

    def rows(self, scores: Scores) -> list[dict[str, Any]]:
        """The recorded trajectories as plain JSON, once the session has ended."""
        ...
