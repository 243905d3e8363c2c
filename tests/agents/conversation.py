"""Short ways to write messages, tools and what was sampled."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise

from areal_lab.agents.messages import ChatReply, ChatRequest, Message, Tool, ToolCall
from areal_lab.agents.replies import ReplyReader
from areal_lab.agents.session_tree import PlannedTurn, SessionTree
from areal_lab.agents.turns import Turn
from areal_lab.data.trajectory import FinishReason, Segment
from areal_lab.engines.protocol import Generated
from tests.agents.templates import chat_format

NOW = datetime(2026, 3, 9, 12)
ADD = Tool(
    name="add",
    description="Add two numbers.",
    parameters={"type": "object", "properties": {"a": {"type": "integer"}}},
)


def system(text: str) -> Message:
    return Message(role="system", content=text)


def user(text: str) -> Message:
    return Message(role="user", content=text)


def assistant(text: str = "", *calls: ToolCall, reasoning: str | None = None) -> Message:
    return Message(role="assistant", content=text, tool_calls=calls, reasoning=reasoning)


def result(text: str, call_id: str) -> Message:
    return Message(role="tool", content=text, call_id=call_id)


def generated(
    tokens: Sequence[int], finish: FinishReason = "stop", *, cuts: Sequence[int] = ()
) -> Generated:
    """Sampled tokens; a new version begins at each cut."""
    edges = [0, *sorted(set(cuts) - {0, len(tokens)}), len(tokens)]
    segments = [
        Segment(
            tokens=tuple(tokens[start:end]),
            logprobs=tuple(-0.001 * (1 + index) for index in range(start, end)),
            version=version,
        )
        for version, (start, end) in enumerate(pairwise(edges))
        if end > start
    ]
    return Generated(
        request_id="r",
        segments=tuple(segments),
        finish_reason=finish,
        retractions=0,
        cached_tokens=0,
    )


class Session:
    """A session tree with its reader: a model whose answers the test writes."""

    def __init__(self, name: str = "SMOLLM2", *, context_tokens: int = 100_000) -> None:
        self.form = chat_format(name)
        self.tree = SessionTree(self.form, now=NOW, session="s")
        self.reader = ReplyReader(self.form, grammar="hermes", context_tokens=context_tokens)

    def ask(self, *messages: Message, tools: Sequence[Tool] = (), replies: int = 1) -> PlannedTurn:
        return self.tree.prompt(ChatRequest(messages=messages, tools=tuple(tools), replies=replies))

    def answer(
        self,
        planned: PlannedTurn,
        sampled: str | Sequence[int],
        *,
        tools: Sequence[Tool] = (),
        finish: FinishReason = "stop",
        stop: Sequence[str] = (),
        reply: int = 0,
    ) -> tuple[Turn, ChatReply]:
        """Record an answer: a text, which an end token follows, or tokens as they are."""
        tokens = (
            (*self.form.codec.encode(sampled), *self.form.end_tokens[:1])
            if isinstance(sampled, str)
            else tuple(sampled)
        )
        request = ChatRequest(messages=(), tools=tuple(tools), stop=tuple(stop))
        read = self.reader.read(request, planned, generated(tokens, finish), reply=reply)
        return self.tree.record(planned, read.generated, read.message), read

    def turn(
        self, *messages: Message, sampled: str | Sequence[int], tools: Sequence[Tool] = ()
    ) -> tuple[PlannedTurn, Turn, Message]:
        """Ask and answer."""
        planned = self.ask(*messages, tools=tools)
        turn, read = self.answer(planned, sampled, tools=tools)
        return planned, turn, read.message

    def decode(self, tokens: Sequence[int]) -> str:
        """Text with special tokens."""
        names = self.form.codec.special_tokens
        pieces, run = [], []
        for token in (*tokens, None):
            if token is not None and token not in names:
                run.append(token)
                continue
            pieces.append(self.form.codec.decode(run))
            pieces.append("" if token is None else names[token])
            run = []
        return "".join(pieces)


def call(call_id: str, name: str = "add", arguments: str = '{"a": 2}') -> ToolCall:
    return ToolCall(call_id=call_id, name=name, arguments=arguments)
