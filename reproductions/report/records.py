"""The records of a reproduction: its parameters, rows with their gaps, and the JSON of it.

A gap is `ours / paper - 1`; for a gain, which is itself a percentage, it is the difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from simulator.stats.statistics import Estimate

if TYPE_CHECKING:
    from areal_lab.plots.picture import Picture


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

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Row:
        """What `to_json` wrote."""
        low, high = record["interval"] or (-math.inf, math.inf)
        return cls(
            name=record["name"],
            paper=record["paper"],
            ours=Estimate(record["ours"], low, high),
            unit=record["unit"],
            bar=record["bar"],
            fitted=record["fitted"],
            points=record["gap_in"] == "points",
        )

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
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{round(value, 12):.4g}"


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
    tables: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """Tables of its own, by title; flat records."""
    origin: str = ""
    """Who made it and how, if that was another command than the page's."""
    figure: Callable[[], Picture] | None = None
    """Draws the picture; None draws the gaps."""
    title: str = ""
    """Title of that figure."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Numbers behind the rows, for notebooks."""


def to_json(result: Reproduction) -> dict[str, Any]:
    """The JSON object of the output; `report` adds machine, command and date."""
    return {
        "name": result.name,
        "claim": result.claim,
        "rows": [row.to_json() for row in result.rows],
        "parameters": [parameter.to_json() for parameter in result.parameters],
        "findings": list(result.findings),
        "sensitivity": list(result.sensitivity),
        "tables": {title: list(rows) for title, rows in result.tables.items()},
        "why": list(result.why),
        "data": dict(result.data),
    }
