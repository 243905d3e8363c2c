"""The tables of settings in `docs/simulator.md`: `python -m simulator.schema_page` rewrites them.

They are made from the records and docstrings of `simulator.config`; a test compares.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Final

from areal_lab.settings_help import (
    Documented,
    documented_settings,
    shown_default,
    spellings_by_setting,
)
from simulator.config import SimulationConfig
from simulator.load import ALIASES, presets

PAGE: Final = Path(__file__).parents[1] / "docs" / "simulator.md"
SECTIONS: Final = ("settings", "presets")


def settings_tables() -> str:
    """A table for each record, as Markdown."""
    documented = documented_settings(SimulationConfig)
    lines: list[str] = []
    by_prefix: dict[str, list[Documented]] = {}
    for prefix, members in groupby(documented, key=lambda one: one.name.rpartition(".")[0]):
        by_prefix.setdefault(prefix, []).extend(members)
    for prefix, same in by_prefix.items():
        title = f"`{prefix}`" if prefix else "The file itself"
        lines += [f"### {title}", "", same[0].group, "", "| setting | default | |", "|---|---|---|"]
        for one in same:
            leaf = one.name.rpartition(".")[2]
            default = shown_default(one.default)
            lines.append(f"| `{leaf}` | `{default}` | {one.doc} |")
        lines.append("")
    lines.append("Other spellings that are understood:")
    spellings = [
        f"{', '.join(f'`{one}`' for one in others)} for `{name}`"
        for name, others in spellings_by_setting(ALIASES)
    ]
    lines.append("; ".join(spellings) + ".")
    return "\n".join(lines)


def presets_table() -> str:
    """Names and titles, as Markdown."""
    rows = [f"| `{name}` | {title} |" for name, title in presets().items()]
    return "\n".join(["| preset | |", "|---|---|", *rows])


def rewritten(page: str) -> str:
    """The page with fresh tables between its marks.

    Raises:
        ValueError: if a mark is missing.
    """
    for section, made in zip(SECTIONS, (settings_tables(), presets_table()), strict=True):
        begin, end = (f"<!-- {word} {section} -->" for word in ("begin", "end"))
        before, found, rest = page.partition(begin)
        _, found_end, after = rest.partition(end)
        if not found or not found_end:
            raise ValueError(f"the page has no {begin} .. {end}")
        page = f"{before}{begin}\n\n{made}\n\n{end}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
