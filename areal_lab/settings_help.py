"""The reference of all settings, made from the records and docstrings in `areal_lab.config`."""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import dataclass
from typing import Any

from areal_lab import config
from areal_lab.load import ALIASES, settings

_INDENT = "      "


@dataclass(frozen=True, slots=True)
class Documented:
    """A setting as the reference shows it."""

    name: str
    type: str
    default: Any
    doc: str
    group: str
    """What the settings of its record are about."""


def documented_settings() -> list[Documented]:
    """Every setting with the docstring below its field, in the order of definition."""
    docs = _field_docs()
    return [
        Documented(
            name=setting.name,
            type=setting.type_name,
            default=setting.default,
            doc=docs[setting.record.__name__, setting.name.rsplit(".", 1)[-1]],
            group=inspect.cleandoc(setting.record.__doc__ or "").split("\n", 1)[0],
        )
        for setting in settings()
    ]


def format_settings(width: int = 100) -> str:
    """The reference as text: name, default, docstring."""
    lines: list[str] = []
    group = ""
    for setting in documented_settings():
        if setting.group != group:
            group = setting.group
            lines += ["", group]
        lines.append(f"  {setting.name} = {_shown(setting.default)}  ({setting.type})")
        lines += textwrap.wrap(
            setting.doc, width, initial_indent=_INDENT, subsequent_indent=_INDENT
        )
    others: dict[str, list[str]] = {}
    for alias, name in ALIASES.items():
        others.setdefault(name, []).append(alias)
    lines += ["", "Other spellings that are understood"]
    for name, aliases in others.items():
        text = f"{name}: {', '.join(aliases)}"
        lines += textwrap.wrap(text, width, initial_indent="  ", subsequent_indent=_INDENT)
    return "\n".join(lines).lstrip("\n")


def _field_docs() -> dict[tuple[str, str], str]:
    """The string below each field, by record and field; Python itself does not keep it."""
    docs = {}
    for record in ast.parse(inspect.getsource(config)).body:
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


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    return '""' if default == "" else str(default)
