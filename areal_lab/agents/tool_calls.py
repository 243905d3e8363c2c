"""Tool calls in sampled text, parsed by the grammar that the model was trained to write.

hermes        <tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>, text around; Qwen, too
qwen3_coder   <tool_call><function=add><parameter=a>2</parameter></function></tool_call>
glm           <tool_call>add<arg_key>a</arg_key><arg_value>2</arg_value></tool_call>
llama3        {"name": "add", "parameters": {"a": 2}}, alone; several with `;` between
mistral       [TOOL_CALLS] [{"name": "add", "arguments": {"a": 2}}], text before
mistral_args  [TOOL_CALLS]add[ARGS]{"a": 2}, text before
phi4          <|tool_call|>[{"name": "add", "arguments": {"a": 2}}]<|/tool_call|>; Granite 3, too
deepseek      begin-mark add sep-mark {"a": 2} end-mark, each mark a token of DeepSeek

Text that starts like a call but is not one stays content, and is counted: invalid JSON, another
shape, a truncated call, an unknown tool. Code in a fence is never a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias


class Call(NamedTuple):
    """A call as it was written."""

    name: str
    arguments: str
    """Text of a JSON object, as the model wrote it."""


class _Untyped(Call):
    """A call whose arguments are plain text: the tool's schema defines their types."""

    __slots__ = ()


class Piece(NamedTuple):
    """A part of a text."""

    text: str
    call: Call | None = None
    malformed: bool = False
    """True if it starts like a call but is not one."""


