"""Measured rows as data: families, their settings of the simulator, and what was measured.

    expected/measured_runs.json --load--> Family (system, settings, fits) --> Measured (one row)

A family is one system, model and GPU under one workload; its first row is the synchronous one that
its numbers are fitted to. Families of one `group` share system, model and GPU: none of them tells
another anything when a family is left out. Settings are those of the simulator, by dotted name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from reproductions.report.harness import expected

Settings = Mapping[str, Any]
"""Settings of the simulator, by dotted name."""
PARTS: Final = {
    "generation": "generation_s",
    "wait": "wait_s",
    "log-probs": "logprobs_s",
    "update": "update_s",
}
"""Parts of a step that some rows print, with the name of their measured seconds.

`generation` of a synchronous row is the time in which the engines generate; `wait` of another is
the time in which the trainer waits. `update` are the optimizer steps, without scoring passes.
"""
LAG: Final = "mean_lag"
"""Name of a printed mean lag, in versions."""
PREFETCHED: Final = "prefetched_batches"
"""Batches that the run's trainer takes ahead of time: each adds a version to the lag, and none is
simulated."""
MOST_FITS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A number that is fitted to the family's synchronous row."""

    setting: str
    part: str
    """`step`, or a name of `PARTS`, whose measured seconds are matched."""
    low: float
    high: float
    mode: Literal["", "synchronous", "asynchronous"] = ""
    """Rows that use the number; empty is all. A family may compare two systems."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One published row."""

    id: str
    mode: Literal["synchronous", "asynchronous"]
    measured: Mapping[str, float]
    """`step_s`, or `axis_tokens_per_s` of a picture; and parts, where printed."""
    settings: Settings
    confounders: Sequence[str]
    nearest: str = ""
    """How these settings differ from the run, if they do."""
    missing: str = ""
    """What the cost model lacked for this row when it was recorded, with its size in seconds."""
    baseline: str = ""
    """The synchronous row that its gain is against; empty takes the family's first."""

    def step_s(self, batch_tokens: float, axis_factor: float) -> float:
        """Measured seconds per step.

        Args:
            batch_tokens: response tokens of a batch, for rows that print a throughput.
            axis_factor: trained tokens per token of the picture's axis.
        """
        if "step_s" in self.measured:
            return self.measured["step_s"]
        return batch_tokens / (axis_factor * self.measured["axis_tokens_per_s"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Rows of one system, model and GPU under one workload."""

    id: str
    system: str
    group: str
    source: str
    assumed: Sequence[str]
    """What is not printed, and what is taken for it."""
    settings: Settings
    fits: Sequence[Fit]
    rows: Sequence[Measured]

    def __post_init__(self) -> None:
        if len(self.fits) > MOST_FITS:
            raise ValueError(f"{self.id} fits {len(self.fits)} numbers, but at most {MOST_FITS}")
        if self.rows[0].mode != "synchronous":
            raise ValueError(f"the first row of {self.id}, {self.rows[0].id}, is not synchronous")

    @property
    def synchronous(self) -> Measured:
        """The row that numbers are fitted to."""
        return self.rows[0]

    def row(self, name: str) -> Measured:
        """The row of this id.

        Raises:
            KeyError: there is none.
        """
        found = {row.id: row for row in self.rows}
        return found[name]

    def baseline_of(self, row: Measured) -> Measured:
        """The synchronous row that a row's gain is against."""
        return self.row(row.baseline) if row.baseline else self.synchronous

    @property
    def batch_tokens(self) -> float:
        """Response tokens of a batch, by the assumed mean."""
        return float(
            self.settings["workload.prompts_per_batch"]
            * self.settings["workload.samples_per_prompt"]
            * self.settings.get("workload.answers.mean_tokens", 0)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """What is aimed at."""

    gain_median: float
    """Of |ln(predicted gain / measured gain)|."""
    gain_largest: float
    step_median: float
    """Relative error."""
    coverage: tuple[float, float]
    """Share of measured numbers within the 90 % intervals, lowest and highest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRuns:
    """All families, and the aims."""

    families: Sequence[Family]
    bars: Bars
    axis_factor: float
    """Trained tokens per token of the axis of AReaL's picture."""

    def step_s(self, family: Family, row: Measured) -> float:
        """Measured seconds per step."""
        return row.step_s(family.batch_tokens, self.axis_factor)

    def gain(self, family: Family, row: Measured) -> float:
        """Measured synchronous / asynchronous seconds per step."""
        return self.step_s(family, family.baseline_of(row)) / self.step_s(family, row)


def load() -> MeasuredRuns:
    """The packaged rows."""
    record = expected("measured_runs")
    return MeasuredRuns(
        families=[_family(one) for one in record["families"]],
        bars=Bars(**{**record["bars"], "coverage": tuple(record["bars"]["coverage"])}),
        axis_factor=record["axis_factor"],
    )


def _family(record: Mapping[str, Any]) -> Family:
    fields = {name: value for name, value in record.items() if name not in ("fit", "rows")}
    model = record["settings"]["model"]
    if model.endswith(".json"):  # a shape that lies beside this file
        fields["settings"] = {**record["settings"], "model": str(Path(__file__).parent / model)}
    fits = [Fit(**one) for one in record["fit"]]
    return Family(**fields, fits=fits, rows=[Measured(**one) for one in record["rows"]])
