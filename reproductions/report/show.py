"""Show a reproduction: as a table, a section of README.md, or a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_lab.plots.style import BLUE, GREY, VERMILION, entitle, finished, new_figure, save_picture
from benchmarks.harness import Arguments, machine, table
from reproductions.report.records import Parameter, Reproduction, Row

if TYPE_CHECKING:
    from areal_lab.plots.picture import Picture


def to_text(result: Reproduction, arguments: Arguments) -> str:
    """Text with the table, gaps as bars, parameters and explanations."""
    here = machine(arguments)
    parts = [result.claim]
    if arguments.quick:
        parts.append("--quick: fewer steps and seeds; a check that it runs, not a result to quote.")
    if result.rows:
        parts.append(table([row.cells() for row in result.rows]))
    parts.extend(f"{title}\n{table(rows)}" for title, rows in result.tables.items())
    if any(row.gap is not None for row in result.rows):
        parts.append(_bars(result.rows))
    parts.extend(result.findings)
    if result.sensitivity:
        parts.append("under other assumptions\n" + table(result.sensitivity))
    if result.parameters:
        parts.append(
            "\n".join(
                f"{p.how} {p.override} {p.unit} ({p.applies_to}): {p.source}"
                for p in result.parameters
            )
        )
    parts.extend(result.why)
    if result.origin:
        return "\n\n".join([*parts, result.origin])
    seeds = "one seed" if arguments.repeats == 1 else f"{arguments.repeats} seeds"
    parts.append(f"{seeds}; {here['cpu']}, {here['cores']} cores")
    return "\n\n".join(parts)


def to_markdown(result: Reproduction) -> str:
    """A section of the README: claim, paper, ours, gap, explanation."""
    lines = [f"## {result.name}", "", result.claim, ""]
    if result.findings:
        lines += [*(f"- {finding}" for finding in result.findings), ""]
    lines += [f"![{result.title or result.name}](images/{result.name}.png)", ""]
    if result.rows:
        lines += [*_markdown_table(_rows(result.rows)), ""]
    for title, rows in result.tables.items():
        lines += [f"{title}:", "", *_markdown_table(rows), ""]
    lines += ["Why:", "", *(f"- {reason}" for reason in result.why)]
    if result.sensitivity:
        lines += ["", "Under other assumptions:", "", *_markdown_table(result.sensitivity)]
    if result.parameters:
        lines += ["", "Parameters:", "", *_markdown_table(list(map(_source, result.parameters)))]
    if result.origin:
        lines += ["", f"Made by {result.origin}."]
    return "\n".join(lines) + "\n"


def draw(result: Reproduction, path: Path) -> None:
    """Draw its own figure, or the gap of every row: hollow if fitted, grey lines at the aim."""
    if result.figure is not None:
        figure, title = result.figure(), result.title
    else:
        figure, title = _draw_gaps(result.rows), f"{result.name}: ours against the paper"
    save_picture(entitle(figure, title, alt=result.claim), path)


@finished
def _draw_gaps(rows: Sequence[Row]) -> Picture:
    rows = [row for row in rows if row.paper is not None]
    figure = new_figure(8, 1.2 + 0.3 * len(rows))
    axes = figure.subplots()
    for place, row in enumerate(rows):
        color = VERMILION if row.within is False else BLUE
        gap, interval = row.gap, row.gap_interval
        assert gap is not None
        assert interval is not None
        low, high = 100 * (gap - interval[0]), 100 * (interval[1] - gap)
        error = None if math.isinf(low + high) else [[low], [high]]
        face = "white" if row.fitted else color
        axes.errorbar(100 * gap, place, xerr=error, fmt="o", color=color, mfc=face, capsize=3)
        if row.bar is not None:
            for side in (-100 * row.bar, 100 * row.bar):
                axes.plot([side, side], [place - 0.3, place + 0.3], color=GREY)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("gap, % (points where the numbers are percentages); hollow: fitted; grey: aim")
    return figure


def _bars(rows: Sequence[Row]) -> str:
    """One line per row, with the gap to the left or right of zero."""
    gaps = {row.name: row.gap for row in rows if row.gap is not None}
    width = max(map(len, gaps))
    scale = 20 / max(0.1, *map(abs, gaps.values()))
    lines = []
    for name, gap in gaps.items():
        bar = "#" * round(abs(gap) * scale)
        left, right = (bar.rjust(20), "") if gap < 0 else (" " * 20, bar)
        lines.append(f"{name.ljust(width)}  {left}|{right}".rstrip())
    return "\n".join(lines)


def _rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Their cells; without a paper's number, no columns of how they compare with it."""
    cells = [row.cells() for row in rows]
    if any(row.paper is not None for row in rows):
        return cells
    dropped = {"paper", "gap", "aim", ""} | ({"how"} if not any(r.fitted for r in rows) else set())
    return [{name: cell for name, cell in own.items() if name not in dropped} for own in cells]


def _markdown_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    columns = list(rows[0])
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return lines + ["| " + " | ".join(_cell(row[name]) for name in columns) + " |" for row in rows]


def _source(parameter: Parameter) -> dict[str, str]:
    return {
        "setting": f"`{parameter.override}`",
        "unit": parameter.unit,
        "for": parameter.applies_to,
        "how": parameter.how,
        "source": parameter.source,
    }


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")
