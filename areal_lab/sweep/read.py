"""Read a sweep: a row per cell, metrics by step, and means with intervals over repetitions.

    sweep = read_sweep("sweeps/eta")
    sweep.cells                              a pandas frame: axes, status, numbers of the summary
    sweep.steps                              a pandas frame: axes, step, metrics
    sweep.intervals("reward_after")          mean, 95 % interval; differences from a baseline

Cells are in the order of the grid, in whatever order they ended, so the same study always gives
the same tables. Frames need pandas, of the notebooks extra; the CSV files do not.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from areal_lab.config.given import given_path
from areal_lab.config.unknown import did_you_mean
from areal_lab.extras import require
from areal_lab.host.durable import replace_text
from areal_lab.runlog.appended import read_appended
from areal_lab.runlog.intervals import MeanInterval, interval_of_runs, paired_interval
from areal_lab.runlog.read_run import metrics_of
from areal_lab.sweep.grid import label_of
from areal_lab.sweep.store import StoredCell, read_study, stored_cell
from areal_lab.sweep.study import Value

if TYPE_CHECKING:
    import pandas as pd

_METRICS: Final = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class SweepCell:
    """One cell of the grid."""

    choice: Mapping[str, Value]
    """Its value on each axis."""
    grouped: Mapping[str, Any]
    """Settings that named groups of the grid set, by dotted name."""
    stored: StoredCell

    @property
    def label(self) -> str:
        """The cell in a few words."""
        return label_of(self.choice)

    @property
    def complete(self) -> bool:
        """True if its run came to its end."""
        return self.stored.status == "complete"


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure of the cells that differ only by repetition."""

    choice: Mapping[str, Value]
    """The value on each axis except that of the repetitions."""
    runs: tuple[float, ...]
    """The figure of each run."""
    value: MeanInterval
    """Mean over repetitions; for a single run, the interval that the run itself reports, if any."""
    difference: MeanInterval | None = None
    """Paired difference from the baseline over repetitions; None for the baseline itself."""


