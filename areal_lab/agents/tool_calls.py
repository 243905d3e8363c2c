"""Calls of tools in sampled text: found by the grammar in which a model was taught to write them.

hermes    <tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>, text around; Qwen, too
llama3    {"name": "add", "parameters": {"a": 2}}, alone; several with `;` between
mistral   [TOOL_CALLS] [{"name": "add", "arguments": {"a": 2}}], text before

What begins like a call and is none stays content, and is counted: JSON that cannot be read or has
another shape, a call that was cut off, a tool that there is not. Code in a fence is never a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias


class Call(NamedTuple):
    """A call as it was written."""

    name: str
    arguments: str
    """Text of a JSON object, as the model wrote it."""


class Piece(NamedTuple):
    """A part of a text."""

    text: str
    call: Call | None = None
    malformed: bool = False
    """Whether it begins like a call and is none."""


Grammar: TypeAlias = Callable[[str], Iterator[Piece]]
"""Takes a text apart; pieces that are no calls are in it as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """A text with its calls taken out."""

    content: str
    """Without calls the whole text as it is; with calls what is around them, stripped."""
    calls: tuple[Call, ...] = ()
    malformed: int = 0
    """What began like a call and was none; it is content."""
    unknown: int = 0
    """Calls of tools that there are not; they are content."""


def parse_calls(text: str, tools: Collection[str], grammar: Grammar) -> Parsed:
    """Take the calls out of a text.

    Args:
        text: as sampled, up to its end token.
        tools: names that may be called; without any nothing is a call.
        grammar: of `GRAMMARS`.
    """
    if not tools:
        return Parsed(content=text)
    calls, content = [], []
    malformed = unknown = 0
    for piece in grammar(text):
        if piece.call is not None and piece.call.name in tools:
            calls.append(piece.call)
        else:
            content.append(piece.text)
            malformed += piece.malformed
            unknown += piece.call is not None
    return Parsed(
        content="".join(content).strip() if calls else text,
        calls=tuple(calls),
        malformed=malformed,
        unknown=unknown,
    )


def split_thinking(text: str, *, opened: bool) -> tuple[str | None, str]:
    """What a model thought and what it then said.

    Args:
        text: as sampled.
        opened: whether the prompt ends with `<think>`.

    Returns:
        The text in `<think>` without blank lines around it, None if the text does not begin with
        one, and the text after it. Thinking that does not end, because it was cut off, is all.
    """
    begun = text.lstrip()
    if not (opened or begun.startswith(_THINK)):
        return None, text
    thought, _, said = begun.removeprefix(_THINK).partition(_THOUGHT)
    return thought.strip("\n"), said.lstrip("\n")


def grammar_named(name: str, written: str, call: Call) -> Grammar:
    """The grammar with a name of `GRAMMARS`, or with `auto` the one that a template writes.

    Args:
        name: of the grammar.
        written: a call as the template writes it.
        call: the same call.

    Raises:
        ValueError: in one line: the name is unknown, or no grammar reads what the template writes.
    """
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
MARKS: Final = frozenset({_THINK, _THOUGHT, _OPEN, _CLOSE, _MISTRAL})
"""What the grammars look for: kept in the text of an answer where a vocabulary has it as a special
token, which decoding leaves out."""
_SPACE: Final = re.compile(r"[ \t\n\r]*")
_NAMED: Final = re.compile(r'\{[ \t\n\r]*"name"[ \t\n\r]*:')


def _hermes(text: str) -> Iterator[Piece]:
    at = 0
    while (start := text.find(_OPEN, at)) >= 0:
        yield Piece(text[at:start])
        inside = start + len(_OPEN)
        try:
            call, end = _call_at(text, _after_space(text, inside), ("arguments",))
            end = _after_space(text, end)
            if not text.startswith(_CLOSE, end):
                raise _NoCall
            at = end + len(_CLOSE)
            yield Piece(text[start:at], call)
        except _NoCall:
            # Up to its end or to the next call, which may be a good one.
            close, following = text.find(_CLOSE, inside), text.find(_OPEN, inside)
            ends = [close + len(_CLOSE)] if close >= 0 else []
            ends += [following] if following >= 0 else []
            at = min(ends, default=len(text))
            yield Piece(text[start:at], malformed=True)
    yield Piece(text[at:])


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
        # A JSON object with a name and without parameters is an answer like any other.
        answer = error.is_object and not pieces
        yield Piece(text, malformed=begins and not answer)


def _mistral(text: str) -> Iterator[Piece]:
    before, mark, rest = text.partition(_MISTRAL)
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
        yield from pieces
        yield Piece(rest[at:])
    except _NoCall:
        yield Piece(mark + rest, malformed=True)


def _none(text: str) -> Iterator[Piece]:
    yield Piece(text)


GRAMMARS: Final[Mapping[str, Grammar]] = MappingProxyType(
    {"hermes": _hermes, "llama3": _llama3, "mistral": _mistral, "none": _none}
)
"""Grammars of calls by name; with `none` nothing is a call."""


class _NoCall(Exception):
    """There is no call here."""

    def __init__(self, *, is_object: bool = False) -> None:
        super().__init__()
        self.is_object = is_object
        """Whether there is a JSON object without arguments, and nothing else."""


def _call_at(text: str, start: int, keys: Collection[str]) -> tuple[Call, int]:
    """The call that begins at `start`, and where it ends.

    Args:
        text: of the answer.
        start: of the JSON object.
        keys: names under which there may be arguments.

    Raises:
        _NoCall: it is not an object with a name and arguments.
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise _NoCall from error
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
"""Refuses NaN and infinities, which other languages cannot read."""
