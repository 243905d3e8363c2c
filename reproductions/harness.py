"""What every reproduction shares: rows with their gap, parameters, arguments, table and picture.

    reproduce(arguments) --> Reproduction --show--> table, JSON or picture
                                          --to_markdown--> a section of README.md

A gap is `ours / paper - 1`; for a gain, which is a percentage itself, it is the difference.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import Arguments, machine, parse, report, table
from simulator.config import SimulationConfig
from simulator.load import load_simulation
from simulator.result import Replicated
from simulator.simulation import replicate
from simulator.statistics import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXPECTED = Path(__file__).parent / "expected"
SEEDS, QUICK_SEEDS = 5, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A setting of the simulator that the paper does not print, or that was fitted."""

    name: str
    """As an override names it: `rollout.engine_overhead_s`."""
    value: float | str
    unit: str
    source: str
    fitted: bool = False
    applies_to: str = "all"

    @property
    def override(self) -> str:
        """For `load_simulation`."""
        return f"{self.name}={self.value}"

    def to_json(self) -> dict[str, Any]:
        """As the output contract has it."""
        names = ("name", "value", "unit", "source", "fitted", "applies_to")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A published number and ours."""

    name: str
    paper: float
    ours: Estimate
    unit: str
    bar: float | None = None
    """Largest gap that was aimed at; None has no aim."""
    fitted: bool = False
    """Something was fitted to this number."""
    points: bool = False
    """The gap is a difference, as the numbers are percentages (as fractions)."""

    @property
    def gap(self) -> float:
        """0.1 is 10 percent, or 10 points."""
        return self._gap(self.ours.mean)

    @property
    def gap_interval(self) -> tuple[float, float]:
        """The interval of ours, as gaps."""
        return self._gap(self.ours.low), self._gap(self.ours.high)

    @property
    def within(self) -> bool | None:
        """Whether the gap is as small as was aimed at."""
        return None if self.bar is None else abs(self.gap) <= self.bar

    def to_json(self) -> dict[str, Any]:
        """As the output contract has it."""
        return {
            "name": self.name,
            "paper": self.paper,
            "ours": self.ours.mean,
            "gap": self.gap,
            "interval": [self.ours.low, self.ours.high],
            "fitted": self.fitted,
            "unit": self.unit,
            "gap_in": "points" if self.points else "relative",
            "bar": self.bar,
            "within": self.within,
        }

    def cells(self) -> dict[str, str]:
        """For a table."""
        aim = "" if self.bar is None else f"{self.bar:.0%}" + (" pts" if self.points else "")
        verdict = {None: "", True: "met", False: "MISSED"}[self.within]
        return {
            "row": self.name,
            "unit": "" if self.points else self.unit,
            "paper": self._number(self.paper),
            "ours": self._number(self.ours.mean),
            "95 % interval": f"{self._number(self.ours.low)} .. {self._number(self.ours.high)}",
            "gap": f"{self.gap:+.1%}" + (" pts" if self.points else ""),
            "aim": aim,
            "": verdict,
            "how": "fitted" if self.fitted else "predicted",
        }

    def _gap(self, ours: float) -> float:
        return ours - self.paper if self.points else ours / self.paper - 1

    def _number(self, value: float) -> str:
        if self.points:
            return f"{value:.1%}"
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """One table or figure."""

    name: str
    claim: str
    rows: Sequence[Row]
    parameters: Sequence[Parameter]
    why: Sequence[str]
    """What was assumed, and the best explanation of each gap."""
    sensitivity: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    """The same numbers under other assumptions; flat records."""


def expected(name: str) -> dict[str, Any]:
    """The paper's numbers of a reproduction."""
    with (EXPECTED / f"{name}.json").open(encoding="utf-8") as file:
        record: dict[str, Any] = json.load(file)
    return record


def configured(
    preset: str, parameters: Iterable[Parameter], *settings: str, arguments: Arguments
) -> SimulationConfig:
    """A preset with the parameters of the reproduction, and as many seeds as were asked for."""
    overrides = [parameter.override for parameter in parameters]
    return load_simulation(preset, [*overrides, *settings, f"seeds={arguments.repeats}"])


def run(
    preset: str, parameters: Iterable[Parameter], *settings: str, arguments: Arguments
) -> Replicated:
    """Simulate it with all seeds."""
    return replicate(configured(preset, parameters, *settings, arguments=arguments))


def length(arguments: Arguments, *, steps: int, warmup: int, quick: tuple[int, int]) -> list[str]:
    """Settings of the simulated steps and those left out; fewer with `--quick`."""
    steps, warmup = quick if arguments.quick else (steps, warmup)
    return [f"workload.steps={steps}", f"workload.warmup_steps={warmup}"]


