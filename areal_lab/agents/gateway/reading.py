"""Fields of a request's body, validated by hand.

Validating the whole history of messages with records would take longer than the rest of a request.
Unknown fields are ignored with a note; a known field of a wrong type is an error that names it.
`null` equals a missing field.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from areal_lab.agents.gateway.errors import invalid
from areal_lab.agents.messages import Tool, ToolCall, ToolChoice
from areal_lab.config.sections import check_temperature, check_top_p
from areal_lab.data.stop_strings import check_stop_strings

Body = Mapping[str, Any]

_TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text", "summary_text"})
_NOT_TEXT: Final = frozenset(
    {"image_url", "image", "input_image", "input_audio", "audio", "file", "input_file", "document"}
)
_SHOWN: Final = 60
"""Characters of a wrong value in a message."""
_IGNORED_SAMPLING: Final[Mapping[str, Any]] = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "top_k": -1,
    "min_p": 0,
    "response_format": {"type": "text"},
    # Grammars, as vLLM and SGLang name them, and variables of the template.
    "structured_outputs": {},
    "guided_json": {},
    "guided_regex": "",
    "guided_choice": [],
    "guided_grammar": "",
    "json_schema": "",
    "regex": "",
    "ebnf": "",
    "chat_template_kwargs": {},
}
"""Fields that are not served, with their neutral values. Other values would change the samples,
but training assumes that only temperature and top_p do."""
_WITHOUT_EFFECT: Final = frozenset(
    {
        *("best_of", "client_metadata", "metadata", "modalities", "parallel_tool_calls"),
        *("prediction", "prompt_cache_key", "prompt_cache_retention", "reasoning"),
        *("reasoning_effort", "safety_identifier", "service_tier", "store", "thinking"),
        *("truncation", "user", "verbosity", "background", "output_config", "context_management"),
        *("max_tool_calls", "cache_control", "container", "mcp_servers", "inference_geo"),
    }
)
"""Fields of the protocols that change no sample here, so that they need no note."""
_NAMED: Final = 5
"""Maximum unknown fields that a note names."""
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,60}")
_MOST_SEED: Final = 2**63 - 1
_MOST_ITEMS: Final = 16_384
"""Maximum entries of a list of messages, tools or parts."""
_MOST_NESTED: Final = 100
"""Far deeper than schemas of tools, and far from Python's recursion limit."""


def parse_json(raw: bytes) -> dict[str, Any]:
    """Parse a body as an object.

    Halves of surrogate pairs, which JSON can contain and UTF-8 cannot, become replacement
    characters.
    """
    try:
        body = parse_value(raw.decode("utf-8-sig"))
    except ValueError as error:
        raise invalid(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise invalid("the body must be a JSON object")
    # Only escapes can produce surrogates; most bodies have none of these.
    return _encodable(body) if b"\\ud" in raw or b"\\uD" in raw else body


def parse_value(text: str) -> Any:
    """Parse JSON text; infinities, NaN and excessive nesting are errors."""
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        value = None
        nested = True
    else:
        nested = _nested(value)
    if nested:
        raise ValueError(f"it is nested more than {_MOST_NESTED} levels deep")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:_SHOWN]} is not a finite number")
    return value


_DECODER: Final = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)
"""Replies repeat fields of requests; with NaN or infinities they would not be JSON."""


def _nested(value: Any) -> bool:
    level = [value]
    for _ in range(_MOST_NESTED):
        level = [
            child
            for each in level
            if isinstance(each, dict | list)
            for child in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return True


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_encodable(each) for each in value]
    if isinstance(value, dict):
        return {_encodable(key): _encodable(each) for key, each in value.items()}
    return value


def shown(value: object) -> str:
    """Format a value for an error message, shortened."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def record(value: object, where: str) -> Body:
    """Return a JSON object."""
    if not isinstance(value, dict):
        raise invalid(f"{where} is {shown(value)}, but must be an object", where)
    return value


def text(body: Body, name: str, where: str = "") -> str | None:
    """Return a string; None if it is absent."""
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise invalid(f"{where}{name} is {shown(value)}, but must be a string", f"{where}{name}")
    return value


def required(body: Body, name: str, where: str = "") -> str:
    """Return a string that is not empty."""
    value = text(body, name, where)
    if not value:
        raise invalid(f"{where}{name} is missing", f"{where}{name}")
    return value


def flag(body: Body, name: str) -> bool:
    """Return a boolean; False if it is absent."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise invalid(f"{name} is {shown(value)}, but must be true or false", name)
    return bool(value)


def integer(body: Body, name: str, *, least: int, most: int | None = None) -> int | None:
    """Return a whole number; None if it is absent."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid(f"{name} is {shown(value)}, but must be a whole number", name)
    if value < least or (most is not None and value > most):
        bound = f"at least {least}" if most is None else f"from {least} to {most}"
        raise invalid(f"{name} is {shown(value)}, but must be {bound}", name)
    return value


def number(body: Body, name: str) -> float | None:
    """Return a finite number; None if it is absent."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid(f"{name} is {shown(value)}, but must be a number", name)
    try:
        value = float(value)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise invalid(f"{name} is not finite", name)
    return value


