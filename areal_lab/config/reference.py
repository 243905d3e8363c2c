"""Reference of all settings, generated from the records: name, default, allowed values, meaning."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby
from typing import Any

from areal_lab.config.load import ALIASES
from areal_lab.config.record import Record, Setting, is_record, settings, shown_default
from areal_lab.config.schema import TrainConfig

_INDENT = "      "


def description(setting: Setting) -> str:
    """The string below the setting's field; empty if there is none."""
    return _below_field(setting.record, setting.leaf)


def headings(record: type[Record], prefix: str = "") -> dict[str, str]:
    """One-line description of each group of settings, from its field or its record."""
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
    """The reference as text for a terminal."""
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
    """The reference in Markdown: one table per record, `without` some groups."""
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
    """The string below each field of a module, by record and field; Python does not keep it.

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
