"""The reference of all settings, made from configuration records and the docstrings in them."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from areal_lab.config.load import ALIASES, Setting, settings
from areal_lab.config.schema import TrainConfig

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


def documented_settings(record: type = TrainConfig) -> list[Documented]:
    """Every setting with the docstring below its field, in the order of definition."""
    docs = _Docstrings()
    return [
        Documented(
            name=setting.name,
            type=setting.type_name,
            default=setting.default,
            doc=docs.of(setting),
            group=inspect.cleandoc(setting.record.__doc__ or "").split("\n", 1)[0],
        )
        for setting in settings(record)
    ]


def format_settings(
    record: type = TrainConfig, aliases: Mapping[str, str] = ALIASES, *, width: int = 100
) -> str:
    """The reference as text: name, default, docstring."""
    lines: list[str] = []
    group = ""
    for setting in documented_settings(record):
        if setting.group != group:
            group = setting.group
            lines += ["", group]
        lines.append(f"  {setting.name} = {shown_default(setting.default)}  ({setting.type})")
        lines += textwrap.wrap(
            setting.doc, width, initial_indent=_INDENT, subsequent_indent=_INDENT
        )
    if aliases:
        lines += ["", "Other spellings that are understood"]
    for name, spellings in spellings_by_setting(aliases):
        text = f"{name}: {', '.join(spellings)}"
        lines += textwrap.wrap(text, width, initial_indent="  ", subsequent_indent=_INDENT)
    return "\n".join(lines).lstrip("\n")


def spellings_by_setting(aliases: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Each setting that has other spellings, with these."""
    others: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        others.setdefault(name, []).append(alias)
    yield from others.items()


def shown_default(default: Any) -> str:
    """A default as one would write it in YAML."""
    if isinstance(default, bool):
        return str(default).lower()
    if default is None:
        return "null"
    return '""' if default == "" else str(default)


class _Docstrings:
    """The string below each field, by record and field; Python itself does not keep it."""

    def __init__(self) -> None:
        self._of_module: dict[str, dict[tuple[str, str], str]] = {}

    def of(self, setting: Setting) -> str:
        """The string below the setting's field; empty if there is none."""
        module = setting.record.__module__
        if module not in self._of_module:
            self._of_module[module] = _field_docs(inspect.getsource(sys.modules[module]))
        return self._of_module[module][setting.record.__name__, setting.name.rsplit(".", 1)[-1]]


def _field_docs(source: str) -> dict[tuple[str, str], str]:
    docs = {}
    for record in ast.parse(source).body:
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