def items(body: Body, name: str, where: str = "") -> list[Any]:
    """Return a list; empty if it is absent."""
    value = body.get(name)
    if value is not None and not isinstance(value, list):
        raise invalid(f"{where}{name} is {shown(value)}, but must be a list", f"{where}{name}")
    return few(value or [], f"{where}{name}")


def few(found: list[Any], where: str) -> list[Any]:
    """Reject a list with more entries than one request can need: each takes a microsecond."""
    if len(found) > _MOST_ITEMS:
        raise invalid(f"{where} has {len(found):,} entries, of {_MOST_ITEMS:,} at most", where)
    return found


def strings(body: Body, name: str) -> tuple[str, ...]:
    """Return a string or a list of strings, without empty ones."""
    value = body.get(name)
    found = [value] if isinstance(value, str) else items(body, name)
    for each in found:
        if not isinstance(each, str):
            raise invalid(f"{name} has {shown(each)}, but must have strings only", name)
    return tuple(each for each in found if each)


def content_text(content: object, where: str) -> str:
    """Text of a message's content: a string, nothing, or a list of parts, which are joined."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{where} is {shown(content)}, but must be a string or a list", where)
    parts = enumerate(few(content, where))
    return "".join([part_text(part, f"{where}[{index}]") for index, part in parts])


def part_text(part: object, where: str) -> str:
    """Text of one part; hidden parts have none."""
    if isinstance(part, str):
        return part
    found = record(part, where)
    kind = found.get("type")
    kind = kind if isinstance(kind, str) else None
    if kind in _NOT_TEXT:
        raise invalid(f"{where} is a part of type {kind}, but this model reads text only", where)
    if kind == "refusal":
        return text(found, "refusal", f"{where}.") or ""
    if kind is None or kind in _TEXT_PARTS or "text" in found:
        return text(found, "text", f"{where}.") or ""
    return ""


def arguments_text(value: object, where: str) -> str:
    """Arguments of a call as JSON text; some clients send an object."""
    if value is None:
        return "{}"
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    raise invalid(f"{where} is {shown(value)}, but must be JSON text", where)


def function_call(function: object, call_id: str, where: str) -> ToolCall:
    """Call of a function `{name, arguments}`."""
    found = record(function, where)
    return ToolCall(
        call_id=call_id,
        name=required(found, "name", f"{where}."),
        arguments=arguments_text(found.get("arguments"), f"{where}.arguments"),
    )


def function_tool(function: object, where: str, *, schema: str = "parameters") -> Tool:
    """Tool `{name, description, parameters}`."""
    found = record(function, where)
    parameters = found.get(schema)
    return Tool(
        name=required(found, "name", f"{where}."),
        description=text(found, "description", f"{where}.") or "",
        parameters={} if parameters is None else record(parameters, f"{where}.{schema}"),
    )


class Choice(NamedTuple):
    """Setting of tool calls: forbidden, optional, required, or one named tool."""

    kind: ToolChoice
    tool: str = ""
    """Name of the tool, if it is `named`."""


def tool_choice(body: Body) -> Choice:
    """Parse `none`, `auto`, `required` (`any`), or a named tool, in all three dialects."""
    value = body.get("tool_choice")
    given = value if isinstance(value, dict) else {}
    kind = given.get("type", value)
    match kind:
        case None | "auto" | "allowed_tools":
            return Choice("auto")
        case "none":
            return Choice("none")
        case "required" | "any":
            return Choice("required")
        case "function" | "tool" | "custom" if given:
            # Chat completions nest the name, the other protocols do not.
            nested = kind in given
            found = record(given[kind], f"tool_choice.{kind}") if nested else given
            where = f"tool_choice.{kind}." if nested else "tool_choice."
            return Choice("named", required(found, "name", where))
        case _:
            raise invalid(
                f"tool_choice is {shown(value)}, but must be auto, none, required or a function",
                "tool_choice",
            )


def temperature(body: Body) -> float | None:
    """Return the temperature; None leaves it to the session."""
    return _checked(number(body, "temperature"), check_temperature, "temperature")


def top_p(body: Body) -> float | None:
    """Return the probability mass to sample from; None leaves it to the session."""
    return _checked(number(body, "top_p"), check_top_p, "top_p")


def stops(body: Body, name: str) -> tuple[str, ...]:
    """Strings that end a reply, without empty ones."""
    found = strings(body, name)
    try:
        check_stop_strings(found)
    except ValueError as error:
        raise invalid(str(error), name) from None
    return found


def _checked(value: float | None, check: Callable[[float], object], name: str) -> float | None:
    """Return a number that engines accept for sampling."""
    if value is not None:
        try:
            check(value)
        except ValueError as error:
            raise invalid(str(error), name) from None
    return value


def seed(body: Body) -> int | None:
    """Return a seed; None if it is absent."""
    value = integer(body, "seed", least=-(2**127), most=2**127)
    return None if value is None else value & _MOST_SEED


def most_tokens(body: Body, *names: str) -> int | None:
    """Token limit of a reply: the first of these fields that is present."""
    found = [value for name in names if (value := integer(body, name, least=1)) is not None]
    return found[0] if found else None


def user(body: Body) -> str:
    """Name of the client's own user, in any of the protocols; empty if it is absent."""
    metadata = body.get("metadata")
    found = (
        body.get("safety_identifier"),
        body.get("user"),
        metadata.get("user_id") if isinstance(metadata, dict) else None,
    )
    return next((each for each in found if each and isinstance(each, str)), "")


