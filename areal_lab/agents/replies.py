"""Replies from sampled tokens: text, reasoning, tool calls, and log-probs.

Stop strings end the visible text. Tokens sampled past one stay in the conversation and are trained
like the rest, because the model generated them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from areal_lab.agents.chat_format import ChatFormat
from areal_lab.agents.messages import ChatFinish, ChatReply, ChatRequest, Message, ToolCall
from areal_lab.agents.session_tree import PlannedTurn
from areal_lab.agents.tool_calls import (
    MARKS,
    Call,
    Grammar,
    grammar_named,
    parse_calls,
    split_thinking,
)
from areal_lab.engines.protocol import Generated


class ReplyReader:
    """Parse the sampled responses of one model into replies."""

    def __init__(self, form: ChatFormat, *, grammar: str = "auto", context_tokens: int) -> None:
        """Choose the grammar of tool calls."""
        written, call = form.probe_call()
        self._grammar: Grammar = grammar_named(grammar, written, Call(call.name, call.arguments))
        self._form = form
        self._context_tokens = context_tokens
        special = form.codec.special_tokens
        self._marks = {token: text for token, text in special.items() if text in MARKS}

    def read(
        self, request: ChatRequest, planned: PlannedTurn, generated: Generated, *, reply: int = 0
    ) -> ChatReply:
        """The reply that a sampled answer is."""
        tokens = list(generated.tokens)
        logprobs = [value for segment in generated.segments for value in segment.logprobs]
        sampled = len(tokens)
        if tokens and tokens[-1] in self._form.end_tokens:
            tokens.pop()
        pieces = self._pieces(tokens)
        text = "".join(pieces)
        stops = [(at, stop) for stop in request.stop if stop and (at := text.find(stop)) >= 0]
        end, stopped_by = min(stops, default=(len(text), None))
        text = text[:end]
        facts = self._form.facts
        thought, said = None, text
        if facts.thinking:
            thought, said = split_thinking(text, opened=facts.opens_thinking)
        parsed = parse_calls(said, _callable(request), self._grammar)
        message = Message(
            role="assistant",
            content=parsed.content,
            tool_calls=tuple(
                ToolCall(call_id=planned.call_id(reply, index), name=name, arguments=arguments)
                for index, (name, arguments) in enumerate(parsed.calls)
            ),
            reasoning=thought,
        )
        prompt_tokens = len(planned.prompt_tokens)
        finish: ChatFinish = "length"
        if parsed.calls:
            finish = "tool_calls"
        elif stops or generated.finish_reason == "stop":
            finish = "stop"
        elif prompt_tokens + sampled >= self._context_tokens:
            finish = "context"
        return ChatReply(
            message=message,
            finish=finish,
            generated=generated,
            prompt_tokens=prompt_tokens,
            shown=_shown(pieces, logprobs, len(text)),
            stop=stopped_by,
            malformed_calls=parsed.malformed,
            unknown_calls=parsed.unknown,
        )

    def _pieces(self, tokens: Sequence[int]) -> list[str]:
        """Text of each token; special tokens have text only if they mark calls or thinking."""
        codec, pieces = self._form.codec, []
        for is_mark, run in groupby(tokens, self._marks.__contains__):
            some = list(run)
            if is_mark:
                pieces += [self._marks[token] for token in some]
                continue
            text, at = codec.decode(some), 0
            # Where text does not grow token by token, the last token gets all of it.
            for count in codec.characters(some, text) or (*(0,) * (len(some) - 1), len(text)):
                pieces.append(text[at : at + count])
                at += count
        return pieces


def _callable(request: ChatRequest) -> Mapping[str, Mapping[str, Any]]:
    """Tools that may be called, by name, with the schemas of their arguments."""
    tools = {tool.name: tool.parameters for tool in request.tools}
    match request.tool_choice:
        case "none":
            return {}
        case "named":
            return {name: one for name, one in tools.items() if name == request.tool_name}
        case _:
            return tools


def _shown(
    pieces: Sequence[str], logprobs: Sequence[float], characters: int
) -> tuple[tuple[str, float], ...]:
    """Text and log-prob of each token up to `characters`; the last token may be cut."""
    found, left = [], characters
    for piece, logprob in zip(pieces, logprobs, strict=False):
        if left == 0:
            break
        found.append((piece[:left], logprob))
        left -= len(piece[:left])
    return tuple(found)
