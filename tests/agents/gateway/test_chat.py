"""Chat completions: the bodies that clients send, and the replies and streams that they accept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from areal_lab.agents.gateway.calls import prompt
from areal_lab.agents.gateway.chat import CHAT, error_event, events, parse, reply
from areal_lab.agents.gateway.errors import ApiError, openai_error
from areal_lab.agents.messages import Message, Tool, ToolCall
from tests.agents.gateway.scripted import answered, calls, chat_of, joined, made, says

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        "strict": True,
    },
}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "gpt-x", "messages": [{"role": "user", "content": "2+3?"}], **fields}


# --- requests ---


def test_the_least_body_asks_for_one_reply() -> None:
    call = parse(body())
    assert call.request.messages == (Message(role="user", content="2+3?"),)
    assert prompt(call) == call.request
    assert (call.request.replies, call.request.max_new_tokens, call.request.stop) == (1, None, ())
    assert (call.request.temperature, call.request.top_p, call.request.seed) == (None, None, None)
    assert (call.stream, call.logprobs, call.follows, call.notes) == (False, False, "", ())
    assert call.model == "gpt-x"


def test_a_conversation_with_tools_as_clients_send_it_back() -> None:
    call = parse(
        body(
            messages=[
                {"role": "developer", "content": [{"type": "text", "text": "Be "}, "brief."]},
                {"role": "user", "name": "bob", "content": "2+3?"},
                {
                    "role": "assistant",
                    "content": None,
                    "refusal": None,
                    "reasoning_content": "hm",
                    "tool_calls": [
                        {
                            "id": "call_1",
                            "type": "function",
                            "function": {"name": "add", "arguments": '{"a": 2}'},
                        },
                        {"id": "call_2", "function": {"name": "add", "arguments": {"a": 3}}},
                    ],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": "5"},
                {"role": "tool", "tool_call_id": "call_2", "content": [{"text": "6"}]},
                {"role": "assistant"},
            ],
            tools=[ADD, {"type": "web_search"}],
            tool_choice="required",
            parallel_tool_calls=False,
            metadata={"any": "thing"},
        )
    )
    assert call.request.messages == (
        Message(role="system", content="Be brief."),
        Message(role="user", content="2+3?"),
        Message(
            role="assistant",
            tool_calls=(
                ToolCall(call_id="call_1", name="add", arguments='{"a": 2}'),
                ToolCall(call_id="call_2", name="add", arguments='{"a": 3}'),
            ),
            reasoning="hm",
        ),
        Message(role="tool", content="5", call_id="call_1"),
        Message(role="tool", content="6", call_id="call_2"),
        Message(role="assistant"),
    )
    assert call.request.tools == (
        Tool(
            name="add",
            description="Add two numbers.",
            parameters={"type": "object", "properties": {"a": {"type": "integer"}}},
        ),
    )
    assert call.request.tool_choice == "required"
    assert call.notes == (
        "tool_choice required is not enforced",
        "tools that the server runs are ignored",
    )


def test_an_instruction_ends_the_first_system_message() -> None:
    """Templates such as Gemma's and Llama's take one system message only."""
    asked = {"response_format": {"type": "json_object"}}
    told = "Reply with one JSON object, and with nothing else."
    user, brief = {"role": "user", "content": "2+3?"}, {"role": "system", "content": "Be brief."}

    def system(*messages: dict[str, str]) -> list[str]:
        whole = prompt(parse(body(messages=list(messages), **asked))).messages
        assert [each.role for each in whole].count("user") == 1
        return [each.content for each in whole if each.role == "system"]

    assert system(user) == [told]
    assert system(brief, user) == [f"Be brief.\n\n{told}"]
    assert system({**brief, "content": ""}, user) == [told]
    assert system(brief, user, brief) == [f"Be brief.\n\n{told}", "Be brief."]
    assert system(user, brief) == [told, "Be brief."]


def test_functions_of_the_older_protocol() -> None:
    call = parse(
        body(
            messages=[
                {"role": "user", "content": "2+3?"},
                {"role": "assistant", "function_call": {"name": "add", "arguments": "{}"}},
                {"role": "function", "name": "add", "content": "5"},
            ],
            functions=[{"name": "add", "parameters": None}],
        )
    )
    assert call.request.messages[1:] == (
        Message(
            role="assistant", tool_calls=(ToolCall(call_id="add", name="add", arguments="{}"),)
        ),
        Message(role="tool", content="5", call_id="add"),
    )
    assert call.request.tools == (Tool(name="add"),)


def test_how_to_sample() -> None:
    call = parse(
        body(
            max_completion_tokens=9,
            max_tokens=5,
            stop=["Observation:", "Calling tools:"],
            n=3,
            temperature=0.5,
            top_p=0.9,
            seed=7,
            logprobs=True,
            top_logprobs=0,
            stream=True,
            stream_options={"include_usage": True, "include_obfuscation": False},
        )
    )
    assert (call.request.max_new_tokens, call.request.replies) == (9, 3)
    assert call.request.stop == ("Observation:", "Calling tools:")
    assert (call.request.temperature, call.request.top_p, call.request.seed) == (0.5, 0.9, 7)
    assert (call.stream, call.stream_usage, call.logprobs) == (True, True, True)
    assert call.notes == ()
    assert parse(body(max_tokens=5, stop="x")).request.max_new_tokens == 5
    assert parse(body(stop="x")).request.stop == ("x",)
    assert parse(body(top_logprobs=2)).request.top_logprobs == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": 3}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [3]}]}, "messages[0].tool_calls[0]"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]},
            "messages[0].tool_calls[0].function",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}]},
            "messages[0].tool_calls[0].function.name",
        ),
        ({"messages": [{"role": "tool", "tool_call_id": 3}]}, "messages[0].tool_call_id"),
        ({"tools": {}}, "tools"),
        ({"tools": [3]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"function": {"description": "x"}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "f", "parameters": 3}}]}, "tools[0].function.parameters"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"stop": 3}, "stop"),
        ({"stream": 1}, "stream"),
        ({"stream_options": []}, "stream_options"),
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 50}, "top_logprobs"),
        ({"seed": "x"}, "seed"),
        ({"model": 3}, "model"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse(body(**fields))
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param.rpartition(".")[2] in caught.value.message


# --- replies ---


def test_a_reply_of_text() -> None:
    assert reply(parse(body()), answered(says("2+3=5."))) == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "gpt-x",
        "system_fingerprint": "version-3",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "2+3=5.", "refusal": None},
                "finish_reason": "stop",
                "logprobs": None,
            }
        ],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 2,
            "total_tokens": 9,
            "prompt_tokens_details": {"cached_tokens": 2},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


def test_a_reply_with_a_call_has_no_content() -> None:
    choice = reply(parse(body()), answered(calls("add", '{"a": 2}')))["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "add", "arguments": '{"a": 2}'},
            }
        ],
    }


def test_logprobs_are_those_of_the_sampled_tokens() -> None:
    emoji = says("a\U0001f600", texts=["a", "", "\U0001f600"])
    choice = reply(parse(body(logprobs=True)), answered(emoji))["choices"][0]
    assert choice["logprobs"] == {
        "content": [
            {"token": "a", "logprob": -0.25, "bytes": [97], "top_logprobs": []},
            {"token": "", "logprob": -0.5, "bytes": [], "top_logprobs": []},
            {
                "token": "\U0001f600",
                "logprob": -0.75,
                "bytes": [240, 159, 152, 128],
                "top_logprobs": [],
            },
        ],
        "refusal": None,
    }


@pytest.mark.parametrize(
    ("finish", "reason"), [("stop", "stop"), ("length", "length"), ("context", "length")]
)
def test_why_a_reply_ended(finish: Any, reason: str) -> None:
    answer = answered(says("x", finish=finish))
    assert reply(parse(body()), answer)["choices"][0]["finish_reason"] == reason
    assert chat_of(joined(events(parse(body()), answer)))["choices"][0]["finish_reason"] == reason


def test_several_replies_are_choices_and_share_the_prompt() -> None:
    answer = answered(says("one"), says("three", request_id="r1"))
    whole = reply(parse(body(n=2)), answer)
    assert [each["message"]["content"] for each in whole["choices"]] == ["one", "three"]
    assert [each["index"] for each in whole["choices"]] == [0, 1]
    assert whole["usage"]["prompt_tokens"] == 7
    assert whole["usage"]["completion_tokens"] == 3


def test_a_reply_of_no_tokens_is_empty() -> None:
    whole = reply(parse(body(logprobs=True)), answered(says("", finish="context")))
    assert whole["choices"][0]["message"]["content"] == ""
    assert whole["system_fingerprint"] is None
    assert whole["usage"]["completion_tokens"] == 0


# --- streams ---


def test_the_order_of_a_stream() -> None:
    """As OpenAI's, LangChain's, pydantic-ai's, litellm's and openai-agents' clients accept it."""
    call = parse(body(stream=True, stream_options={"include_usage": True}))
    found = joined(events(call, answered(calls("add", '{"a": 2}', "Well. "))))
    deltas = [each["choices"][0]["delta"] for _, each in found[:-3]]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"content": "Well. "},
        {
            "tool_calls": [
                {
                    "index": 0,
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "add", "arguments": ""},
                }
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": 2}'}}]},
    ]
    assert all(each["choices"][0]["finish_reason"] is None for _, each in found[:-3])
    assert found[-3][1]["choices"] == [
        {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "tool_calls"}
    ]
    assert found[-2][1]["choices"] == []
    assert found[-2][1]["usage"]["total_tokens"] == 9
    assert found[-1] == ("", "[DONE]")
    assert all(each["usage"] is None for _, each in found[:-2])