def unknown_note(body: Body, known: frozenset[str]) -> tuple[str, ...]:
    """A note that names fields which no protocol here has, such as misspelled ones."""
    found = body.keys() - known - _WITHOUT_EFFECT - _IGNORED_SAMPLING.keys()
    if not found:
        return ()
    names = [name for name in sorted(found) if _NAME.fullmatch(name)][:_NAMED]
    more = ["..."] if len(found) > len(names) else []
    return (f"unknown fields are ignored: {', '.join([*names, *more])}",)


class JsonForm(NamedTuple):
    """Form of replies that a request asks for, as an instruction to the model."""

    instruction: str = ""
    """Empty if any text will do."""
    field: str = ""
    """Field of the body that asks for it."""
    schema: str = ""
    """Its JSON schema, as JSON text."""


_ANY: Final = JsonForm()


def json_form(body: Body) -> JsonForm:
    """Find the JSON that a reply must be, in the fields of all protocols and engines.

    A schema is text for the model, and a grammar for evaluation keys: it would change the
    distribution that training assumes.
    """
    for name, found in _formats(body).items():
        kind = _member(found, "type")
        nested = _member(found, "json_schema")  # the other protocols do not nest it
        schema = _member(found if nested is None else nested, "schema")
        if kind == "json_schema" and schema is not None:
            return _of_schema(schema, name)
        if kind in ("json_schema", "json_object"):
            text = "Reply with one JSON object, and with nothing else."
            return JsonForm(text, name, '{"type": "object"}')
    for name, schema in (
        ("guided_json", body.get("guided_json")),
        ("structured_outputs", _member(body.get("structured_outputs"), "json")),
        ("json_schema", body.get("json_schema")),
    ):
        if schema:
            return _of_schema(schema, name)
    return _ANY


def _formats(body: Body) -> dict[str, Any]:
    """Formats of the reply, by field."""
    return {
        "response_format": body.get("response_format"),
        "text.format": _member(body.get("text"), "format"),
        "output_format": body.get("output_format"),
        "output_config.format": _member(body.get("output_config"), "format"),
    }


def _of_schema(schema: object, name: str) -> JsonForm:
    if isinstance(schema, str):
        try:
            schema = parse_value(schema)
        except ValueError as error:
            raise invalid(f"{name} is not JSON: {error}", name) from None
    if not isinstance(schema, dict | bool):
        raise invalid(f"{name} has the schema {shown(schema)}, but it must be an object", name)
    told = json.dumps(schema, ensure_ascii=False)
    return JsonForm(
        f"Reply with JSON that matches this JSON schema, and with nothing else:\n{told}", name, told
    )


def _member(found: object, name: str) -> Any:
    return found.get(name) if isinstance(found, dict) else None


def sampling_notes(body: Body, choice: Choice, form: JsonForm = _ANY) -> tuple[str, ...]:
    """Requested options that are not supported; the request is served without them.

    Args:
        body: body of the request.
        choice: its setting of tool calls.
        form: the form of the reply that it asks for, which has a note of its own.
    """
    notes = [
        f"{name} is ignored"
        for name, default in _IGNORED_SAMPLING.items()
        if body.get(name) not in (None, default) and name != form.field
    ]
    notes += [
        f"{name} is ignored"
        for name, found in _formats(body).items()
        if found
        and _member(found, "type") != "text"
        and name not in (form.field, "response_format")
    ]
    if choice.kind in ("required", "named"):
        notes.append(f"tool_choice {choice.kind} is not enforced")
    return tuple(notes)


def require_tool(choice: Choice, tools: Sequence[Tool], ignored: Sequence[str]) -> None:
    """Reject a `named` tool that the request does not have.

    Without any `tools`, they may be those of an earlier call.
    """
    names = [tool.name for tool in tools]
    if choice.tool and names and choice.tool not in names and not ignored:
        raise invalid(
            f"tool_choice is {shown(choice.tool)}, but must be one of the tools: "
            f"{', '.join(map(shown, names))}",
            "tool_choice",
        )


def tools_of(
    found: Sequence[Any], tool: Any, where: str = "tools"
) -> tuple[tuple[Tool, ...], tuple[str, ...]]:
    """Tools that the client runs, and notes about those that the server would have to run.

    `tool` makes a `Tool` of an entry, or None if the server would have to run it.
    """
    tools: list[Tool] = []
    notes: list[str] = []
    for index, each in enumerate(found):
        one = tool(record(each, f"{where}[{index}]"), f"{where}[{index}]")
        if one is not None:
            tools.append(one)
        else:
            notes.append("tools that the server runs are ignored")
    return tuple(tools), tuple(dict.fromkeys(notes))