@dataclass(frozen=True, slots=True)
class RecordedSweep:
    """A study in its folder, complete or not."""

    folder: Path
    study: Mapping[str, Any]
    """Content of the study file, with the values of each axis."""
    rows: tuple[SweepCell, ...]
    """The cells of the grid, in its order."""
    _made: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def axes(self) -> Mapping[str, Sequence[Value]]:
        """The values of each axis."""
        axes: Mapping[str, Sequence[Value]] = self.study["axes"]
        return axes

    @property
    def metrics(self) -> list[str]:
        """Figures that a complete cell has."""
        return list(dict.fromkeys(name for row in self.rows for name in row.stored.figures))

    @property
    def cells(self) -> pd.DataFrame:
        """One row per cell: axes, settings of named groups, `status`, figures of the summary.

        A figure with the name of an axis, such as `eta`, is left out.
        """
        return self._frame("cells", cell_columns(self), cell_rows(self))

    @property
    def settings(self) -> pd.DataFrame:
        """One row per cell: axes, and every setting of the run by dotted name."""
        rows = [{**row.choice, **row.stored.settings} for row in self.rows]
        return self._frame("settings", _union(self.axes, rows), rows)

    @property
    def steps(self) -> pd.DataFrame:
        """One row per training step of each complete cell: axes, `step`, metrics.

        Empty for simulations, which do not report steps.
        """
        rows = step_rows(self)
        return self._frame("steps", _union([*self.axes, "step"], rows), rows)

    def intervals(
        self,
        metric: str | None = None,
        *,
        over: str | None = None,
        baseline: Mapping[str, Value] | None = None,
    ) -> list[Interval]:
        """Means with 95 % Student-t intervals over repetitions, in the order of the grid.

        Args:
            metric: one of `metrics`; None takes the study's.
            over: axis of the repetitions; None takes the study's.
            baseline: values of axes; each cell is compared, repetition by repetition, with the cell
                that has these values and otherwise its own.

        Raises:
            ValueError: in one line: no complete cell has the metric, or an axis does not exist.
        """
        metric = metric or str(self.study["metric"])
        over = over or str(self.study["figure"]["over"])
        if metric not in self.metrics:
            if not self.metrics:
                raise ValueError("no cell is complete")
            raise ValueError(f"no cell has {metric!r}; {did_you_mean(metric, self.metrics)}")
        for name in baseline or {}:
            if name not in self.axes:
                raise ValueError(f"{name!r} is not an axis; {did_you_mean(name, list(self.axes))}")
        groups: dict[tuple[Value, ...], list[SweepCell]] = {}
        names = [name for name in self.axes if name != over]
        for row in self.rows:
            if row.complete and metric in row.stored.figures:
                groups.setdefault(tuple(row.choice[name] for name in names), []).append(row)

        def by_repetition(key: tuple[Value, ...]) -> dict[Value, float]:
            return {row.choice.get(over): row.stored.figures[metric] for row in groups.get(key, ())}

        found = []
        for key, rows in groups.items():
            own = dict(zip(names, key, strict=True))
            other = tuple({**own, **(baseline or {})}[name] for name in names)
            difference = None
            if baseline is not None and other != key:
                difference = paired_interval(by_repetition(key), by_repetition(other))
            runs = tuple(row.stored.figures[metric] for row in rows)
            found.append(Interval(own, runs, _interval(metric, rows), difference))
        return found

    def interval_frame(
        self,
        metric: str | None = None,
        *,
        over: str | None = None,
        baseline: Mapping[str, Value] | None = None,
    ) -> pd.DataFrame:
        """`intervals` as a frame: axes, `mean`, `ci95`, `n`, `difference`, `difference_ci95`."""
        rows = [
            {
                **one.choice,
                "mean": one.value.mean,
                "ci95": one.value.ci95,
                "n": one.value.n,
                "difference": one.difference and one.difference.mean,
                "difference_ci95": one.difference and one.difference.ci95,
                "pairs": one.difference.n if one.difference else 0,
            }
            for one in self.intervals(metric, over=over, baseline=baseline)
        ]
        require("RecordedSweep.interval_frame", "notebooks", "pandas")
        import pandas as pd

        return pd.DataFrame(rows)

    def _frame(
        self, name: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> pd.DataFrame:
        require(f"RecordedSweep.{name}", "notebooks", "pandas")
        import pandas as pd

        if name not in self._made:
            self._made[name] = pd.DataFrame([*rows], columns=[*columns])
        return self._made[name]


def read_sweep(folder: Path | str) -> RecordedSweep:
    """Read the folder of a sweep, complete or not.

    Raises:
        ValueError: in one line: it is not the folder of a sweep, or a file cannot be read.
    """
    folder = given_path(folder, "folder")
    study = read_study(folder)
    rows = tuple(
        SweepCell(
            one["choice"], one["grouped"], stored_cell(folder / one["folder"], study["command"])
        )
        for one in study["cells"]
    )
    return RecordedSweep(folder, study, rows)


def write_cells(sweep: RecordedSweep, path: Path) -> Path:
    """Write the table of cells as CSV."""
    return _write_csv(path, cell_columns(sweep), cell_rows(sweep))


def write_steps(sweep: RecordedSweep, path: Path) -> Path | None:
    """Write the metrics of all steps as CSV; None if no cell has any."""
    rows = step_rows(sweep)
    return _write_csv(path, _union([*sweep.axes, "step"], rows), rows) if rows else None


def cell_columns(sweep: RecordedSweep) -> list[str]:
    """Columns of the table of cells."""
    figures = [name for name in sweep.metrics if name not in sweep.axes]
    grouped = _union((), [row.grouped for row in sweep.rows])
    before = list(dict.fromkeys([*sweep.axes, *grouped, "status"]))
    return [*before, *(name for name in figures if name not in before)]


def cell_rows(sweep: RecordedSweep) -> list[dict[str, Any]]:
    """Rows of the table of cells."""
    return [
        {**row.stored.figures, **row.grouped, **row.choice, "status": row.stored.status}
        for row in sweep.rows
    ]


def step_rows(sweep: RecordedSweep) -> list[dict[str, Any]]:
    """Rows of the table of steps."""
    return [
        {**line, **row.choice}
        for row in sweep.rows
        if row.complete and row.stored.run_folder is not None
        for line in _metrics(row.stored.run_folder / _METRICS)
    ]


def _interval(metric: str, rows: Sequence[SweepCell]) -> MeanInterval:
    values = [row.stored.figures[metric] for row in rows]
    if len(values) > 1:
        return interval_of_runs(values)
    own = rows[0].stored.figures
    return MeanInterval(values[0], 1, own.get(f"{metric}.ci95"))


def _metrics(path: Path) -> list[dict[str, Any]]:
    return metrics_of(read_appended(path).lines, path) if path.is_file() else []


def _union(first: Iterable[str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys([*first, *(name for row in rows for name in row)]))


def _write_csv(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Path:
    file = io.StringIO(newline="")
    table = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    replace_text(path, file.getvalue())
    return path
