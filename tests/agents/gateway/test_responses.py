"""Responses: items in, items out, the stream's events, and what a later response continues."""

from __future__ import annotations

from typing import Any

import pytest

from areal_lab.agents.gateway.calls import Turn, continued, prompt, turn_after
from areal_lab.agents.gateway.errors import ApiError
from areal_lab.agents.gateway.responses import RESPONSES, error_event, events, parse, reply
from areal_lab.agents.messages import Message, Tool, ToolCall
from tests.agents.gateway.scripted import answered, calls, joined, made, response_of, says

ADD = {
    "type": "function",
    "name": "add",
    "description": "Add.",
    "parameters": {"type": "object"},
    "strict": True,
}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "gpt-x", "input": "2+3?", **fields}


def output(*replies: Any, **fields: Any) -> list[dict[str, Any]]:
    call = parse(body(**fields))
    found: list[dict[str, Any]] = reply(call, answered(*replies, interaction_id="resp_1"))["output"]
    return found


# --- requests ---


@pytest.mark.parametrize(
    ("text", "notes"),
    [
        (None, ()),
        ({"format": {"type": "text"}, "verbosity": "low"}, ()),
        (
            {"format": {"type": "json_schema", "name": "n", "schema": {}}},
            (),
        ),
        ({"format": {"type": "grammar"}}, ("text.format is ignored",)),
    ],
)
def test_a_format_of_text_is_never_ignored_silently(text: Any, notes: tuple[str, ...]) -> None:
    assert parse({"input": "hi", "text": text}).notes == notes


def test_a_string_is_a_users_message_and_instructions_stand_before_it() -> None:
    call = parse(body(instructions="Be brief."))
    assert call.request.messages == (Message(role="user", content="2+3?"),)
    assert prompt(call).messages == (
        Message(role="system", content="Be brief."),
        Message(role="user", content="2+3?"),
    )
    assert parse(body(instructions="")).system == ()
    listed = [{"role": "developer", "content": "Be brief."}]
    assert parse(body(instructions=listed)).system == (Message(role="system", content="Be brief."),)


def test_the_second_call_of_openai_agents() -> None:
    """It sends our items back, and users' items without a type."""
    call = parse(
        body(
            include=[],
            input=[
                {"role": "user", "content": "2+3?"},
                {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"text": "hm"}]},
                {
                    "type": "message",
                    "id": "msg_1",
                    "role": "assistant",
                    "status": "completed",
                    "content": [{"type": "output_text", "text": "Well.", "annotations": []}],
                },
                {
                    "type": "function_call",
                    "id": "fc_1",
                    "call_id": "call_1",
                    "name": "add",
                    "arguments": '{"a": 2}',
                    "status": "completed",
                },
                {
                    "type": "function_call",
                    "id": "fc_2",
                    "call_id": "call_2",
                    "name": "add",
                    "arguments": "{}",
                },
                {"type": "function_call_output", "call_id": "call_1", "output": "5"},
                {
                    "type": "function_call_output",
                    "call_id": "call_2",
                    "output": [{"type": "input_text", "text": "0"}],
                },
                {"role": "developer", "content": [{"type": "input_text", "text": "Hurry."}]},
            ],
            tools=[ADD, {"type": "web_search_preview"}],
            stream=True,
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
        Message(role="system", content="Hurry."),
    )
    assert call.request.tools == (
        Tool(name="add", description="Add.", parameters={"type": "object"}),
    )
    assert call.stream
    assert call.notes == ("tools that the server runs are ignored",)