Grammar: TypeAlias = Callable[[str], Iterator[Piece]]
"""Split a text into pieces; text that is not a call stays as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """Content and calls of a text."""

    content: str
    """Without calls the whole text unchanged; with calls the text around them, stripped."""
    calls: tuple[Call, ...] = ()
    malformed: int = 0
    """Text that starts like a call but is not one; it is content."""
    unknown: int = 0
    """Calls of tools that do not exist; they are content."""


def parse_calls(
    text: str, tools: Collection[str] | Mapping[str, Mapping[str, Any]], grammar: Grammar
) -> Parsed:
    """Extract the calls from a text.

    `tools` has the names that may be called, optionally with the JSON schemas of their arguments;
    without any, nothing is a call.
    """
    if not tools:
        return Parsed(content=text)
    calls, content = [], []
    malformed = unknown = 0
    for piece in grammar(text):
        call = piece.call
        if call is not None and call.name in tools:
            schema = tools[call.name] if isinstance(tools, Mapping) else {}
            calls.append(_typed(call, schema) if isinstance(call, _Untyped) else call)
        else:
            content.append(piece.text)
            malformed += piece.malformed
            unknown += piece.call is not None
    said = "".join(content)
    for frame in _FRAMES if calls else ():
        said = said.replace(frame, "")
    return Parsed(
        content=said.strip() if calls else text,
        calls=tuple(calls),
        malformed=malformed,
        unknown=unknown,
    )


def split_thinking(text: str, *, opened: bool) -> tuple[str | None, str]:
    """Split a response into thinking and the rest.

    The thinking is the text in `<think>` without blank lines around it, or None if the text does
    not begin with one. Truncated thinking has no rest.
    """
    begun = text.lstrip()
    if not (opened or begun.startswith(_THINK)):
        return None, text
    thought, _, said = begun.removeprefix(_THINK).partition(_THOUGHT)
    return thought.strip("\n"), said.lstrip("\n")


def grammar_named(name: str, written: str, call: Call) -> Grammar:
    """Grammar of `GRAMMARS` by name; with `auto` the one that a template writes."""
    if name in GRAMMARS:
        return GRAMMARS[name]
    names = ", ".join(GRAMMARS)
    if name != "auto":
        raise ValueError(f"the tool-call grammar is {name!r}, but must be one of auto, {names}")
    for grammar in GRAMMARS.values():
        read = parse_calls(written, {call.name}, grammar).calls
        if len(read) == 1 and json.loads(read[0].arguments) == json.loads(call.arguments):
            return grammar
    raise ValueError(
        f"the chat template writes calls of tools as {written!r}, which no grammar reads; set "
        f"tool_call_parser to the one that the model was taught ({names}), none without tools"
    )


_THINK: Final = "<think>"
_THOUGHT: Final = "</think>"
_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"
_MISTRAL: Final = "[TOOL_CALLS]"
_ARGS: Final = "[ARGS]"
_PHI4: Final = ("<|tool_call|>", "<|/tool_call|>")
_DEEPSEEK: Final = (
    "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581call\u2581end\uff5c>",
)
_SEPARATOR: Final = "<\uff5ctool\u2581sep\uff5c>"
_FRAMES: Final = (
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<\uff5ctool\u2581calls\u2581end\uff5c>",
)
"""Marks around all calls of a response; they carry no information."""
MARKS: Final = frozenset(
    {_THINK, _THOUGHT, _OPEN, _CLOSE, _MISTRAL, _ARGS, *_PHI4, *_DEEPSEEK, _SEPARATOR}
)
"""Marks of the grammars: kept in the text of a response if they are special tokens, which
decoding leaves out."""
_SPACE: Final = re.compile(r"[ \t\n\r]*")
_NAMED: Final = re.compile(r'\{[ \t\n\r]*"name"[ \t\n\r]*:')


def _tagged(
    opens: str, closes: str, read: Callable[[str, int], tuple[Call, int]], text: str
) -> Iterator[Piece]:
    """Calls between tags; `read` returns the call at a position, and its end."""
    at = 0
    while (start := text.find(opens, at)) >= 0:
        yield Piece(text[at:start])
        inside = start + len(opens)
        try:
            call, end = read(text, _after_space(text, inside))
            end = _after_space(text, end)
            if not text.startswith(closes, end):
                raise _NoCall
            at = end + len(closes)
            yield Piece(text[start:at], call)
        except _NoCall:
            # Up to its end or to the next call, which may be valid.
            close, following = text.find(closes, inside), text.find(opens, inside)
            ends = [close + len(closes)] if close >= 0 else []
            ends += [following] if following >= 0 else []
            at = min(ends, default=len(text))
            yield Piece(text[start:at], malformed=True)
    yield Piece(text[at:])


def _hermes_call(text: str, at: int) -> tuple[Call, int]:
    return _call_at(text, at, ("arguments",))


def _xml_call(text: str, at: int) -> tuple[Call, int]:
    """Call of Qwen3-Coder: a function with parameters, whose values may have several lines."""
    name, at = _between(text, at, "<function=", ">")
    given: dict[str, str] = {}
    while text.startswith("<parameter=", at := _after_space(text, at)):
        key, at = _between(text, at, "<parameter=", ">")
        value, at = _between(text, at, "", "</parameter>")
        given[key] = value.removeprefix("\n").removesuffix("\n")
    _, at = _between(text, at, "</function>", "")
    return _Untyped(name, json.dumps(given, ensure_ascii=False)), at


def _glm_call(text: str, at: int) -> tuple[Call, int]:
    """Call of GLM-4.5 and later: a name, then keys and values."""
    found = re.compile(r"[^<\s]+").match(text, at)
    if found is None:
        raise _NoCall
    at, given = _after_space(text, found.end()), {}
    while text.startswith("<arg_key>", at):
        key, at = _between(text, at, "<arg_key>", "</arg_key>")
        given[key], at = _between(text, _after_space(text, at), "<arg_value>", "</arg_value>")
        at = _after_space(text, at)
    return _Untyped(found[0], json.dumps(given, ensure_ascii=False)), at


def _deepseek_call(text: str, at: int) -> tuple[Call, int]:
    """Call of DeepSeek V3.1, `name<sep>{}`, or of V3 and R1, `function<sep>name` and a fence."""
    name, at = _between(text, at, "", _SEPARATOR)
    fenced = name == "function"
    if fenced:
        name, at = _between(text, at, "", "\n```json\n")
    start = _after_space(text, at)
    value, end = _json_at(text, start)
    if not isinstance(value, dict) or not name.strip():
        raise _NoCall
    call = Call(name.strip(), text[start:end])
    return call, _between(text, _after_space(text, end), "```", "")[1] if fenced else end


def _between(text: str, at: int, opens: str, closes: str) -> tuple[str, int]:
    """Text between two marks, the first of which is at `at`, and its end."""
    begin = at + len(opens)
    end = text.find(closes, begin)
    if not text.startswith(opens, at) or end < 0:
        raise _NoCall
    return text[begin:end], end + len(closes)


def _typed(call: Call, schema: Mapping[str, Any]) -> Call:
    """Convert arguments to the types of the tool's schema.

    Text stays text where the schema says so; without a type, text that parses as JSON is converted.
    """
    properties = schema.get("properties")
    given: dict[str, Any] = json.loads(call.arguments)
    for key, text in given.items():
        about = properties.get(key) if isinstance(properties, Mapping) else None
        if isinstance(about, Mapping) and about.get("type") == "string":
            continue
        try:
            given[key] = _DECODER.decode(text)
        except (ValueError, RecursionError):
            continue
    return Call(call.name, json.dumps(given, ensure_ascii=False))


def _llama3(text: str) -> Iterator[Piece]:
    pieces, at = [], _after_space(text, 0)
    try:
        while True:
            call, end = _call_at(text, at, ("parameters", "arguments"))
            pieces.append(Piece(text[at:end], call))
            at = _after_space(text, end)
            if at == len(text):
                break
            if text[at] != ";":
                raise _NoCall
            at = _after_space(text, at + 1)
        yield from pieces
    except _NoCall as error:
        begins = _NAMED.match(text, _after_space(text, 0)) is not None
        # A JSON object with a name but no parameters is an ordinary response.
        answer = error.is_object and not pieces
        yield Piece(text, malformed=begins and not answer)


def _listed(mark: str, closes: str, text: str) -> Iterator[Piece]:
    """One call, or a list of calls, behind a mark."""
    before, mark, rest = text.partition(mark)
    yield Piece(before)
    if not mark:
        return
    try:
        pieces, at = [], _after_space(rest, 0)
        several = rest.startswith("[", at)
        at = _after_space(rest, at + several)
        while True:
            call, end = _call_at(rest, at, ("arguments",))
            pieces.append(Piece(rest[at:end], call))
            at = _after_space(rest, end)
            if not several:
                break
            following = rest[at : at + 1]
            at = _after_space(rest, at + 1)
            if following == "]":
                break
            if following != ",":
                raise _NoCall
        at += len(closes) if rest.startswith(closes, at) else 0
        yield from pieces
        yield Piece(rest[at:])
    except _NoCall:
        yield Piece(mark + rest, malformed=True)


def _mistral_args(text: str) -> Iterator[Piece]:
    """Calls of Mistral from v11 on: a mark, a name, a mark, the arguments."""
    before, *others = text.split(_MISTRAL)
    yield Piece(before)
    for other in others:
        name, mark, rest = other.partition(_ARGS)
        name = name.partition("[CALL_ID]")[0].strip()
        try:
            start = _after_space(rest, 0)
            value, end = _json_at(rest, start)
            if not (mark and name and isinstance(value, dict)):
                raise _NoCall
            yield Piece(
                f"{_MISTRAL}{other[: len(other) - len(rest) + end]}", Call(name, rest[start:end])
            )
            yield Piece(rest[end:])
        except _NoCall:
            yield Piece(_MISTRAL + other, malformed=True)


def _none(text: str) -> Iterator[Piece]:
    yield Piece(text)


GRAMMARS: Final[Mapping[str, Grammar]] = MappingProxyType(
    {
        "hermes": partial(_tagged, _OPEN, _CLOSE, _hermes_call),
        "llama3": _llama3,
        "mistral": partial(_listed, _MISTRAL, ""),
        "mistral_args": _mistral_args,
        "phi4": partial(_listed, *_PHI4),
        "deepseek": partial(_tagged, *_DEEPSEEK, _deepseek_call),
        "qwen3_coder": partial(_tagged, _OPEN, _CLOSE, _xml_call),
        "glm": partial(_tagged, _OPEN, _CLOSE, _glm_call),
        "none": _none,
    }
)
"""Grammars of calls by name; with `none` nothing is a call."""


class _NoCall(Exception):
    """No call at this position."""

    def __init__(self, *, is_object: bool = False) -> None:
        super().__init__()
        self.is_object = is_object
        """True if there is a JSON object without arguments, and nothing else."""


def _call_at(text: str, start: int, keys: Collection[str]) -> tuple[Call, int]:
    """The call that begins at `start`, and its end."""
    value, end = _json_at(text, start)
    given = [key for key in keys if key in value] if isinstance(value, dict) else []
    if not given:
        whole = isinstance(value, dict) and _after_space(text, end) == len(text)
        raise _NoCall(is_object=whole)
    name, arguments = value.get("name"), value[given[0]]
    if not (isinstance(name, str) and name and len(given) == 1):
        raise _NoCall
    if isinstance(arguments, dict):
        return Call(name, _member(text, start, given[0])), end
    # Some models write the object as a string.
    if isinstance(arguments, str) and _is_object(arguments):
        return Call(name, arguments), end
    raise _NoCall


def _json_at(text: str, start: int) -> tuple[Any, int]:
    """The JSON value at a position, and its end."""
    try:
        found: tuple[Any, int] = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise _NoCall from error
    return found


def _is_object(text: str) -> bool:
    try:
        return isinstance(_DECODER.decode(text), dict)
    except (ValueError, RecursionError):
        return False


def _member(text: str, start: int, key: str) -> str:
    """Text of a member of the valid JSON object at `start`; of the last one with this key."""
    found, at = "", _after_space(text, start + 1)
    while text[at] != "}":
        name, at = _DECODER.raw_decode(text, at)
        at = _after_space(text, _after_space(text, at) + 1)
        _, end = _DECODER.raw_decode(text, at)
        found = text[at:end] if name == key else found
        at = _after_space(text, end)
        at = _after_space(text, at + 1) if text[at] == "," else at
    return found


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_DECODER: Final[Any] = json.JSONDecoder(parse_constant=_refused)
"""Rejects NaN and infinities, which other languages cannot parse."""
