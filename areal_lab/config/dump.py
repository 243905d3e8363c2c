"""Settings as text: YAML that `load_record` reads back, and the reference of all settings."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby
from typing import Any, Final, TypeVar

from areal_lab.config.load import ALIASES
from areal_lab.config.mappings import texts
from areal_lab.config.problem import ConfigError, Kind, Problem
from areal_lab.config.record import Record, Setting, is_record, settings, shown_default, value_of
from areal_lab.config.schema import TrainConfig
from areal_lab.host.terminal import printable

_R = TypeVar("_R", bound=Record)

_PLAIN: Final = re.compile(r"[A-Za-z_][\w./+-]*(?: [\w./+-]+)*")
"""Text that needs no quotes, unless YAML reads it as a word of its own."""
_WORDS: Final = frozenset(("true", "false", "yes", "no", "on", "off", "y", "n", "null"))
"""Words that YAML 1.1 reads as a truth value or as null."""
_REFERENCE: Final = re.compile(r"(\\*)\$\{")
"""Start of OmegaConf's `${a.b}`, with the backslashes before it, which escape one another."""
_MISSING: Final = "???"
"""OmegaConf's mark of a value that has to be set."""


def to_yaml(record: _R, start: _R | None = None, *, head: Sequence[str] = ()) -> str:
    """Return the settings of a record that differ from `start`, as YAML.

        to_yaml(config)                              what differs from the defaults
        to_yaml(config, load_simulation("small"))    what differs from a preset

    Args:
        start: settings from which the reader starts; None takes the defaults of the record's type.
    """
    start = type(record)() if start is None else start
    known = {one.name: one for one in settings(type(record))}
    differ = {one for one in known if value_of(record, one) != value_of(start, one)}
    # Defaults that follow these have to be written where the record has them as they were.
    follow = start.with_settings({one: value_of(record, one) for one in differ})
    differ |= {one for one in known if value_of(record, one) != value_of(follow, one)}
    lines = [f"# {' '.join(printable(line).split())}".rstrip() for line in head]
    opened: list[str] = []
    wrong: list[Problem] = []
    for name in _in_groups(known):
        value, unit = value_of(record, name), known[name].unit
        if name not in differ:
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
    """Sort names so that each group is in one piece: a mapping can have each key only once."""
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


_INDENT = "      "


def description(setting: Setting) -> str:
    """The string below the setting's field; empty without one."""
    return _below_field(setting.record, setting.leaf)


def headings(record: type[Record], prefix: str = "") -> dict[str, str]:
    """Return a one-line description of each group of settings, from its field or its record."""
    found = {prefix: inspect.cleandoc(record.__doc__ or "").split("\n", 1)[0]}
    for name, field in record.model_fields.items():
        kind: Any = field.annotation
        if is_record(kind):
            group = f"{prefix}{name}."
            found |= headings(kind, group)
            if text := _below_field(record, name):
                found[group] = text
    return found


def format_settings(
    record: type[Record] = TrainConfig, aliases: Mapping[str, str] = ALIASES, *, width: int = 100
) -> str:
    """Return the reference as text for a terminal."""
    lines: list[str] = []
    about = headings(record)
    for group, members in groupby(settings(record), key=lambda one: one.group):
        lines += ["", about[group]]
        for one in members:
            head = f"{one.name} = {shown_default(one.default)}  ({one.allowed})"
            lines += _wrapped(head, width, indent="  ")
            lines += _wrapped(description(one), width, indent=_INDENT)
    if aliases:
        lines += ["", "Other names of settings"]
    for name, others in other_names(aliases):
        lines += _wrapped(f"{name}: {', '.join(others)}", width, indent="  ")
    return "\n".join(lines).lstrip("\n")


def markdown_tables(
    record: type[Record], aliases: Mapping[str, str], *, without: Sequence[str] = ()
) -> str:
    """Return the reference in Markdown: one table per record, `without` some groups."""
    lines: list[str] = []
    about = headings(record)
    shown = [one for one in settings(record) if one.name.split(".")[0] not in without]
    for group, members in groupby(shown, key=lambda one: one.group):
        name = f"`{group.removesuffix('.')}`" if group else "Top level"
        lines += [f"### {name}", "", about[group], ""]
        lines += ["| setting | default | allowed | meaning |", "|---|---|---|---|"]
        for one in members:
            text = description(one).replace("|", "\\|")
            default = shown_default(one.default)
            lines.append(f"| `{one.leaf}` | `{default}` | {one.allowed} | {text} |")
        lines.append("")
    others = "; ".join(
        f"{', '.join(f'`{one}`' for one in others)} for `{name}`"
        for name, others in other_names(aliases)
    )
    return "\n".join([*lines, *([f"Other names: {others}."] if others else [])])


def other_names(aliases: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Settings with aliases, and their aliases."""
    others: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        others.setdefault(name, []).append(alias)
    yield from others.items()


def _wrapped(text: str, width: int, *, indent: str) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=_INDENT, break_on_hyphens=False
    )


def _below_field(record: type[Record], name: str) -> str:
    """The string below a field, in the record or the one that it extends."""
    for one in record.__mro__:
        if (one.__name__, name) in (found := _descriptions(one.__module__)):
            return found[one.__name__, name]
    raise KeyError(f"{record.__name__} has no field {name}")


@cache
def _descriptions(module: str) -> Mapping[tuple[str, str], str]:
    """Strings below each field of a module, by record and field; Python does not keep them.

    Pydantic (`use_attribute_docstrings`) would parse them at each import.
    """
    docs = {}
    for record in ast.parse(inspect.getsource(sys.modules[module])).body:
        if not isinstance(record, ast.ClassDef):
            continue
        for field, below in zip(record.body, [*record.body[1:], None], strict=True):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            doc = ""
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                doc = " ".join(str(below.value.value).split())
            docs[record.name, field.target.id] = doc
    return docs