def test_items_of_two_replies_are_two_messages() -> None:
    call = parse(
        body(
            input=[
                {"role": "assistant", "content": "one"},
                {"role": "assistant", "content": "two"},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
                {"role": "assistant", "content": "three"},
                {"type": "reasoning", "summary": []},
                {"role": "user", "content": "four"},
            ]
        )
    )
    assert call.request.messages == (
        Message(role="assistant", content="one"),
        Message(
            role="assistant",
            content="two",
            tool_calls=(ToolCall(call_id="c", name="f", arguments="{}"),),
        ),
        Message(role="assistant", content="three", reasoning="hm"),
        Message(role="user", content="four"),
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": ["message"]}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name"),
        ({"input": [{"type": "function_call_output", "output": 3}]}, "input[0].output"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"instructions": 3}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"previous_response_id": 3}, "previous_response_id"),
        ({"include": "all"}, "include"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse(body(**fields))
    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_response_continues_the_items_and_not_the_instructions_of_the_earlier_one() -> None:
    first = parse(body(instructions="Be brief.", tools=[ADD]))
    assert first.keep
    turn = turn_after(first, answered(calls("add", "{}")))
    assert isinstance(turn, Turn)
    second = parse(
        body(
            previous_response_id="resp_1",
            input=[{"type": "function_call_output", "call_id": "call_1", "output": "5"}],
        )
    )
    assert second.follows == "resp_1"
    whole = prompt(continued(second, turn))
    assert [each.role for each in whole.messages] == ["user", "assistant", "tool"]
    assert whole.tools == ()
    assert not parse(body(store=False)).keep


# --- replies ---


def test_a_response_of_text_repeats_what_was_asked() -> None:
    call = parse(body(instructions="Be brief.", temperature=0.5, metadata={"run": "1"}))
    found = reply(call, answered(says("2+3=5."), interaction_id="resp_1"))
    assert found["id"] == "resp_1"
    assert (found["object"], found["status"], found["error"]) == ("response", "completed", None)
    assert found["output"] == [
        {
            "id": "msg_1",
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [
                {"type": "output_text", "text": "2+3=5.", "annotations": [], "logprobs": []}
            ],
        }
    ]
    assert found["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 9,
    }
    assert (found["instructions"], found["temperature"]) == ("Be brief.", 0.5)
    assert (found["metadata"], found["tools"], found["tool_choice"]) == ({"run": "1"}, [], "auto")
    assert found["parallel_tool_calls"] is True


def test_thinking_text_and_calls_are_items_with_ids_of_their_own() -> None:
    message = Message(
        role="assistant",
        content="Well.",
        tool_calls=(
            ToolCall(call_id="call_1", name="add", arguments='{"a": 2}'),
            ToolCall(call_id="call_2", name="add", arguments="{}"),
        ),
        reasoning="hm",
    )
    items = output(made(message))
    assert [each["type"] for each in items] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert len({each["id"] for each in items}) == 4
    assert items[2] == {
        "id": "fc_1_0",
        "type": "function_call",
        "status": "completed",
        "call_id": "call_1",
        "name": "add",
        "arguments": '{"a": 2}',
    }
    # What goes out comes back as the same message.
    assert parse(body(input=[{"role": "user", "content": "x"}, *items])).request.messages[1] == (
        message
    )


def test_a_call_alone_has_no_message_and_nothing_is_an_empty_one() -> None:
    assert [each["type"] for each in output(calls("add", "{}"))] == ["function_call"]
    (item,) = output(says(""))
    assert item["content"][0]["text"] == ""


@pytest.mark.parametrize("finish", ["length", "context"])
def test_a_reply_that_was_cut_is_incomplete_and_its_stream_still_completes(finish: Any) -> None:
    call = parse(body(stream=True))
    answer = answered(says("2+3", finish=finish), interaction_id="resp_1")
    found = reply(call, answer)
    assert (found["status"], found["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert found["output"][0]["status"] == "incomplete"
    assert response_of(joined(events(call, answer))) == found


def test_the_order_of_a_stream() -> None:
    call = parse(body(stream=True))
    answer = answered(calls("add", '{"a": 2}', "Well."), interaction_id="resp_1")
    found = joined(events(call, answer))
    assert [name.removeprefix("response.") for name, _ in found] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert found[2][1]["item"]["content"] == []
    assert found[8][1]["item"]["arguments"] == ""
    assert response_of(found) == reply(call, answer)


def test_logprobs_are_included_on_demand() -> None:
    include = ["message.output_text.logprobs"]
    (item,) = output(says("2+3=5."), include=include)
    assert [each["token"] for each in item["content"][0]["logprobs"]] == ["2+3", "=5."]
    call = parse(body(include=include, stream=True))
    found = joined(events(call, answered(says("2+3=5."), interaction_id="resp_1")))
    deltas = [data for name, data in found if name == "response.output_text.delta"]
    assert [each["token"] for delta in deltas for each in delta["logprobs"]] == ["2+3", "=5."]


def test_an_error_in_a_stream_is_the_protocols_event_and_openais_form() -> None:
    ((name, data),) = joined([error_event(ApiError(500, "broken"))])
    assert name == data["type"] == "error"
    assert data["message"] == data["error"]["message"] == "broken"


def test_a_response_that_is_not_stored_cannot_be_continued() -> None:
    error = RESPONSES.unknown("resp_9")
    assert (error.status, error.code) == (400, "previous_response_not_found")
