"""Find response lengths in what a user has: numbers, a table, a trace's name, or a recorded run.

[120, 340, ...]   [[120, 130], [340, 900], ...]   numbers, or lists of them by prompt
"lengths.csv"  "tokens\\n120\\n"  bytes               a table, as file or text
"deepseek_r1_client66"                            a shipped trace
Path("runs/mine"), RecordedRun                    a run: its log, and its cap from config.yaml
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from areal_lab.control.events import GroupId, StartGroup
from areal_lab.runlog.read_run import RecordedRun, read_run
from simulator.calibrate.fit import is_held_out
from simulator.workload.histogram import Histogram
from simulator.workload.length_table import read_table
from simulator.workload.recorded_run import response_tokens
from simulator.workload.trace_lengths import load_histogram, text_of, traces

Groups: TypeAlias = Sequence[Sequence[float]]
LengthSource: TypeAlias = (
    str | bytes | Path | RecordedRun | Sequence[float] | Groups | NDArray[np.number[Any]]
)
LEAST_STEPS: Final = 6
"""Fewest finished training steps of a run to hold some out: one is excluded from fits of times,
2 and 5 are held out."""
_LOGS: Final = {".jsonl", ".gz"}
_MISSING: Final = 0.05
"""Share of prompts without an end above which there is a note."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observed:
    """Lengths with what is known about them."""

    histogram: Histogram
    groups: Groups = ()
    """Lengths of the responses to each prompt; empty if that is not known."""
    held_out: Groups = ()
    """Lengths of the training steps that the fit leaves out."""
    cap: int | None = None
    """Largest length that a response could have; None if it is not known."""
    source: str = ""
    """Name of the source, for people."""
    trace: str = ""
    """Value of `workload.answers.trace` that gives these lengths; empty without one."""
    recorded: str = ""
    """The run folder, if they are of a run."""
    notes: tuple[str, ...] = ()


def observed_lengths(
    source: LengthSource,
    *,
    column: str = "",
    prompt_column: str = "",
    name: str = "the table",
) -> Observed:
    """Read lengths from any source.

    Args:
        source: see the module docstring. Text with a line break, and bytes, are a table; other
            text is a file, a folder or the name of a trace.
        column: column of a table with the lengths; empty finds it by its name.
        prompt_column: column of a table that names the prompt.
        name: of text and bytes, for messages.
    """
    if isinstance(source, bytes):
        return _table(_decoded(source, name), name, column, prompt_column)
    if isinstance(source, str):
        if "\n" in source:
            return _table(source, name, column, prompt_column)
        return _named(source, column, prompt_column)
    if isinstance(source, Path):
        return _from_path(source, column, prompt_column)
    if column or prompt_column:
        raise ValueError("only a table has columns; leave out column and prompt_column")
    if isinstance(source, RecordedRun):
        return lengths_of_run(source)
    return _numbers(source)


def lengths_of_run(run: RecordedRun) -> Observed:
    """Lengths of a run by group, some training steps held out.

    The groups of training steps that `is_held_out` names are held out. A run with fewer than
    `LEAST_STEPS` steps holds out nothing, and counts groups that were not trained on, too.
    """
    tokens = response_tokens(run.log)
    steps = run.batches
    if len(steps) < LEAST_STEPS:
        fitted, held_out = list(tokens.values()), []
    else:
        fitted, held_out = (
            _of_groups(tokens, [s.groups for s in steps if is_held_out(s.version) is out])
            for out in (False, True)
        )
    if not fitted:
        raise ValueError(
            f"no group of the run {run.source} has responses; there is nothing to fit lengths to"
        )
    longest = max(max(group) for group in (*fitted, *held_out))
    cap = run.settings.get("gconfig.max_new_tokens")
    return Observed(
        histogram=_histogram(fitted),
        groups=fitted,
        held_out=held_out,
        cap=None if cap is None else max(int(cap), longest),
        source=f"the run {run.folder.name}",
        recorded=str(run.source),
        notes=_unfinished(run),
    )


def _of_groups(
    tokens: Mapping[GroupId, list[int]], steps: Sequence[Sequence[GroupId]]
) -> list[list[int]]:
    return [tokens[group] for groups in steps for group in groups if group in tokens]


def _unfinished(run: RecordedRun) -> tuple[str, ...]:
    started = {r.action.group for r in run.log.actions if isinstance(r.action, StartGroup)}
    missing = len(started - {record.group for record in run.log.groups})
    if missing <= _MISSING * len(started):
        return ()
    return (
        f"{missing} of {len(started)} prompts had not ended when the log did. Long responses end "
        "last, so these lengths are too short on average.",
    )


def _named(name: str, column: str, prompt_column: str) -> Observed:
    path = Path(name)
    if path.exists() or path.suffix:
        return _from_path(path, column, prompt_column)
    histogram = load_histogram(name)
    if column or prompt_column:
        raise ValueError("a shipped trace has no columns; leave out column and prompt_column")
    found = next(one for one in traces() if load_histogram(one) is histogram)
    return Observed(histogram=histogram, source=found, trace=found)


def _from_path(path: Path, column: str, prompt_column: str) -> Observed:
    if path.is_dir() or path.suffix.lower() in _LOGS:
        if column or prompt_column:
            raise ValueError("a run has no columns; leave out column and prompt_column")
        return lengths_of_run(read_run(path))
    found = _table(text_of(path), str(path), column, prompt_column)
    return Observed(
        histogram=found.histogram,
        groups=found.groups,
        source=path.name,
        # A simulation finds columns by their names.
        trace="" if column else str(path),
    )


def _table(text: str, name: str, column: str, prompt_column: str) -> Observed:
    table = read_table(text, name=name, column=column, prompt_column=prompt_column)
    return Observed(histogram=table.histogram, groups=table.groups, source=name)


def _numbers(values: Sequence[float] | Groups | NDArray[np.number[Any]]) -> Observed:
    if not isinstance(values, Iterable):
        raise ValueError(
            f"the lengths are {type(values).__name__} ({values!r:.60}), but must be numbers, a "
            "file, a run folder, or the name of a trace"
        )
    rows = list(values)
    by_prompt = any(isinstance(row, list | tuple | np.ndarray) for row in rows)
    groups = [[_length(one, n) for one in row] for n, row in enumerate(rows)] if by_prompt else []
    tokens = [one for group in groups for one in group]
    if not by_prompt:
        tokens = [_length(one, place) for place, one in enumerate(rows)]
    if not tokens:
        raise ValueError("there are no lengths; at least one was expected")
    return Observed(
        histogram=Histogram.of_lengths(tokens),
        groups=[group for group in groups if group],
        source=f"{len(tokens):,} lengths",
    )


def _length(value: Any, place: int) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, str | bool) or not math.isfinite(number) or number < 1:
        raise ValueError(
            f"length {place} is {value!r}, but must be a number of at least 1 token; leave such "
            "entries out"
        )
    return number


def _histogram(groups: Groups) -> Histogram:
    return Histogram.of_lengths([float(one) for group in groups for one in group])


def _decoded(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: {error}; save it as CSV") from error
