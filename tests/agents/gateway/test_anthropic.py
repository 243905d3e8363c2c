"""Messages: blocks in, blocks out, the stream's events, and threads."""

from __future__ import annotations

from typing import Any

import pytest

from areal_lab.agents.gateway.anthropic import ANTHROPIC, error_event, events, parse, reply
from areal_lab.agents.gateway.calls import continued, prompt, turn_after
from areal_lab.agents.gateway.errors import ApiError
from areal_lab.agents.messages import Message, Tool, ToolCall
from tests.agents.gateway.scripted import answered, calls, joined, made, message_of, says

ADD = {"name": "add", "description": "Add.", "input_schema": {"type": "object"}}


def body(**fields: Any) -> dict[str, Any]:
    return {
        "model": "claude-x",
        "max_tokens": 100,
        "messages": [{"role": "user", "content": "2+3?"}],
        **fields,
    }


# --- requests ---


def test_the_system_prompt_stands_before_the_messages() -> None:
    call = parse(body(system="Be brief.", stop_sequences=["END"], temperature=1))
    assert prompt(call).messages == (
        Message(role="system", content="Be brief."),
        Message(role="user", content="2+3?"),
    )
    assert (call.request.max_new_tokens, call.request.stop) == (100, ("END",))
    assert call.request.temperature == 1.0
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    assert parse(body(system=parts)).system == call.system
    assert parse(body(system=[])).system == ()


def test_claude_codes_first_part_of_the_system_prompt_is_not_for_the_model() -> None:
    parts = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1234;"},
        {"type": "text", "text": "You are.", "cache_control": {"type": "ephemeral"}},
    ]
    assert parse(body(system=parts)).system == (Message(role="system", content="You are."),)


def test_claude_codes_body() -> None:
    """Ran: system messages stand among the others, as parts in one call and as text in the next."""
    call = parse(
        body(
            messages=[
                {"role": "user", "content": [{"type": "text", "text": "2+3?"}]},
                {"role": "system", "content": [{"type": "text", "text": "Remember."}]},
                {"role": "system", "content": "Remember."},
            ],
            thinking={"type": "adaptive"},
            context_management={"edits": []},
            output_config={"effort": "high"},
            metadata={"user_id": "u"},
            max_tokens=32000,
            stream=True,
            tools=[
                {**ADD, "cache_control": None},
                {"type": "web_search_20250305", "name": "web_search"},
            ],
        )
    )
    assert call.request.messages == (
        Message(role="user", content="2+3?"),
        Message(role="system", content="Remember."),
        Message(role="system", content="Remember."),
    )
    assert call.request.tools == (
        Tool(name="add", description="Add.", parameters={"type": "object"}),
    )
    assert call.stream
    assert not call.keep


