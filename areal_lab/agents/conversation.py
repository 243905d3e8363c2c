"""The conversation of one session: requests in messages, turns in tokens.

ChatRequest --tree--> prompt tokens --sampler--> Generated --reader--> ChatReply
               ^                                     |
               '---------- recorded -----------------'
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from areal_lab.agents.gateway.conversation import PromptTooLong, Scores
from areal_lab.agents.messages import ChatReply, ChatRequest
from areal_lab.agents.replies import ReplyReader
from areal_lab.agents.returns import Returns, tree_returns
from areal_lab.agents.sampler import TurnSampler
from areal_lab.agents.session_tree import PlannedTurn, SessionTree
from areal_lab.agents.turns import Row as TreeRow
from areal_lab.agents.workflow import Row, Turn
from areal_lab.data.trajectory import Observation, SampleEnd, Segment
from areal_lab.engines.protocol import Generated, SamplingParams


class TreeConversation:
    """Samples and records the replies of one session (`gateway.conversation.Conversation`)."""

    def __init__(
        self,
        tree: SessionTree,
        reader: ReplyReader,
        sampler: TurnSampler,
        *,
        end_tokens: tuple[int, ...] = (),
        pinned: bool = True,
        returns: Returns = tree_returns,
    ) -> None:
        """Begin a session.

        Args:
            tree: of the session.
            reader: of the model.
            sampler: of the session.
            end_tokens: that end an answer (`ChatFormat.end_tokens`).
            pinned: whether the temperature and top-p that a client asks for are ignored: training
                takes log-probs to be of the distribution that the run samples from.
            returns: how rewards reach the turns before (`returns.STYLES`).
        """
        self.tree = tree
        self._reader = reader
        self._sampler = sampler
        self._end_tokens = end_tokens
        self._pinned = pinned
        self._returns = returns
        self._turn_of: dict[str, int] = {}
        self._replies: list[ChatReply] = []  # of each turn
        self.samplings: list[SamplingParams] = []
        """How each turn was sampled."""
        self._no_room = False
        self.scores = Scores()
        """Of the last export."""

    async def reply(self, request: ChatRequest) -> list[ChatReply]:
        """See `Conversation.reply`."""
        planned = self.tree.prompt(request)
        prompt = planned.prompt_tokens
        if len(prompt) >= self._sampler.context_tokens:
            self._no_room = True
            raise PromptTooLong(
                f"the prompt has {len(prompt)} tokens, but the context of "
                f"{self._sampler.context_tokens} must have room for one more"
            )
        sampling = self._sampling(request)
        tasks = [
            asyncio.ensure_future(self._sampler.turn(prompt, sampling))
            for _ in range(request.replies)
        ]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            # What was sampled is recorded, also if the client or the run has gone away.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for index, task in enumerate(tasks):
                if not task.cancelled() and task.exception() is None:
                    self._record(request, planned, task.result(), index)
            raise
        return [
            self._record(request, planned, task.result(), index) for index, task in enumerate(tasks)
        ]

    def prompt_tokens(self, request: ChatRequest) -> int:
        """See `Conversation.prompt_tokens`."""
        return self.tree.count(request)

    def rows(self, scores: Scores) -> list[dict[str, Any]]:
        """See `Conversation.rows`: a row for each reply, or for each branch."""
        self.scores = scores
        returns = self.returns(scores)
        if scores.style == "individual":
            return [self._reply_row(number, returns, scores) for number in range(len(returns))]
        return [
            {
                "prompt_tokens": list(row.prompt_tokens),
                "parts": _plain(row.parts),
                "turns": [
                    {"turn": turn, "tokens": tokens, "return": returns[turn]}
                    for turn, tokens in row.trained
                ],
                "finish_reason": row.finish_reason,
            }
            for row in self.tree.rows()
        ]

    def returns(self, scores: Scores) -> tuple[float | None, ...]:
        """The return of each turn; None if no reward reaches it."""
        rewards: list[float | None] = [None] * len(self.tree.turns)
        for name, reward in scores.rewards.items():
            if name in self._turn_of:
                rewards[self._turn_of[name]] = reward
        if scores.final is not None and rewards:
            rewards[-1] = scores.final + (rewards[-1] or 0.0)
        return self._returns(self.tree.follows, rewards, scores.discount)

    @property
    def end(self) -> SampleEnd:
        """Why the session ended: as its last turn, unless its context had no room for more."""
        turns = self.tree.turns
        if not turns:
            return "context" if self._no_room else "abort"
        last, reason = turns[-1], turns[-1].generated.finish_reason
        full = last.prompt_tokens + len(last.tokens) >= self._sampler.context_tokens
        return "context" if self._no_room or (reason == "length" and full) else reason

    def episode_rows(self, returns: tuple[float | None, ...], *, of_turns: bool) -> tuple[Row, ...]:
        """The rows to train on.

        Args:
            returns: of each turn.
            of_turns: whether turns are compared by their returns, and not samples.
        """
        rows = self.tree.rows()
        if not of_turns:
            return tuple(Row(prompt_tokens=row.prompt_tokens, parts=row.parts) for row in rows)
        return tuple(found for row in rows if (found := _rewarded(row, returns)) is not None)

    def notes(self, scores: Scores) -> tuple[Turn, ...]:
        """The turns, for logs and readers."""
        names = {number: name for name, number in self._turn_of.items()}
        return tuple(
            Turn(
                tokens=len(turn.tokens),
                tool=", ".join(call.name for call in turn.message.tool_calls),
                outcome=_outcome(self._replies[turn.number]),
                fork=turn.fork or "",
                reward=scores.rewards.get(names.get(turn.number, "")),
            )
            for turn in self.tree.turns
        )

    def _sampling(self, request: ChatRequest) -> SamplingParams:
        base = self._sampler.sampling
        asked: dict[str, Any] = {
            name: value
            for name, value in (("temperature", request.temperature), ("top_p", request.top_p))
            if value is not None and value != getattr(base, name)
        }
        if self._pinned:
            asked = {}
        most = base.max_new_tokens
        return replace(
            base,
            **asked,
            max_new_tokens=min(most, request.max_new_tokens or most),
            stop_token_ids=tuple(dict.fromkeys((*base.stop_token_ids, *self._end_tokens))),
            stop=tuple(dict.fromkeys((*base.stop, *request.stop))),
        )

    def _record(
        self, request: ChatRequest, planned: PlannedTurn, generated: Generated, index: int
    ) -> ChatReply:
        reply = self._reader.read(request, planned, generated, reply=index)
        turn = self.tree.record(planned, generated, reply.message)
        self._no_room = False
        self._turn_of[generated.request_id] = turn.number
        self._replies.append(reply)
        self.samplings.append(self._sampling(request))
        return reply

    def _reply_row(
        self, number: int, returns: tuple[float | None, ...], scores: Scores
    ) -> dict[str, Any]:
        turn = self.tree.turns[number]
        prompt = self.tree.prompt_of(number)
        return {
            "turn": number,
            "follows": turn.follows,
            "prompt_tokens": list(prompt),
            "parts": _plain(turn.generated.segments),
            "return": returns[number],
            "reward": scores.rewards.get(turn.generated.request_id),
            "undelivered": turn.generated.request_id in scores.undelivered,
            "fork": turn.fork,
            "message": turn.message.content,
            "tool_calls": [
                {"id": call.call_id, "name": call.name, "arguments": call.arguments}
                for call in turn.message.tool_calls
            ],
            "finish_reason": turn.generated.finish_reason,
        }


def _rewarded(row: TreeRow, returns: tuple[float | None, ...]) -> Row | None:
    """A row whose turns without a return are context: no reward is not a reward of 0.

    None if no turn has one.
    """
    parts: list[Segment | Observation] = []
    trained = iter(row.trained)
    turn = left = 0
    for part in row.parts:
        if isinstance(part, Segment):
            if left == 0:
                turn, left = next(trained)
            left -= len(part.tokens)
            parts.append(part if returns[turn] is not None else Observation(part.tokens))
        else:
            parts.append(part)
    found = tuple(value for turn, _ in row.trained if (value := returns[turn]) is not None)
    if not found:
        return None
    return Row(prompt_tokens=row.prompt_tokens, parts=tuple(parts), turn_returns=found)


def _outcome(reply: ChatReply) -> str:
    """Of the calls in a reply."""
    if reply.malformed_calls:
        return "malformed"
    if reply.unknown_calls:
        return "unknown"
    return "ok" if reply.message.tool_calls else ""


def _plain(parts: tuple[Segment | Observation, ...] | tuple[Segment, ...]) -> list[dict[str, Any]]:
    return [
        {"version": part.version, "tokens": list(part.tokens), "logprobs": list(part.logprobs)}
        if isinstance(part, Segment)
        else {"observation": list(part.tokens)}
        for part in parts
    ]
