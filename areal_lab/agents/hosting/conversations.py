"""Conversations of one model's sessions, and the samples that they become.

Serving (settings) + model folder --> Conversations --open--> TreeConversation of a session
                                                                    | rewards
                                                                    v
                                                                 Episode
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from areal_lab.agents.chat_format import ChatFormat
from areal_lab.agents.conversation import TreeConversation
from areal_lab.agents.gateway.sessions import Limits
from areal_lab.agents.replies import ReplyReader
from areal_lab.agents.session_tree import SessionTree
from areal_lab.agents.template import load_template
from areal_lab.agents.turns import returns_named
from areal_lab.agents.workflow import Episode, TurnSampler
from areal_lab.data.tokenize import TextCodec
from areal_lab.rewards.service import RewardError, RewardOutcome

RUN_REQUESTS: Final = 8192
"""Concurrent calls in a run; its own limits apply first (`max_concurrent_rollouts`)."""
_LIMITS: Final = Limits()
_ANY: Final = 2**31
"""Unlimited open sessions: a run limits its samples itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """Settings of the sessions of a gateway, checked on creation."""

    tool_call_parser: str = "auto"
    """Grammar of tool calls (`tool_calls.GRAMMARS`); `auto` takes the one that the template
    writes."""
    template: str = ""
    """File of a chat template, instead of the model's."""
    describe_tools: bool = True
    """True if tools are described in the system message if the template ignores them."""
    turn_discount: float = 1.0
    """Discount of a reward from a turn to the one before it."""
    turn_discount_style: str = "tree"
    """Definition of the turn before it (`returns.STYLES`)."""
    pinned: bool = True
    """True if temperature and top-p of clients are ignored."""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not 0 <= self.turn_discount <= 1:
            raise ValueError(f"turn_discount is {self.turn_discount}, but must be in [0, 1]")
        returns_named(self.turn_discount_style)

    def check_model(self, model: Path) -> None:
        """Reject a model whose sessions cannot be served with these settings."""
        Conversations(model, self).reader(1)


def run_limits(
    *,
    requests: int = RUN_REQUESTS,
    session_requests: int = _LIMITS.session_requests,
    session_timeout_s: float = _LIMITS.session_timeout_s,
    reward_timeout_s: float = _LIMITS.reward_timeout_s,
) -> Limits:
    """Limits of the gateway of a run, by the names of its settings."""
    return Limits(
        open_sessions=_ANY,
        requests=requests,
        session_requests=session_requests,
        session_timeout_s=session_timeout_s,
        reward_timeout_s=reward_timeout_s,
    )


def check_gateway(serving: asyncio.Task[None]) -> None:
    """Raise RewardError if the gateway of a run has stopped: no agent can recover from that."""
    if serving.done():
        error = None if serving.cancelled() else serving.exception()
        raise RewardError(f"the gateway of the run has ended: {error!r}")


class Conversations:
    """Factory of the conversations of one model."""

    def __init__(self, model: Path, serving: Serving) -> None:
        """Read the model's tokenizer and chat template."""
        self.codec = TextCodec.load(model)
        self._form = ChatFormat(
            load_template(model, serving.template or None),
            self.codec,
            describe_tools=serving.describe_tools,
        )
        self._serving = serving
        self._readers: dict[int, ReplyReader] = {}

    @property
    def opens_thinking(self) -> bool:
        """True if prompts end inside of the thinking, which a schema does not allow."""
        return self._form.facts.opens_thinking

    def open(self, sampler: TurnSampler, name: str, *, seeds: bool = False) -> TreeConversation:
        """Create the conversation of a new session."""
        return TreeConversation(
            SessionTree(self._form, now=datetime.now(UTC), session=name),
            self.reader(sampler.context_tokens),
            sampler,
            end_tokens=self._form.end_tokens,
            pinned=self._serving.pinned,
            seeds=seeds,
            returns=returns_named(self._serving.turn_discount_style),
        )

    def reader(self, context_tokens: int) -> ReplyReader:
        """Reader of replies in a context of this size."""
        reader = self._readers.get(context_tokens)
        if reader is None:
            reader = ReplyReader(
                self._form, grammar=self._serving.tool_call_parser, context_tokens=context_tokens
            )
            self._readers[context_tokens] = reader
        return reader


def episode_of(
    conversation: TreeConversation, outcome: RewardOutcome, *, of_turns: bool
) -> Episode:
    """Build the sample of an exported session; with `of_turns`, turns are compared by their
    returns.
    """
    scores = conversation.scores
    return Episode(
        rows=conversation.episode_rows(conversation.returns(scores), of_turns=of_turns),
        outcome=outcome,
        end=conversation.end,
        turns=conversation.notes(scores),
        tools=conversation.tree.tools,
    )
