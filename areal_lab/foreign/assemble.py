"""From records to steps: names by table, records of one step joined, resumed runs split.

A table maps a key of the log to a quantity, or to a quantity and a factor that converts its unit:

    {"timing_s/step": "step_time_s", "elapsed time per iteration (ms)": ("step_time_s", 1e-3)}

Of several keys for one quantity the first in the table wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from areal_lab.foreign.quantities import UNREAD, number, whole_ratio
from areal_lab.foreign.record import PER_RUN, Attempt, ImportedRun, Quantity, Step
from areal_lab.foreign.scan import Row

Table: TypeAlias = "Mapping[str, str | tuple[str, float]]"


@dataclass(slots=True)
class Group:
    """Records of one attempt, one a step, in order; `late` ones came behind later steps."""

    pid: int | None
    rows: dict[int, Row] = field(default_factory=dict)
    late: list[Row] = field(default_factory=list)

    @property
    def last(self) -> int:
        """The highest step."""
        return next(reversed(self.rows))


def groups(rows: Iterable[Row], *, by_pid: bool = False) -> list[Group]:
    """Split records into attempts and join those of one step.

    A step that comes again with other values starts a new attempt, as does a smaller step from
    which the numbers go on. With `by_pid` each process is an attempt.
    """
    found: list[Group] = []
    for row in rows:
        assert row.step is not None  # of records without a number nobody knows the place
        pid = row.pid if by_pid else None
        group = next((one for one in reversed(found) if one.pid == pid), None)
        if group is None:
            found.append(Group(pid, {row.step: row}))
        elif row.step in group.rows:
            if not _join(group.rows[row.step], row):
                found.append(Group(pid, {row.step: row}))
        elif row.step > group.last:
            group.rows[row.step] = row
        elif group.late and row.step > group.late[-1].step and row.source == group.late[-1].source:  # type: ignore[operator]  # not None
            begun = group.late.pop()
            found.append(Group(pid, {begun.step: begun, row.step: row}))  # type: ignore[dict-item]  # not None
        else:
            group.late.append(row)
    return found


def _join(into: Row, row: Row) -> bool:
    """Join two records of a step unless they contradict each other."""
    common = into.values.keys() & row.values.keys()
    if any(into.values[key] != row.values[key] for key in common):
        return False
    into.values |= row.values
    into.cut |= row.cut
    return True


def convert(values: Mapping[str, Any], table: Table, run: ImportedRun) -> Step:
    """Quantities of a record by table; other numbers by their own names."""
    step = Step(step=0)
    rank: dict[str, int] = {}
    ranks = _ranks(table)
    for key, raw in values.items():
        value = number(raw)
        if value is UNREAD:
            if key in table:
                run.unread["values that are not numbers"] += 1
            continue
        if (target := table.get(key)) is None:
            run.unknown[key] += 1
            if value is not None:
                step.other[key] = value
            continue
        name, factor = (target, 1.0) if isinstance(target, str) else target
        if name not in rank or ranks[key] < rank[name]:
            rank[name] = ranks[key]
            step.values[name] = value if value is None or factor == 1.0 else _scaled(value, factor)
    return step


def _scaled(value: float, factor: float) -> float:
    """Multiply; by division where that is exact: 61240.9 / 1000, not * 0.001."""
    return value / round(1 / factor) if factor < 1 else value * factor


_RANKS: dict[int, tuple[Table, dict[str, int]]] = {}


def _ranks(table: Table) -> dict[str, int]:
    kept = _RANKS.get(id(table))
    if kept is None or kept[0] is not table:
        kept = _RANKS[id(table)] = (table, {key: place for place, key in enumerate(table)})
    return kept[1]


def attempts(
    rows: Iterable[Row],
    table: Table,
    run: ImportedRun,
    finish: Callable[[Row, Step], None] = lambda _row, _step: None,
    *,
    by_pid: bool = False,
    role: str = "",
) -> list[Attempt]:
    """Attempts with their steps; `finish` completes a step from its record."""

    def made(row: Row) -> Step:
        step = convert(row.values, table, run)
        step.step, step.time_s, step.line, step.role = row.step or 0, row.time_s, row.line, role
        finish(row, step)
        return step

    return [
        Attempt(
            pid=one.pid,
            steps=[made(row) for row in one.rows.values()],
            late=[made(row) for row in one.late],
        )
        for one in groups(rows, by_pid=by_pid)
    ]


def derive(step: Step, run: ImportedRun, name: str, value: Quantity, how: str) -> None:
    """Set a quantity that the log does not print, and say how it was computed."""
    if value is not None and step.values.get(name) is None:
        step.values[name] = value
        run.derived[name] = how


def derive_gpus(
    step: Step,
    run: ImportedRun,
    above: Any,
    below: Any,
    *,
    how: str,
    name: str = "gpus",
    spread: float = 0.0,
) -> None:
    """Set a number of GPUs that is a quotient of two printed numbers, if it is a whole one."""
    derive(step, run, name, whole_ratio(above, below, spread=spread), how)


def finish_run(run: ImportedRun) -> ImportedRun:
    """Say what follows from all steps: quantities of the run, attempts."""
    for name in PER_RUN:
        values = {one.values[name] for one in run.steps if one.values.get(name) is not None}
        if len(values) == 1 and run.settings.get(name) is None:
            run.settings[name] = values.pop()
    if len(run.attempts) > 1:
        run.notes.append(
            f"The log has {len(run.attempts)} runs or attempts; `steps` are of the last one."
        )
    late = sum(len(one.late) for one in run.attempts)
    if late:
        run.notes.append(f"{late} records came behind those of later steps.")
    return run


def note_once(run: ImportedRun, sentence: str) -> None:
    """Add a note unless it is there."""
    if sentence not in run.notes:
        run.notes.append(sentence)


def merged(rows: Sequence[Row]) -> dict[str, Any]:
    """Values of several records, later ones over earlier ones."""
    found: dict[str, Any] = {}
    for row in rows:
        found |= row.values
    return found
