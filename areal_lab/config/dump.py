"""Write settings as YAML that `load_record` reads back: only what differs, with units as comments.

    to_yaml(record, start)    load_record(start, FILE) == record

Floats are written with all their digits, infinity as `.inf`. Text is quoted wherever YAML, or the
reader of `${a.b}`, would take it for something else.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from areal_lab.config.mappings import texts
from areal_lab.config.problem import ConfigError, Kind, Problem
from areal_lab.config.record import Record, settings, value_of

_R = TypeVar("_R", bound=Record)

_PLAIN: Final = re.compile(r"[A-Za-z_][\w./+-]*(?: [\w./+-]+)*")
"""Text that needs no quotes, unless YAML reads it as a word of its own."""
_WORDS: Final = frozenset(("true", "false", "yes", "no", "on", "off", "y", "n", "null"))
"""What YAML 1.1 reads as a truth value or as nothing."""
_REFERENCE: Final = re.compile(r"(\\*)\$\{")
"""The start of OmegaConf's `${a.b}`, with the backslashes before it, which escape one another."""
_MISSING: Final = "???"
"""OmegaConf's mark of a value that has to be set."""


def to_yaml(record: _R, start: _R | None = None, *, head: Sequence[str] = ()) -> str:
    """The settings of a record that differ from `start`, as YAML.

        to_yaml(config)                              what differs from the defaults
        to_yaml(config, load_simulation("small"))    what differs from a preset

    Args:
        record: settings, with nested records as nested mappings.
        start: what the reader starts from; None takes the defaults of the record's type.
        head: lines of comment to begin with.

    Raises:
        ConfigError: one line for each text that YAML cannot hold (`???` marks a missing value).
    """
    start = type(record)() if start is None else start
    known = {one.name: one for one in settings(type(record))}
    lines = [f"# {line}".rstrip() for line in head]
    opened: list[str] = []
    wrong: list[Problem] = []
    for name in _in_groups(known):
        value, unit = value_of(record, name), known[name].unit
        if value == value_of(start, name):
            continue
        if _MISSING in texts(value):
            problem = f"{name} is {value!r}, but {_MISSING!r} marks a missing value; use another"
            wrong.append(Problem(Kind.SETTINGS, name, problem))
            continue
        *groups, leaf = name.split(".")
        shared = 0
        while shared < min(len(groups), len(opened)) and groups[shared] == opened[shared]:
            shared += 1
        for depth in range(shared, len(groups)):
            lines.append(f"{'  ' * depth}{groups[depth]}:")
        opened = groups
        comment = f"  # {unit}" if unit else ""
        lines.append(f"{'  ' * len(groups)}{leaf}: {_written(value)}{comment}")
    if wrong:
        raise ConfigError(*wrong)
    return "".join(f"{line}\n" for line in lines)


def _in_groups(names: Sequence[str] | dict[str, Any]) -> Iterator[str]:
    """The names in their order, but each group in one piece: a mapping has each key once."""
    grouped: dict[str, list[str]] = {}
    for name in names:
        first, dot, rest = name.partition(".")
        grouped.setdefault(first, []).append(rest if dot else "")
    for first, rests in grouped.items():
        if rests == [""]:
            yield first
        else:
            yield from (f"{first}.{rest}" for rest in _in_groups(rests))


def _written(value: Any) -> str:
    """A value on one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_text(name)}: {_written(one)}' for name, one in value.items())}}}"
    if isinstance(value, Record):
        plain = type(value).model_construct()
        fields = {
            name: getattr(value, name)
            for name, field in type(value).model_fields.items()
            if field.is_required() or getattr(value, name) != getattr(plain, name)
        }
        return f"{{{', '.join(f'{name}: {_written(one)}' for name, one in fields.items())}}}"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, float):
        return _number(value)
    return json.dumps(value)  # true, null, integers


def _number(value: float) -> str:
    text = repr(value)
    return {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(text, text)


def _text(value: str) -> str:
    if _PLAIN.fullmatch(value) and value.isascii() and value.lower() not in _WORDS:
        return value
    yaml: Any = importlib.import_module("yaml")  # by name: it has no types
    escaped = _REFERENCE.sub(r"\1\1\\${", value)
    return str(yaml.safe_dump(escaped, default_style='"', width=float("inf")).rstrip("\n"))
