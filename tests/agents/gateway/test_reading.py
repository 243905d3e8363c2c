"""Fields of bodies: what is taken, and how a wrong one is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from areal_lab.agents.gateway import reading
from areal_lab.agents.gateway.anthropic import ANTHROPIC
from areal_lab.agents.gateway.calls import Dialect
from areal_lab.agents.gateway.chat import CHAT
from areal_lab.agents.gateway.errors import ApiError
from areal_lab.agents.gateway.responses import RESPONSES
from areal_lab.agents.messages import Tool

HELLO = [{"role": "user", "content": "hello"}]


def refused(message: str, parse: Any, *args: Any, **kwargs: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(*args, **kwargs)
    assert caught.value.status == 400
    assert message in caught.value.message
    assert "\n" not in caught.value.message
    return caught.value


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"{'", "the body is not JSON: Expecting"),
        (b"[1]", "must be a JSON object"),
        (b"3", "must be a JSON object"),
        (b"\xff{}", "the body is not JSON"),
        (b'{"a": NaN}', "NaN is not a finite number"),
        (b'{"a": 1e999}', "1e999 is not a finite number"),
        (b'{"a":' * 200 + b"1" + b"}" * 200, "nested more than 100 levels deep"),
        (b"[" * 100_000, "nested more than 100 levels deep"),
        (b'{"a": ' + b"9" * 5000 + b"}", "the body is not JSON"),
    ],
)
def test_a_body_that_is_no_object_is_refused(raw: bytes, message: str) -> None:
    refused(message, reading.parse_json, raw)


def test_a_body_may_be_nested_like_a_schema() -> None:
    body: Any = 1
    for _ in range(90):
        body = {"a": body}
    assert reading.parse_json(json.dumps(body).encode()) == body


def test_half_surrogate_pairs_become_replacement_characters() -> None:
    raw = rb'{"\ud800": ["a\udc00b", "\ud83d\ude00", {"c": "\ud83d"}, "\uD83DX"], "d": "\u00e9"}'
    assert reading.parse_json(raw) == {
        "\ufffd": ["a\ufffdb", "\U0001f600", {"c": "\ufffd"}, "\ufffdX"],
        "d": "\xe9",
    }
    json.dumps(reading.parse_json(raw), ensure_ascii=False).encode()


def test_a_byte_order_mark_is_no_part_of_the_body() -> None:
    assert reading.parse_json(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("plain", "plain"),
        ([], ""),
        ([{"type": "text", "text": "one "}, {"type": "text", "text": "two"}], "one two"),
        ([{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}], "ab"),
        (["bare", {"text": " untyped"}], "bare untyped"),
        ([{"type": "refusal", "refusal": "no"}], "no"),
        ([{"type": "text", "text": None}, {"type": "text"}], ""),
        ([{"type": "reasoning_text", "text": "hm"}, {"type": "tool_reference"}], "hm"),
        ([{"type": ["odd"], "text": "kept"}], "kept"),
    ],
)
def test_content_is_a_string_nothing_or_parts(content: Any, text: str) -> None:
    assert reading.content_text(content, "c") == text


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (3, "c"),
        ({"text": "x"}, "c"),
        ([3], "c[0]"),
        (["a", {"type": "text", "text": 4}], "c[1].text"),
        ([{"type": "image_url", "image_url": {"url": "data:"}}], "c[0]"),
        ([{"type": "document", "source": {}}], "c[0]"),
    ],
)
def test_other_content_is_named_by_its_place(content: Any, param: str) -> None:
    assert refused(param, reading.content_text, content, "c").param == param


def test_numbers_are_numbers_within_their_bounds() -> None:
    assert reading.integer({}, "n", least=1) is None
    assert reading.integer({"n": None}, "n", least=1) is None
    assert reading.integer({"n": 3.0}, "n", least=1) == 3
    assert reading.number({"x": 1}, "x") == 1.0
    assert reading.temperature({"temperature": 0}) == 0.0
    assert reading.top_p({"top_p": 1}) == 1.0
    assert reading.seed({"seed": -1}) == 2**63 - 1
    assert reading.most_tokens({"a": None, "b": 5}, "a", "b") == 5
    refused("n is true", reading.integer, {"n": True}, "n", least=1)
    refused("n is 2.5", reading.integer, {"n": 2.5}, "n", least=1)
    refused("n is 0, but must be at least 1", reading.integer, {"n": 0}, "n", least=1)
    refused("from 1 to 4", reading.integer, {"n": 5}, "n", least=1, most=4)
    refused('x is "1"', reading.number, {"x": "1"}, "x")
    refused("x is not finite", reading.number, {"x": 10**400}, "x")
    refused("temperature is -1", reading.temperature, {"temperature": -1})
    refused("top_p is 0", reading.top_p, {"top_p": 0})
    refused('stream is "yes"', reading.flag, {"stream": "yes"}, "stream")


def test_stop_is_a_string_or_a_list_and_empty_ones_stop_nothing() -> None:
    assert reading.strings({"stop": "x"}, "stop") == ("x",)
    assert reading.strings({"stop": ["x", "", "y"]}, "stop") == ("x", "y")
    assert reading.strings({"stop": None}, "stop") == ()
    refused("stop has 3", reading.strings, {"stop": ["x", 3]}, "stop")
    refused("must be a list", reading.strings, {"stop": {"x": 1}}, "stop")


@pytest.mark.parametrize(
    ("value", "choice"),
    [
        (None, "auto"),
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "function": {"name": "f"}}, "named f"),
        ({"type": "function", "name": "f"}, "named f"),
        ({"type": "custom", "custom": {"name": "f"}}, "named f"),
        ({"type": "any", "disable_parallel_tool_use": True}, "required"),
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, "named f"),
    ],
)
def test_tool_choice_has_one_meaning_in_all_dialects(value: Any, choice: str) -> None:
    assert " ".join(filter(None, reading.tool_choice({"tool_choice": value}))) == choice


@pytest.mark.parametrize("value", ["maybe", "function", 3, [], {}, {"type": ["auto"]}])
def test_another_tool_choice_is_refused(value: Any) -> None:
    refused("tool_choice is", reading.tool_choice, {"tool_choice": value})


def test_a_named_tool_has_a_name_and_is_one_of_the_tools() -> None:
    for value in ({"type": "function"}, {"type": "tool", "name": ""}):
        refused("tool_choice.name is missing", reading.tool_choice, {"tool_choice": value})
    nested = {"type": "function", "function": "f"}
    refused("tool_choice.function is", reading.tool_choice, {"tool_choice": nested})
    add, named = Tool(name="add"), reading.Choice("named", "sub")
    why = 'tool_choice is "sub", but must be one of the tools: "add"'
    refused(why, reading.require_tool, named, [add], ())
    reading.require_tool(reading.Choice("named", "add"), [add], ())
    reading.require_tool(named, [], ())  # those of an earlier call may be meant
    reading.require_tool(named, [add], ("tools that the server runs are ignored",))


@pytest.mark.parametrize(
    ("dialect", "body", "choice"),
    [
        (
            CHAT,
            {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "add"}}]},
            {"type": "function", "function": {"name": "add"}},
        ),
        (
            RESPONSES,
            {"input": "hello", "tools": [{"type": "function", "name": "add"}]},
            {"type": "function", "name": "add"},
        ),
        (
            ANTHROPIC,
            {"messages": HELLO, "tools": [{"name": "add"}], "max_tokens": 9},
            {"type": "tool", "name": "add"},
        ),
    ],
)
def test_every_dialect_keeps_the_name_of_a_named_tool(
    dialect: Dialect, body: dict[str, Any], choice: dict[str, Any]
) -> None:
    request = dialect.parse({**body, "tool_choice": choice}).request
    assert (request.tool_choice, request.tool_name) == ("named", "add")
    other = json.loads(json.dumps({**body, "tool_choice": choice}).replace("add", "sub", 1))
    assert refused("must be one of the tools", dialect.parse, other).param == "tool_choice"


def test_unknown_fields_are_noted_by_name_and_counted_as_one() -> None:
    known = frozenset({"model"})
    assert reading.unknown_note({"model": "m", "user": "u", "top_k": 2}, known) == ()
    assert reading.unknown_note({"top_pp": 1, "model": "m"}, known) == (
        "unknown fields are ignored: top_pp",
    )
    many = {f"f{number}": 1 for number in range(9)} | {"\r\nx: 1": 2}
    (note,) = reading.unknown_note(many, known)
    assert note == "unknown fields are ignored: f0, f1, f2, f3, f4, ..."
    assert reading.unknown_note({"\n": 1}, known) == ("unknown fields are ignored: ...",)


@pytest.mark.parametrize(
    "name", ["guided_regex", "structured_outputs", "chat_template_kwargs", "regex"]
)
def test_grammars_and_variables_of_templates_are_never_ignored_silently(name: str) -> None:
    given = {name: {"type": "object"}}
    assert reading.sampling_notes(given, reading.Choice("auto")) == (f"{name} is ignored",)


SCHEMA = {"type": "object", "properties": {"name\xe9": {"type": "string"}}}
TOLD = (
    "Reply with JSON that matches this JSON schema, and with nothing else:\n"
    '{"type": "object", "properties": {"name\xe9": {"type": "string"}}}'
)
OBJECT = "Reply with one JSON object, and with nothing else."


@pytest.mark.parametrize(
    ("body", "field", "told"),
    [
        ({}, "", ""),
        ({"response_format": {"type": "text"}, "text": {"format": None}}, "", ""),
        ({"response_format": "json"}, "", ""),
        ({"response_format": {"type": "json_object"}}, "response_format", OBJECT),
        ({"response_format": {"type": "json_schema"}}, "response_format", OBJECT),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            "response_format",
            TOLD,
        ),
        ({"text": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "text.format", TOLD),
        ({"output_format": {"type": "json_schema", "schema": SCHEMA}}, "output_format", TOLD),
        (
            {
                "output_config": {
                    "effort": "low",
                    "format": {"type": "json_schema", "schema": SCHEMA},
                }
            },
            "output_config.format",
            TOLD,
        ),
        ({"guided_json": SCHEMA}, "guided_json", TOLD),
        ({"guided_json": json.dumps(SCHEMA)}, "guided_json", TOLD),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs", TOLD),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema", TOLD),
    ],
)
def test_a_schema_reaches_the_model_and_is_not_ignored(
    body: dict[str, Any], field: str, told: str
) -> None:
    form = reading.json_form(body)
    schema = json.dumps(SCHEMA, ensure_ascii=False) if told == TOLD else '{"type": "object"}'
    assert form == (told, field, schema if field else "")
    notes = reading.sampling_notes(body, reading.Choice("auto"), form)
    assert f"{field} is ignored" not in notes


@pytest.mark.parametrize(
    "body",
    [
        {"output_format": {"type": "grammar"}},
        {"output_config": {"format": {"type": "grammar"}}},
        {"text": {"format": {"type": "grammar"}}},
    ],
)
def test_a_form_that_is_not_served_is_never_ignored_silently(body: dict[str, Any]) -> None:
    """Also if another field has a schema."""
    for more in ({}, {"response_format": {"type": "json_object"}}):
        given = {**body, **more}
        notes = reading.sampling_notes(given, reading.Choice("auto"), reading.json_form(given))
        assert sum(note.endswith("format is ignored") for note in notes) == 1


def test_a_schema_that_is_none_is_refused() -> None:
    refused("guided_json is not JSON", reading.json_form, {"guided_json": "{"})
    refused("must be an object", reading.json_form, {"guided_json": [1]})
    refused("nested", reading.json_form, {"json_schema": "[" * 200 + "]" * 200})


def test_what_is_not_served_is_noted_if_it_would_change_something() -> None:
    neutral = {
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "top_k": -1,
        "min_p": 0,
        "response_format": {"type": "text"},
    }
    assert reading.sampling_notes(neutral, reading.Choice("auto")) == ()
    required = reading.Choice("required")
    assert reading.sampling_notes({"top_k": 5, "presence_penalty": 1}, required) == (
        "presence_penalty is ignored",
        "top_k is ignored",
        "tool_choice required is not enforced",
    )


def test_arguments_are_json_text_whatever_form_they_come_in() -> None:
    assert reading.arguments_text('{ "a":2}', "a") == '{ "a":2}'
    assert reading.arguments_text({"a": "\xe9"}, "a") == '{"a": "\xe9"}'
    assert reading.arguments_text(None, "a") == "{}"
    refused("must be JSON text", reading.arguments_text, 3, "a")
