"""For any body and any reply: no crash, no loss, and the stream says what the object says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.agents.gateway.anthropic import ANTHROPIC
from areal_lab.agents.gateway.calls import Call, Dialect, prompt
from areal_lab.agents.gateway.chat import CHAT
from areal_lab.agents.gateway.errors import ApiError
from areal_lab.agents.gateway.reading import parse_json
from areal_lab.agents.gateway.responses import RESPONSES
from areal_lab.agents.gateway.service import body_digest
from areal_lab.agents.messages import ChatReply, Message, ToolCall
from tests.agents.gateway.scripted import (
    answered,
    chat_of,
    joined,
    made,
    message_of,
    response_of,
)

DIALECTS = pytest.mark.parametrize("dialect", [CHAT, RESPONSES, ANTHROPIC], ids=lambda d: d.name)

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(), max_size=5),
    st.sampled_from(["user", "assistant", "tool", "text", "function", "message", "auto", "f"]),
)
NAMES = st.sampled_from(
    [
        *("role", "content", "type", "text", "name", "id", "call_id", "tool_calls", "function"),
        *("arguments", "input", "output", "tool_use_id", "tool_call_id", "parameters"),
        *("input_schema", "thinking", "summary", "reasoning_content"),
    ]
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)
FIELDS = [
    *("model", "messages", "input", "instructions", "system", "tools", "tool_choice", "functions"),
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "stop", "stop_sequences", "n"),
    *("temperature", "top_p", "seed", "stream", "stream_options", "logprobs", "top_logprobs"),
    *("thread", "previous_response_id", "store", "include", "metadata", "top_k"),
    *("response_format", "reasoning"),
]
BODIES = st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6)
GOOD: dict[str, Any] = {
    "messages": [{"role": "user", "content": "x"}],
    "input": "x",
    "model": "m",
    "max_tokens": 5,
}


@DIALECTS
@given(body=BODIES, raw=st.booleans())
def test_any_body_is_a_call_or_an_error_of_the_client(
    dialect: Dialect, body: dict[str, Any], raw: bool
) -> None:
    whole = body if raw else {**GOOD, **body}
    call = _parsed(dialect, whole)
    if isinstance(call, ApiError):
        assert call.status == 400
        assert call.param is not None
        assert "\n" not in call.message
        json.dumps(dialect.error(call)).encode("ascii")
        return
    request = prompt(call)
    assert request.messages
    for message in request.messages:
        message.content.encode()
        assert hash(message) == hash(message)
    body_digest(dialect.name, whole)
    _reads(dialect, call, made(Message(role="assistant", content="x")))


def _parsed(dialect: Dialect, body: dict[str, Any]) -> Call | ApiError:
    try:
        return dialect.parse(parse_json(json.dumps(body).encode()))
    except ApiError as error:
        return error


TEXT = st.text(max_size=80)
CALLS = st.builds(
    ToolCall,
    call_id=st.text(min_size=1, max_size=5),
    name=st.text(min_size=1, max_size=5),
    arguments=st.one_of(
        TEXT, st.dictionaries(st.text(max_size=4), st.integers() | TEXT).map(json.dumps)
    ),
)
REPLIES = st.builds(
    lambda content, calls, reasoning, finish, stop, texts: made(
        Message(role="assistant", content=content, tool_calls=tuple(calls), reasoning=reasoning),
        finish=finish,
        stop=stop,
        texts=texts,
    ),
    TEXT,
    st.lists(CALLS, max_size=3),
    st.none() | TEXT,
    st.sampled_from(["stop", "length", "context", "tool_calls"]),
    st.none() | st.just("END"),
    st.none() | st.lists(st.text(max_size=4), max_size=20),
)


@DIALECTS
@given(each=REPLIES, logprobs=st.booleans())
def test_a_stream_says_what_the_object_says(
    dialect: Dialect, each: ChatReply, logprobs: bool
) -> None:
    body = {
        **GOOD,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": logprobs,
        "include": ["message.output_text.logprobs"] if logprobs else [],
    }
    _reads(dialect, dialect.parse(body), each)


def _reads(dialect: Dialect, call: Call, each: ChatReply) -> None:
    """A client that reads the stream knows what one knows that reads the object."""
    replies = (each,) * call.request.replies
    answer = answered(*replies, interaction_id=f"{dialect.id_prefix}1")
    whole = json.loads(json.dumps(dialect.reply(call, answer)))
    events = joined(dialect.events(call, answer))
    if dialect is RESPONSES:
        assert response_of(events) == whole
    elif dialect is ANTHROPIC:
        assert message_of(events) == whole
    else:
        found = chat_of(events)
        assert found["usage"] == (whole["usage"] if call.stream_usage else None)
        for choice, expected in zip(found["choices"], whole["choices"], strict=True):
            message = dict(expected["message"])
            message.pop("refusal")
            # An empty string of thinking has no delta.
            if not message.get("reasoning_content"):
                message.pop("reasoning_content", None)
            assert choice["message"] == message
            assert choice["finish_reason"] == expected["finish_reason"]
            if expected["logprobs"] and not expected["logprobs"]["content"]:
                assert choice["logprobs"] is None
            else:
                assert choice["logprobs"] == expected["logprobs"]


@given(st.dictionaries(st.text(max_size=5), JSON, max_size=6), st.randoms())
def test_the_digest_of_a_body_is_that_of_its_values(body: dict[str, Any], random: Any) -> None:
    names = list(body)
    random.shuffle(names)
    shuffled = {name: body[name] for name in names}
    assert body_digest("chat", body) == body_digest("chat", json.loads(json.dumps(shuffled)))
    assert body_digest("chat", body) != body_digest("responses", body)
    assert body_digest("chat", body) != body_digest("chat", {**body, "a longer name": 1})
