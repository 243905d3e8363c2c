"""The conversation of one session: requests in messages, turns in tokens.

ChatRequest --tree--> prompt tokens --sampler--> Generated --reader--> ChatReply
               ^                                     |
               '---------- recorded -----------------'
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final, TypeVar

from areal_lab.agents.gateway.calls import PromptTooLong, Scores
from areal_lab.agents.messages import ChatReply, ChatRequest
from areal_lab.agents.replies import ReplyReader
from areal_lab.agents.session_tree import PlannedTurn, SessionTree
from areal_lab.agents.turns import Returns, tree_returns
from areal_lab.agents.turns import Row as TreeRow
from areal_lab.agents.workflow import Row, TurnSampler
from areal_lab.data.problems import sample_seed
from areal_lab.data.trajectory import Observation, SampleEnd, Segment, Turn
from areal_lab.engines.protocol import Generated, SamplingParams

Result = TypeVar("Result")

MOST_STORED_CHARACTERS: Final = 64 * 2**20
"""Limit of the messages that one session keeps."""
_CHARACTERS_PER_TOKEN: Final = 16
"""Average over a whole prompt: English text and code have 3 to 5; 8 is rare."""
_MOST_MARKUP: Final = 65_536
"""Further characters, for short contexts with long tokens."""
MOST_AT_ONCE: Final = 16_384
"""Characters rendered and encoded on the event loop (about 10 ms); longer text goes to a thread."""
DRAFTING: Final = ThreadPoolExecutor(2, "draft")
"""Few threads: a tokenizer takes 200 bytes for each character."""


class TreeConversation:
    """Sample and record the replies of one session (`gateway.conversation.Conversation`)."""

    def __init__(
        self,
        tree: SessionTree,
        reader: ReplyReader,
        sampler: TurnSampler,
        *,
        end_tokens: tuple[int, ...] = (),
        pinned: bool = True,
        seeds: bool = False,
        returns: Returns = tree_returns,
    ) -> None:
        """Start a session."""
        self.tree = tree
        self._reader = reader
        self.sampler = sampler
        self._end_tokens = end_tokens
        self._pinned = pinned
        self._seeds = seeds
        self._returns = returns
        self._turn_of: dict[str, int] = {}
        self._replies: list[ChatReply] = []  # of each turn
        self.samplings: list[SamplingParams] = []
        """Sampling parameters of each turn."""
        self._no_room = False
        self.scores = Scores()
        """Scores of the last export."""

    async def reply(self, request: ChatRequest) -> list[ChatReply]:
        """See `Conversation.reply`."""
        planned = self.tree.prompt(request, await self._from_text(self.tree.draft, request))
        prompt = planned.prompt_tokens
        if len(prompt) >= self.sampler.context_tokens:
            self._no_room = True
            raise PromptTooLong(
                f"the prompt has {len(prompt)} tokens, but the context of "
                f"{self.sampler.context_tokens} must have room for one more"
            )
        sampling = self._sampling(request)
        tasks = [
            asyncio.ensure_future(self.sampler.turn(prompt, sampling, **self._seed(request, index)))
            for index in range(request.replies)
        ]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            # Record sampled tokens even if the client or the run is gone.
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

    async def prompt_tokens(self, request: ChatRequest) -> int:
        """See `Conversation.prompt_tokens`."""
        return await self._from_text(self.tree.count, request)

    async def _from_text(
        self, work: Callable[[ChatRequest], Result], request: ChatRequest
    ) -> Result:
        """Render and encode a request; in a thread if it has much text."""
        characters = request.characters
        self._check_size(request, characters)
        if characters <= MOST_AT_ONCE:
            return work(request)
        return await asyncio.get_running_loop().run_in_executor(DRAFTING, work, request)

    def _check_size(self, request: ChatRequest, characters: int) -> None:
        context_tokens = self.sampler.context_tokens
        most = context_tokens * _CHARACTERS_PER_TOKEN + _MOST_MARKUP
        thoughts = [len(message.reasoning or "") for message in request.messages]
        if (longest := max(characters, *thoughts, 0)) > most:
            self._no_room = True
            raise PromptTooLong(
                f"the messages have {longest:,} characters, but a context of {context_tokens:,} "
                f"tokens has room for {most:,} at most"
            )
        if self.tree.stored_characters + characters > MOST_STORED_CHARACTERS:
            raise ValueError(
                f"the messages of the session have {self.tree.stored_characters:,} characters, of "
                f"{MOST_STORED_CHARACTERS:,} at most; start another session"
            )

    def rows(self, scores: Scores) -> list[dict[str, Any]]:
        """See `Conversation.rows`: one row for each reply, or for each branch."""
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
        """Reason for the session's end: that of the last turn, or `context` without room for a
        token.
        """
        turns = self.tree.turns
        if not turns:
            return "context" if self._no_room else "abort"
        last, reason = turns[-1], turns[-1].generated.finish_reason
        full = last.prompt_tokens + len(last.tokens) >= self.sampler.context_tokens
        return "context" if self._no_room or (reason == "length" and full) else reason

    def episode_rows(self, returns: tuple[float | None, ...], *, of_turns: bool) -> tuple[Row, ...]:
        """Rows to train on; with `of_turns`, turns are compared by their returns, not samples."""
        rows = self.tree.rows()
        if not of_turns:
            return tuple(Row(prompt_tokens=row.prompt_tokens, parts=row.parts) for row in rows)
        return tuple(found for row in rows if (found := _rewarded(row, returns)) is not None)

    def notes(self, scores: Scores) -> tuple[Turn, ...]:
        """Turns, for logs and readers."""
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
        base = self.sampler.sampling
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
            json_schema=request.json_schema,
        )

    def _seed(self, request: ChatRequest, index: int) -> dict[str, int]:
        """Seed of a reply, if the client asks for one and it is used."""
        if request.seed is None or not self._seeds:
            return {}
        return {"seed": sample_seed(request.seed, "asked", 0, index)}

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
    """Turn the turns of a row without a return into context: no reward is not a reward of 0.

    None if no turn has a return.
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
    """Outcome of the calls in a reply."""
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
