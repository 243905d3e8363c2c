"""Shared parts of all reproductions: rows with their gap, parameters, arguments.

    reproduce(arguments) --> Reproduction --main--> table, JSON or picture
                                          --python -m reproductions--> a section of README.md

A gap is `ours / paper - 1`; for a gain, which is itself a percentage, it is the difference.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import Arguments, parse, report
from simulator.assembly.simulate import replicate
from simulator.config.load import load_simulation
from simulator.config.schema import SimulationConfig
from simulator.run.result import Replicated
from simulator.stats.statistics import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXPECTED = Path(__file__).parent / "expected"
SEEDS, QUICK_SEEDS = 3, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A setting of the simulator that the paper does not print, or that was fitted."""

    name: str
    """Name of the setting: `rollout.engine_overhead_s`."""
    value: float | str
    unit: str
    source: str
    fitted: bool = False
    measured: bool = False
    """Measured by others, not in the paper's runs."""
    applies_to: str = "all"

    @property
    def override(self) -> str:
        """The override for `load_simulation`."""
        return f"{self.name}={self.value}"

    @property
    def how(self) -> str:
        """Origin of its value, in one word."""
        return "fitted" if self.fitted else "measured" if self.measured else "assumed"

    def to_json(self) -> dict[str, Any]:
        """The JSON object of the output."""
        names = ("name", "value", "unit", "source", "fitted", "measured", "applies_to")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A number of ours, with the published one if there is one."""

    name: str
    paper: float | None
    """None if the paper does not print it."""
    ours: Estimate
    unit: str
    bar: float | None = None
    """Largest gap to aim at; None for no aim."""
    fitted: bool = False
    """Whether something was fitted to this number."""
    points: bool = False
    """Whether the gap is a difference, because the numbers are percentages (as fractions)."""

    @property
    def gap(self) -> float | None:
        """The gap: 0.1 is 10 percent, or 10 points; None without a published number."""
        return self._gap(self.ours.mean)

    @property
    def gap_interval(self) -> tuple[float, float] | None:
        """Our interval, as gaps."""
        low, high = self._gap(self.ours.low), self._gap(self.ours.high)
        return None if low is None or high is None else (low, high)

    @property
    def within(self) -> bool | None:
        """Whether the gap is within the aim."""
        return None if self.bar is None or self.gap is None else abs(self.gap) <= self.bar

    def to_json(self) -> dict[str, Any]:
        """The JSON object of the output."""
        return {
            "name": self.name,
            "paper": self.paper,
            "ours": self.ours.mean,
            "gap": self.gap,
            "interval": [self.ours.low, self.ours.high] if self._has_interval else None,
            "fitted": self.fitted,
            "unit": self.unit,
            "gap_in": "points" if self.points else "relative",
            "bar": self.bar,
            "within": self.within,
        }

    def cells(self) -> dict[str, str]:
        """Cells of a table."""
        aim = "" if self.bar is None else f"{self.bar:.0%}" + (" pts" if self.points else "")
        verdict = {None: "", True: "met", False: "MISSED"}[self.within]
        gap = self.gap
        return {
            "row": self.name,
            "unit": "" if self.points else self.unit,
            "paper": "" if self.paper is None else self._number(self.paper),
            "ours": self._number(self.ours.mean),
            "95 % interval": self._interval,
            "gap": "" if gap is None else f"{gap:+.1%}" + (" pts" if self.points else ""),
            "aim": aim,
            "": verdict,
            "how": "fitted" if self.fitted else "predicted",
        }

    @property
    def _has_interval(self) -> bool:
        """Whether there is more than one seed."""
        return math.isfinite(self.ours.half_width)

    @property
    def _interval(self) -> str:
        if not self._has_interval:
            return "-"
        return f"{self._number(self.ours.low)} .. {self._number(self.ours.high)}"

    def _gap(self, ours: float) -> float | None:
        if self.paper is None:
            return None
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
    """Assumptions, and the best explanation of each gap."""
    findings: Sequence[str] = ()
    """Findings, in sentences generated from the numbers."""
    sensitivity: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    """The same numbers under other assumptions; flat records."""
    figure: Callable[[], Figure] | None = None
    """Draws the picture; None draws the gaps."""
    title: str = ""
    """Title of that figure."""


def expected(name: str) -> dict[str, Any]:
    """The paper's numbers for a reproduction."""
    with (EXPECTED / f"{name}.json").open(encoding="utf-8") as file:
        record: dict[str, Any] = json.load(file)
    return record


def configured(
    preset: str, parameters: Iterable[Parameter], *settings: str, arguments: Arguments
) -> SimulationConfig:
    """A preset with the parameters of the reproduction and the requested number of seeds."""
    overrides = [parameter.override for parameter in parameters]
    return load_simulation(preset, [*overrides, *settings, f"seeds={arguments.repeats}"])


def run(
    preset: str, parameters: Iterable[Parameter], *settings: str, arguments: Arguments
) -> Replicated:
    """Simulate a configured preset with all seeds."""
    return replicate(configured(preset, parameters, *settings, arguments=arguments))


def length(arguments: Arguments, *, steps: int, warmup: int, quick: tuple[int, int]) -> list[str]:
    """Settings of simulated and warm-up steps; fewer with `--quick`."""
    steps, warmup = quick if arguments.quick else (steps, warmup)
    return [f"workload.steps={steps}", f"workload.warmup_steps={warmup}"]


def main(
    reproduce: Callable[[Arguments], Reproduction],
    description: str | None,
    argv: Sequence[str] | None = None,
) -> None:
    """Command line of a reproduction: `--plot FILE`, and the options of `benchmarks.harness`."""
    words = list(sys.argv[1:] if argv is None else argv)
    plot = _take_option(words, "--plot")
    text = f"{description or ''}\n--plot FILE draws a picture; --repeats N is the number of seeds."
    arguments = parse(text, repeats=SEEDS, quick_repeats=QUICK_SEEDS, argv=words)
    from reproductions.show import draw, to_text  # which shows what this module defines

    result = reproduce(arguments)
    if plot:
        draw(result, Path(plot))
    if not arguments.json:
        print(to_text(result, arguments))
        return
    report(to_json(result), arguments)


def to_json(result: Reproduction) -> dict[str, Any]:
    """The JSON object of the output; `report` adds machine, command and date."""
    return {
        "name": result.name,
        "claim": result.claim,
        "rows": [row.to_json() for row in result.rows],
        "parameters": [parameter.to_json() for parameter in result.parameters],
        "findings": list(result.findings),
        "sensitivity": list(result.sensitivity),
        "why": list(result.why),
    }


def _take_option(words: list[str], name: str) -> str | None:
    """Remove `name VALUE` from the words and return the value."""
    if name not in words:
        return None
    at = words.index(name)
    if at + 1 == len(words):
        raise SystemExit(f"{name} needs a file name")
    _, value = words.pop(at), words.pop(at)
    return value