def main(
    reproduce: Callable[[Arguments], Reproduction],
    description: str | None,
    argv: Sequence[str] | None = None,
) -> None:
    """Command line of a reproduction; `--plot FILE` beside what `benchmarks.harness` takes."""
    words = list(sys.argv[1:] if argv is None else argv)
    plot = _take_option(words, "--plot")
    text = f"{description or ''}\n--plot FILE draws the gaps; --repeats N is the number of seeds."
    arguments = parse(text, repeats=SEEDS, quick_repeats=QUICK_SEEDS, argv=words)
    result = reproduce(arguments)
    if plot:
        draw(result, Path(plot))
    if not arguments.json:
        print(to_text(result, arguments))
        return
    report(to_json(result), arguments)


def to_json(result: Reproduction) -> dict[str, Any]:
    """What the output contract asks for; `report` adds machine, command and date."""
    return {
        "name": result.name,
        "claim": result.claim,
        "rows": [row.to_json() for row in result.rows],
        "parameters": [parameter.to_json() for parameter in result.parameters],
        "sensitivity": list(result.sensitivity),
        "why": list(result.why),
    }


def to_text(result: Reproduction, arguments: Arguments) -> str:
    """For a person: the table, gaps as bars, parameters and reasons."""
    here = machine(arguments)
    parts = [result.claim]
    if arguments.quick:
        parts.append("--quick: fewer steps and seeds; shows that it runs, do not quote it.")
    parts.append(table([row.cells() for row in result.rows]))
    parts.append(_bars(result.rows))
    if result.sensitivity:
        parts.append("under other assumptions\n" + table(result.sensitivity))
    parts.append(
        "\n".join(
            f"{'fitted ' if p.fitted else 'assumed'} {p.override} {p.unit} ({p.applies_to}): "
            f"{p.source}"
            for p in result.parameters
        )
    )
    parts.extend(result.why)
    parts.append(f"{arguments.repeats} seeds; {here['cpu']}, {here['cores']} cores")
    return "\n\n".join(parts)


def to_markdown(result: Reproduction) -> str:
    """A section of the README: claim, paper, ours, gap, why."""
    lines = [f"## {result.name}", "", result.claim, ""]
    lines += _markdown_table([row.cells() for row in result.rows])
    lines += ["", "Why:", "", *(f"- {reason}" for reason in result.why)]
    if result.sensitivity:
        lines += ["", "Under other assumptions:", "", *_markdown_table(result.sensitivity)]
    lines += ["", "Parameters:", ""]
    lines += _markdown_table(
        [
            {
                "setting": f"`{p.override}`",
                "unit": p.unit,
                "for": p.applies_to,
                "how": "fitted" if p.fitted else "assumed",
                "source": p.source,
            }
            for p in result.parameters
        ]
    )
    return "\n".join(lines) + "\n"


def draw(result: Reproduction, path: Path) -> None:
    """The gap of every row with its interval; hollow where fitted, grey lines at the aim."""
    from areal_lab.plots.style import save_picture

    save_picture(lambda: _draw_gaps(result.rows), path, f"{result.name}: ours against the paper")


def _draw_gaps(rows: Sequence[Row]) -> Figure:
    from areal_lab.plots.style import BLUE, GREY, VERMILION, new_figure

    figure = new_figure(8, 1.2 + 0.3 * len(rows))
    axes = figure.subplots()
    for place, row in enumerate(rows):
        color = VERMILION if row.within is False else BLUE
        low, high = (100 * (row.gap - row.gap_interval[0]), 100 * (row.gap_interval[1] - row.gap))
        error = None if math.isinf(low + high) else [[low], [high]]
        face = "white" if row.fitted else color
        axes.errorbar(100 * row.gap, place, xerr=error, fmt="o", color=color, mfc=face, capsize=3)
        if row.bar is not None:
            for side in (-100 * row.bar, 100 * row.bar):
                axes.plot([side, side], [place - 0.3, place + 0.3], color=GREY)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("gap, % (points where the numbers are percentages); hollow: fitted; grey: aim")
    return figure


def _bars(rows: Sequence[Row]) -> str:
    """One line a row: the gap to the left or right of zero."""
    width = max(len(row.name) for row in rows)
    scale = 20 / max(0.1, *(abs(row.gap) for row in rows))
    lines = []
    for row in rows:
        bar = "#" * round(abs(row.gap) * scale)
        left, right = (bar.rjust(20), "") if row.gap < 0 else (" " * 20, bar)
        lines.append(f"{row.name.ljust(width)}  {left}|{right}".rstrip())
    return "\n".join(lines)


def _markdown_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    columns = list(rows[0])
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return lines + ["| " + " | ".join(_cell(row[name]) for name in columns) + " |" for row in rows]


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")


def _take_option(words: list[str], name: str) -> str | None:
    """Remove `name VALUE` from the words; its value."""
    if name not in words:
        return None
    at = words.index(name)
    if at + 1 == len(words):
        raise SystemExit(f"{name} needs a file name")
    _, value = words.pop(at), words.pop(at)
    return value