def test_usage_comes_only_if_it_is_asked_for() -> None:
    found = joined(events(parse(body(stream=True)), answered(says("x"))))
    assert all("usage" not in data for _, data in found[:-1])


def test_a_call_alone_has_no_content_in_its_first_delta() -> None:
    found = joined(events(parse(body(stream=True)), answered(calls("add", "{}"))))
    assert found[0][1]["choices"][0]["delta"] == {"role": "assistant", "content": None}


def test_tokens_of_a_parsed_message_keep_their_logprobs_in_a_stream() -> None:
    """The content is not what the tokens say: they said the call, too."""
    answer = answered(calls("add", "{}", texts=["<call>", "{}", "</call>"]))
    call = parse(body(stream=True, logprobs=True))
    whole = reply(call, answer)["choices"][0]["logprobs"]
    assert len(whole["content"]) == 3
    assert chat_of(joined(events(call, answer)))["choices"][0]["logprobs"] == whole


@pytest.mark.parametrize("content", ["ab" * 20, "changed by a parser"])
def test_a_stream_has_the_top_logprobs_of_the_whole_reply(content: str) -> None:
    said = says(content, texts=["ab"] * 20)
    tops = tuple(((f"{place}", -0.1), ("x", -3.0)) for place in range(21))  # one of a hidden end
    answer = answered(replace(said, top=tops), replace(said, top=tops[::-1]))
    call = parse(body(stream=True, logprobs=True, top_logprobs=2, n=2))
    streamed = chat_of(joined(events(call, answer)))["choices"]
    whole = reply(call, answer)["choices"]
    assert [each["logprobs"] for each in streamed] == [each["logprobs"] for each in whole]
    assert [each["top_logprobs"][0]["token"] for each in streamed[0]["logprobs"]["content"]] == [
        f"{place}" for place in range(20)
    ]


def test_thinking_is_reasoning_content() -> None:
    thought = made(Message(role="assistant", content="5", reasoning="2 and 3"))
    call = parse(body(stream=True))
    message = reply(call, answered(thought))["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("2 and 3", "5")
    streamed = chat_of(joined(events(call, answered(thought))))["choices"][0]["message"]
    assert (streamed["reasoning_content"], streamed["content"]) == ("2 and 3", "5")


def test_errors_are_openais() -> None:
    error = ApiError(429, "too many", param="n", code="too_many", retry_after_s=1.5)
    found = {
        "error": {
            "message": "too many",
            "type": "rate_limit_error",
            "param": "n",
            "code": "too_many",
        }
    }
    assert openai_error(error) == CHAT.error(error) == found
    assert joined([error_event(error)]) == [("", found)]
    assert error.headers == {"retry-after": "1.5", "x-should-retry": "true"}
    assert ApiError(410, "over").headers == {"x-should-retry": "false"}


def test_one_body_gives_one_call() -> None:
    assert parse(body(tools=[ADD])) == parse(body(tools=[ADD]))
    assert parse(body()) != replace(parse(body()), model="other")
