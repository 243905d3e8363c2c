"""Dictionaries as Python and JSON print them, without evaluation and with bounded depth.

    {'loss': 0.1, 'kl': nan, 'x': np.float64(2.0), 'y': {...}}   or  {"loss": 0.1, "kl": NaN}

Numbers stay text, so that callers see their digits. A text that ends inside a dictionary gives the
pairs that are complete; a number at a cut end is not complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

DEPTH: Final = 64
"""Deepest nesting that is read."""
_BLANK: Final = re.compile(r"\s*")
_STRING: Final = re.compile(
    r"[ub]?(?:'([^'\\]*(?:\\.[^'\\]*)*)'|\"([^\"\\]*(?:\\.[^\"\\]*)*)\")", re.DOTALL
)
_BARE: Final = re.compile(r"[^\s,:{}\[\]()'\"]+")
_CALL: Final = re.compile(r"\([^()]{0,400}(?:\([^()]{0,400}\)[^()]{0,400}){0,8}\)")
_ESCAPE: Final = re.compile(r"\\(.)", re.DOTALL)
_PLAIN_PAIR: Final = re.compile(
    r"\s*(?:'([^'\\]*)'|\"([^\"\\]*)\")\s*:\s*"
    r"(?:([^\s,:{}\[\]()'\"]+)|'([^'\\]*)'|\"([^\"\\]*)\")\s*([,}])"
)
"""A pair of texts without escapes and its end: by far most pairs."""
_WORDS: Final[Mapping[str, Any]] = {
    "None": None,
    "null": None,
    "True": True,
    "true": True,
    "False": False,
    "false": False,
}


@dataclass(frozen=True, slots=True)
class Parsed:
    """A dictionary, the position behind it, and whether it was complete."""

    value: dict[str, Any]
    end: int
    complete: bool
    lost: int
    """Pairs that could not be read."""


class _CutError(Exception):
    """The text ends inside a value."""


class _Reader:
    """Position in a text. Values: str (also of numbers), None, bool, list, dict."""

    def __init__(self, text: str, at: int) -> None:
        self.text, self.at, self.lost = text, at, 0

    def peek(self) -> str:
        found = _BLANK.match(self.text, self.at)
        assert found is not None  # it matches nothing, too
        self.at = found.end()
        if self.at >= len(self.text):
            raise _CutError
        return self.text[self.at]

    def value(self, depth: int) -> Any:
        if depth > DEPTH:
            raise ValueError(f"nested more than {DEPTH} levels deep")
        first = self.peek()
        if first == "{":
            into: dict[str, Any] = {}
            self.pairs(into, depth)
            return into
        if first in "[(":
            return self.sequence(depth, "]" if first == "[" else ")")
        return self.scalar()

    def scalar(self) -> Any:
        if (found := _STRING.match(self.text, self.at)) is not None:
            self.at = found.end()
            return _ESCAPE.sub(r"\1", found[1] if found[1] is not None else found[2])
        if self.text[self.at] in "'\"":
            raise _CutError
        start = self.at
        if (found := _BARE.match(self.text, self.at)) is None:
            raise ValueError("not a value")
        self.at = found.end()
        if self.at < len(self.text) and self.text[self.at] == "(":
            if (call := _CALL.match(self.text, self.at)) is None:
                raise _CutError
            self.at = call.end()
        self.peek()  # a number at the end of the text may lack digits
        word = self.text[start : self.at].rstrip()
        return _WORDS.get(word, word)

    def sequence(self, depth: int, closing: str) -> list[Any]:
        self.at += 1
        items: list[Any] = []
        while self.peek() != closing:
            items.append(self.value(depth + 1))
            if self.peek() == ",":
                self.at += 1
            elif self.text[self.at] != closing:
                raise ValueError("not a list")
        self.at += 1
        return items

    def pairs(self, into: dict[str, Any], depth: int, *, opened: bool = False) -> None:
        """Read pairs into `into`, also those before an error or the end of the text."""
        if not opened:
            self.peek()
            self.at += 1
        while True:
            while (plain := _PLAIN_PAIR.match(self.text, self.at)) is not None:
                single, double, word, quoted, also, behind = plain.groups()
                self.at = plain.end()
                into[double if single is None else single] = (
                    _WORDS.get(word, word)
                    if word is not None
                    else also
                    if quoted is None
                    else quoted
                )
                if behind == "}":
                    return
            if self.peek() == "}":
                break
            key = self.scalar()
            if self.peek() != ":":
                raise ValueError("not a pair")
            self.at += 1
            if self.peek() == "{":
                inner: dict[str, Any] = {}
                into[str(key)] = inner
                self.pairs(inner, depth + 1) if depth < DEPTH else self.value(depth + 1)
            else:
                into[str(key)] = self.value(depth + 1)
            if self.peek() == ",":
                self.at += 1
            elif self.text[self.at] != "}":
                del into[str(key)]  # something was written into it
                raise ValueError("not a pair")
        self.at += 1


def read_dict(text: str, start: int = 0, *, opened: bool = False) -> Parsed:
    """Read the dictionary that begins at `start`.

    Args:
        text: may end anywhere, and may go on behind the dictionary.
        start: position of its brace, or of the first key.
        opened: the brace is missing, as in a paste.
    """
    if not opened and (plain := _plain_json(text, start)) is not None:
        return plain
    reader = _Reader(text, start)
    found: dict[str, Any] = {}
    lost, complete = 0, True
    while True:
        try:
            reader.pairs(found, 0, opened=opened)
            break
        except _CutError:
            complete, lost = False, lost + 1
            break
        except ValueError:
            lost += 1
            again = _NEXT_PAIR.search(text, reader.at)
            if again is None:
                complete = False
                break
            reader.at, opened = again.end(), True
    return Parsed(found, reader.at, complete, lost)


def _plain_json(text: str, start: int) -> Parsed | None:
    """Read a complete JSON object without escapes with Python's reader, which is the faster one."""
    if not text.startswith('{"', start) or "\\" in text:
        return None
    if text.count("{") + text.count("[") > DEPTH:
        return None
    try:
        value, end = _JSON.raw_decode(text, start)
    except ValueError:
        return None
    return Parsed(value, end, complete=True, lost=0)


_JSON: Final = json.JSONDecoder(parse_float=str, parse_int=str, parse_constant=str)
_NEXT_PAIR: Final = re.compile(r",\s*(?=['\"][^'\"\n]{1,200}['\"]:)")


def flat(value: dict[str, Any], *, separator: str = "/") -> dict[str, Any]:
    """Nested dictionaries as one, with keys joined."""
    found: dict[str, Any] = {}
    pending = [("", value)]
    while pending:
        prefix, inner = pending.pop()
        for key, one in inner.items():
            if isinstance(one, dict):
                pending.append((f"{prefix}{key}{separator}", one))
            else:
                found[f"{prefix}{key}"] = one
    return found
