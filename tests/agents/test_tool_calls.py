"""Calls of tools in sampled text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.agents.tool_calls import (
    GRAMMARS,
    Call,
    Parsed,
    grammar_named,
    parse_calls,
    split_thinking,
)
from tests.agents.published import FAMILIES, published
from tests.agents.templates import chat_format
from tests.fuzz import one_line

TOOLS = {"add", "now"}
ADD = '{"name": "add", "arguments": {"a": 2}}'
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(), JSON, max_size=4)
PIECES = st.sampled_from(
    [
        *("<function=add>", "<parameter=a>", "</parameter>", "</function>", "[ARGS]", "add"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|tool_call|>", "```"),
        *("<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581sep\uff5c>", "function"),
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", ADD, '{"name": "add"', "}", "{", "[", "]"),
        *(",", ";", " ", "\n", '"', "\\", "text", '"name"', '"arguments":', "<think>", "</think>"),
    ]
)


def parsed(grammar: str, text: str) -> Parsed:
    return parse_calls(text, TOOLS, GRAMMARS[grammar])


def calls(grammar: str, text: str) -> list[tuple[str, str]]:
    found = parsed(grammar, text)
    assert (found.malformed, found.unknown) == (0, 0)
    return [tuple(one) for one in found.calls]


@pytest.mark.parametrize(
    ("text", "arguments", "content"),
    [
        (f"<tool_call>{ADD}</tool_call>", ['{"a": 2}'], ""),
        (f"<tool_call>\n{ADD}\n</tool_call>", ['{"a": 2}'], ""),
        (f"Let me add.\n<tool_call>{ADD}</tool_call>", ['{"a": 2}'], "Let me add."),
        (f"One <tool_call>{ADD}</tool_call> two", ['{"a": 2}'], "One  two"),
        (f"<tool_call>{ADD}</tool_call>\n<tool_call>{ADD}</tool_call>", ['{"a": 2}'] * 2, ""),
        # the text of the model, not JSON that was written again
        (
            '<tool_call>{"arguments":{ "b":3,\n"a":[{"x": {}}]},"name":"add"}</tool_call>',
            ['{ "b":3,\n"a":[{"x": {}}]}'],
            "",
        ),
        # marks and braces inside strings
        (
            '<tool_call>{"name": "add", "arguments": {"s": "}</tool_call>{<tool_call>"}}'
            "</tool_call>",
            ['{"s": "}</tool_call>{<tool_call>"}'],
            "",
        ),
        # an object written as a string
        (
            '<tool_call>{"name": "add", "arguments": "{\\"a\\": 2}"}</tool_call>',
            ['{"a": 2}'],
            "",
        ),
        ('<tool_call>{"id": 7, "name": "now", "arguments": {}}</tool_call>', ["{}"], ""),
    ],
)
def test_hermes(text: str, arguments: list[str], content: str) -> None:
    assert [given for _, given in calls("hermes", text)] == arguments
    assert parsed("hermes", text).content == content


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "add", "parameters": {"a": 2}}', [("add", '{"a": 2}')]),
        (' \n{"name": "add", "arguments": {"a": 2}}\n', [("add", '{"a": 2}')]),
        (
            '{"name": "add", "parameters": {"a": {"b": {}}}}; {"name": "now", "parameters": {}}',
            [("add", '{"a": {"b": {}}}'), ("now", "{}")],
        ),
        # answers, not calls
        ("5", []),
        ('{"name": "Bob", "age": 3}', []),
        ('{"answer": 5}', []),
        ('{"answer": 5', []),
        ('As JSON: {"name": "add", "parameters": {}}', []),
        ('```json\n{"name": "add", "parameters": {}}\n```', []),
        ("```python\nadd(2, 3)\n```", []),
    ],
)
def test_llama3(text: str, expected: list[tuple[str, str]]) -> None:
    assert calls("llama3", text) == expected
    assert parsed("llama3", text).content == ("" if expected else text)


@pytest.mark.parametrize(
    ("text", "expected", "content"),
    [
        (f"[TOOL_CALLS] [{ADD}]", [("add", '{"a": 2}')], ""),
        (f"[TOOL_CALLS]{ADD}", [("add", '{"a": 2}')], ""),
        (
            f'Sure. [TOOL_CALLS][{ADD} , {{"name": "now", "arguments": {{}}, "id": "x"}}] Done',
            [("add", '{"a": 2}'), ("now", "{}")],
            "Sure. Done",
        ),
        ("No call [TOOL", [], "No call [TOOL"),
    ],
)
def test_mistral(text: str, expected: list[tuple[str, str]], content: str) -> None:
    assert calls("mistral", text) == expected
    assert parsed("mistral", text).content == content


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 2'),
        ("hermes", f"<tool_call>{ADD}"),
        ("hermes", f"<tool_call>{ADD[:-1]}</tool_call>"),
        ("hermes", f"<tool_call>{ADD}}}</tool_call>"),
        ("hermes", f"<tool_call>[{ADD}]</tool_call>"),
        ("hermes", "<tool_call>add(2, 3)</tool_call>"),
        ("hermes", "<tool_call>{'name': 'add', 'arguments': {}}</tool_call>"),
        ("hermes", '<tool_call>{"name": "add"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": ["add"], "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": [2, 3]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": "2, 3"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "line\nbreak"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": ' + "[" * 100_000 + "</tool_call>"),
        ("llama3", '{"name": "add", "parameters": {"a": 2'),
        ("llama3", '{"name": "add", "parameters": {}, "arguments": {}}'),
        ("llama3", '{"name": "add", "parameters": {"a": 2}} and more'),
        ("llama3", '{"name": "add", "parameters": {}}, {"name": "now", "parameters": {}}'),
        ("llama3", '{"name": "add", "parameters": {"a": 2}}; {"name": "x"}'),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", f"[TOOL_CALLS] [{ADD}"),
        ("mistral", f"[TOOL_CALLS] [{ADD} {ADD}]"),
        ("mistral", "[TOOL_CALLS]add[ARGS]{}"),
    ],
    ids=lambda text: text[:60],
)
def test_what_begins_like_a_call_and_is_none_stays_content_and_is_counted(
    grammar: str, text: str
) -> None:
    assert parsed(grammar, text) == Parsed(content=text, malformed=1)
    assert parsed(grammar, f"{text}\n").content == f"{text}\n"


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ("hermes", '<tool_call>{"name": "sub", "arguments": {}}</tool_call>'),
        ("llama3", '{"name": "sub", "parameters": {}}'),
        ("mistral", '[TOOL_CALLS][{"name": "sub", "arguments": {}}]'),
    ],
)
def test_a_tool_that_there_is_not_stays_content_and_is_counted(grammar: str, text: str) -> None:
    assert parsed(grammar, text) == Parsed(content=text, unknown=1)


def test_a_good_call_beside_bad_ones_is_a_call() -> None:
    bad = '<tool_call>{"name": "add", "arguments": {<tool_call>'
    unknown = '<tool_call>{"name": "sub", "arguments": {}}</tool_call>'
    found = parsed("hermes", f"{bad}{ADD}</tool_call>\n{unknown}")
    assert found.calls == (Call("add", '{"a": 2}'),)
    assert (found.malformed, found.unknown) == (1, 1)
    assert found.content == f'<tool_call>{{"name": "add", "arguments": {{\n{unknown}'


def test_without_tools_nothing_is_a_call() -> None:
    text = f"<tool_call>{ADD}</tool_call> <tool_call>"
    assert parse_calls(text, (), GRAMMARS["hermes"]) == Parsed(content=text)
    assert parsed("none", text) == Parsed(content=text)


def test_code_in_a_fence_is_no_call() -> None:
    text = "```python\nadd(a=2)\n```"
    assert all(parsed(grammar, text) == Parsed(content=text) for grammar in GRAMMARS)


@given(st.lists(st.tuples(st.sampled_from(sorted(TOOLS)), ARGUMENTS), min_size=1, max_size=3))
def test_calls_are_read_back(written: list[tuple[str, dict[str, object]]]) -> None:
    def objects(key: str) -> list[str]:
        return [json.dumps({"name": name, key: given}) for name, given in written]

    texts = {
        "hermes": "".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects("arguments")),
        "llama3": "; ".join(objects("parameters")),
        "mistral": f"[TOOL_CALLS] [{', '.join(objects('arguments'))}]",
    }
    for grammar, text in texts.items():
        found = calls(grammar, text)
        assert [(name, json.loads(arguments)) for name, arguments in found] == written


@given(st.lists(PIECES, max_size=12).map("".join), st.sampled_from(sorted(GRAMMARS)))
def test_any_text_is_read_and_none_of_it_is_lost(text: str, grammar: str) -> None:
    found = parsed(grammar, text)
    if not found.calls:
        assert found.content == text
    for name, arguments in found.calls:
        assert name in TOOLS
        assert isinstance(json.loads(arguments), dict)
    if grammar == "hermes":
        assert "".join(piece.text for piece in GRAMMARS[grammar](text)) == text


# --- which grammar --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "grammar"),
    [
        ("SMOLLM2", "hermes"),
        ("QWEN", "hermes"),
        ("QWEN_THINKING", "hermes"),
        ("ALTERNATING", "hermes"),
        ("PLAIN_TEXT", "hermes"),
        ("LLAMA", "llama3"),
        ("MISTRAL", "mistral"),
    ],
)
def test_auto_is_the_grammar_that_the_template_writes(template: str, grammar: str) -> None:
    written, call = chat_format(template).probe_call()
    found = grammar_named("auto", written, Call(call.name, call.arguments))
    assert found is GRAMMARS[grammar]
    assert grammar_named("mistral", written, Call("", "")) is GRAMMARS["mistral"]


def test_calls_are_read_as_the_templates_of_published_families_write_them() -> None:
    assert len(FAMILIES) > 14
    for name, family in FAMILIES.items():
        form = published(name)
        written, call = form.probe_call()
        probed = Call(call.name, call.arguments)
        if not family.grammar:
            with pytest.raises(ValueError, match="which no grammar reads; set") as caught:
                grammar_named("auto", written, probed)
            assert one_line(caught.value)
            continue
        grammar = grammar_named("auto", written, probed)
        assert grammar is GRAMMARS[family.grammar], (name, written)
        begins = ("<tool_call>", "[TOOL", "{", "<|tool_call", "<\uff5ctool\u2581call")
        assert written.lstrip().startswith(begins), (name, written)
        # Whatever the model thought or said before, and however many calls it makes.
        several = form.facts.form.several_calls and family.grammar != "llama3"
        said = (
            [f"Well. {written}", f"{written}\n{written}"][: several + 1] if several else [written]
        )
        for text in said:
            found = parse_calls(text, {call.name}, grammar)
            assert found.calls, (name, text)
            assert {one.name for one in found.calls} == {call.name}
            assert all(json.loads(one.arguments) == {"probe_key": "p"} for one in found.calls)
        cut = parse_calls(written[: -len(written) // 2], {call.name}, grammar)
        assert not cut.calls
        assert cut.content == written[: -len(written) // 2]


def test_arguments_that_are_text_get_the_types_of_the_schema() -> None:
    schema = {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "d": {}}}
    values = {"a": "2", "b": "2", "c": "[1, {}]", "d": "2 apples", "e": "NaN", "f": "a\nb"}
    coder = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    glm = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
        for key, value in values.items()
    )
    for grammar, text in (
        ("qwen3_coder", f"<tool_call>\n<function=add>\n{coder}</function>\n</tool_call>"),
        ("glm", f"<tool_call>add\n{glm}</tool_call>"),
    ):
        (found,) = parse_calls(text, {"add": schema}, GRAMMARS[grammar]).calls
        expected = {**values, "a": 2, "c": [1, {}]}
        assert json.loads(found.arguments) == expected, grammar
        damaged = text.replace("</parameter>", "").replace("</arg_value>", "")
        assert parse_calls(damaged, {"add": schema}, GRAMMARS[grammar]).malformed == 1


def test_a_form_of_calls_that_no_grammar_reads_is_refused() -> None:
    call = Call("add", '{"a": 2}')
    with pytest.raises(ValueError, match=r"reads; set tool_call_parser to .*hermes, llama3"):
        grammar_named("auto", "<function=add><parameter=a>2</parameter></function>", call)
    with pytest.raises(ValueError, match=r"is 'qwen', but must be one of auto, hermes"):
        grammar_named("qwen", "", call)


# --- thinking -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("Hi", False, (None, "Hi")),
        ("<think>\nhm\n</think>\n\nHi\n", False, ("hm", "Hi\n")),
        ("\n<think></think>Hi", False, ("", "Hi")),
        ("hm\n</think>\n\nHi", True, ("hm", "Hi")),
        ("<think>hm</think>Hi", True, ("hm", "Hi")),
        ("<think>\nhm, cut", False, ("hm, cut", "")),
        ("hm, cut", True, ("hm, cut", "")),
        ("Hi <think>hm</think>", False, (None, "Hi <think>hm</think>")),
        ("<think>a</think>b</think>c", False, ("a", "b</think>c")),
        ("", False, (None, "")),
        ("", True, ("", "")),
    ],
)
def test_thinking_is_what_comes_before_the_answer(
    text: str, opened: bool, expected: tuple[str | None, str]
) -> None:
    assert split_thinking(text, opened=opened) == expected