def test_results_of_tools_inside_a_users_message_are_messages() -> None:
    call = parse(
        body(
            messages=[
                {"role": "user", "content": "2+3?"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": ""},
                        {"type": "text", "text": "Well."},
                        {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 2}},
                        {"type": "tool_use", "id": "call_2", "name": "add", "input": {}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "call_1", "content": "5"},
                        {
                            "type": "tool_result",
                            "tool_use_id": "call_2",
                            "content": [{"type": "text", "text": "0"}],
                            "is_error": True,
                        },
                        {"type": "text", "text": "Go on."},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "before"},
                        {"type": "tool_result", "tool_use_id": "call_3"},
                    ],
                },
                {"role": "user", "content": []},
                {"role": "assistant", "content": "plain"},
            ]
        )
    )
    assert call.request.messages == (
        Message(role="user", content="2+3?"),
        Message(
            role="assistant",
            content="Well.",
            tool_calls=(
                ToolCall(call_id="call_1", name="add", arguments='{"a": 2}'),
                ToolCall(call_id="call_2", name="add", arguments="{}"),
            ),
            reasoning="hm",
        ),
        Message(role="tool", content="5", call_id="call_1"),
        Message(role="tool", content="0", call_id="call_2"),
        Message(role="user", content="Go on."),
        Message(role="user", content="before"),
        Message(role="tool", call_id="call_3"),
        Message(role="user"),
        Message(role="assistant", content="plain"),
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [3]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]},
            "messages[0].content[0].name",
        ),
        ({"system": 3}, "system"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "f", "input_schema": 3}]}, "tools[0].input_schema"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"stop_sequences": 3}, "stop_sequences"),
        ({"thread": "create"}, "thread"),
        ({"thread": {"type": "fork"}}, "thread.type"),
        ({"thread": {"type": "continue"}}, "thread.previous_message_id"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse(body(**fields))
    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_thread_sends_only_what_is_new_and_keeps_system_and_tools() -> None:
    """As the tool runner of Anthropic's client does."""
    first = parse(body(system="Be brief.", tools=[ADD], thread={"type": "create"}))
    assert (first.keep, first.follows) == (True, "")
    turn = turn_after(first, answered(calls("add", '{"a": 2}')))
    result = [{"type": "tool_result", "tool_use_id": "call_1", "content": "5"}]
    second = parse(
        body(
            messages=[{"role": "user", "content": result}],
            thread={"type": "continue", "previous_message_id": "msg_1"},
        )
    )
    assert (second.keep, second.follows) == (True, "msg_1")
    whole = continued(second, turn)
    assert prompt(whole).messages == (
        Message(role="system", content="Be brief."),
        Message(role="user", content="2+3?"),
        Message(
            role="assistant",
            tool_calls=(ToolCall(call_id="call_1", name="add", arguments='{"a": 2}'),),
        ),
        Message(role="tool", content="5", call_id="call_1"),
    )
    assert prompt(whole).tools == first.request.tools
    third = turn_after(whole, answered(says("5")))
    assert third.system == first.system
    assert [each.role for each in third.messages] == ["user", "assistant", "tool", "assistant"]


def test_a_thread_that_is_unknown_makes_the_client_send_everything() -> None:
    error = ANTHROPIC.unknown("msg_9")
    assert error.status == 404
    assert ANTHROPIC.error(error) == {
        "type": "error",
        "error": {
            "type": "not_found_error",
            "message": "thread_not_found: no thread of this session ends with msg_9",
            "details": {"error_code": "thread_not_found"},
        },
    }


# --- replies ---


def test_a_reply_of_text() -> None:
    assert reply(parse(body()), answered(says("2+3=5."), interaction_id="msg_1")) == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude-x",
        "content": [{"type": "text", "text": "2+3=5."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 5,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
            "output_tokens": 2,
        },
    }


@pytest.mark.parametrize(
    ("made_reply", "reason", "sequence"),
    [
        (says("x"), "end_turn", None),
        (says("x", stop="END"), "stop_sequence", "END"),
        (says("x", finish="length"), "max_tokens", None),
        (says("x", finish="context"), "model_context_window_exceeded", None),
        (calls("add", "{}"), "tool_use", None),
    ],
)
def test_why_a_reply_ended(made_reply: Any, reason: str, sequence: str | None) -> None:
    call = parse(body(stream=True))
    found = reply(call, answered(made_reply))
    assert (found["stop_reason"], found["stop_sequence"]) == (reason, sequence)
    assert message_of(joined(events(call, answered(made_reply)))) == found


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ('{ "a":2}', {"a": 2}),
        ("[1]", {"arguments": [1]}),
        ("{broken", {"arguments": "{broken"}),
        ('{"a": NaN}', {"arguments": '{"a": NaN}'}),
    ],
)
def test_arguments_are_an_object_in_this_protocol(arguments: str, found: Any) -> None:
    call = parse(body(stream=True))
    answer = answered(calls("add", arguments))
    block = {"type": "tool_use", "id": "call_1", "name": "add", "input": found}
    assert reply(call, answer)["content"] == [block]
    assert message_of(joined(events(call, answer)))["content"] == [block]


def test_the_order_of_a_stream() -> None:
    thought = made(
        Message(
            role="assistant",
            content="Well.",
            reasoning="hm",
            tool_calls=(ToolCall(call_id="call_1", name="add", arguments='{"a": 2}'),),
        )
    )
    call = parse(body(stream=True))
    found = joined(events(call, answered(thought)))
    assert [name for name, _ in found] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start = found[0][1]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == (
        [],
        None,
        0,
    )
    assert start["usage"]["input_tokens"] == 5
    assert found[8][1]["content_block"]["input"] == {}
    assert message_of(found) == reply(call, answered(thought))


def test_a_reply_of_nothing_is_an_empty_block() -> None:
    call = parse(body(stream=True))
    assert reply(call, answered(says("")))["content"] == [{"type": "text", "text": ""}]
    assert message_of(joined(events(call, answered(says("")))))["content"] == [
        {"type": "text", "text": ""}
    ]


def test_an_error_in_a_stream_and_a_sign_of_life() -> None:
    assert joined([error_event(ApiError(500, "broken"))]) == [
        ("error", {"type": "error", "error": {"type": "api_error", "message": "broken"}})
    ]
    assert joined([ANTHROPIC.keep_alive]) == [("ping", {"type": "ping"})]
