r"""Fit measured costs to the work of a recorded run: points, steps, held-out errors. Seconds.

    points --is_held_out(place)--> fitted on          --fit--> coefficients of a config
                               \-> held out           --> error

Whether a point is held out only depends on its place (a training step of the run, a row of the
file), so that the same source always gives the same fit. `simulator.calibrate.engine` has the part
of the engine.

Work of a run's engines with its duration: the points for fitting costs.

    spans with counts (embedded engine)   the work of each stretch of steps, counted by the engine
    groups (any engine, seen by a client) seconds per token of a group's longest response, and the
                                          sequences that ran meanwhile, estimated from their ends
    CSV of batch, context, ms             single decode steps, measured in any way

A group's seconds include everything between request and reply: prefill, waiting in a queue, the
network. A fit to groups is less precise than a fit to spans; its error shows by how much.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from areal_lab.config.unknown import plain
from areal_lab.host.foreign import read_table_text, table_cells
from areal_lab.runlog.incidents import pauses
from areal_lab.runlog.read_run import RecordedRun
from areal_lab.runlog.records import GroupRecord, SpanRecord
from simulator.stats.least_squares import fit_positive
from simulator.workload.recorded_run import TrainingPoint, updates

PREFILL: Final = "prefill"
_WORK: Final = frozenset({"decode", PREFILL, "prefill and decode"})
_COUNTED: Final = frozenset({"steps", "sequences", "context_tokens", "prompt_tokens"})
_COLUMNS: Final = ("batch", "context", "ms")
_MOMENTS: Final = 16
"""Moments of a group's duration at which running sequences are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePoint:
    """A stretch of an engine's work. Sums are over its steps."""

    seconds: float
    steps: float
    sequences: float
    context_tokens: float
    prompt_tokens: float = 0.0
    """Computed prompt tokens, without those copied from another sequence."""
    prompt_pairs: float = 0.0
    place: int = 0
    """Training step during which it ended, from 1; for a CSV file, the row."""
    end_s: float = 0.0
    alone: bool = True
    """True if no sequence decoded during a prefill."""

    @property
    def batch(self) -> float:
        """Mean sequences per step."""
        return self.sequences / self.steps

    @property
    def context(self) -> float:
        """Mean context tokens per sequence."""
        return self.context_tokens / self.sequences


def span_points(run: RecordedRun) -> list[EnginePoint]:
    """Points from spans with the engine's counts; empty if there are none."""
    ends_s = [batch.done_s for batch in run.batches]
    return [
        _span_point(span, bisect_left(ends_s, span.end_s) + 1)
        for span in run.log.spans
        if span.name in _WORK
        and span.args.keys() >= _COUNTED
        and span.args["steps"] > 0
        and span.args["sequences"] > 0
        and span.end_s > span.t_s
    ]


def group_points(run: RecordedRun) -> list[EnginePoint]:
    """Points from the client's records of groups that no weight update or pause disturbed."""
    ends_s = [batch.done_s for batch in run.batches]
    disturbed = [*updates(run.log), *pauses(run.log)]
    by_engine: dict[int, list[GroupRecord]] = defaultdict(list)
    for record in run.log.groups:
        if "abort" not in record.finish_reasons and record.generated_s > record.t_s:
            by_engine[record.engine].append(record)
    found = []
    for groups in by_engine.values():
        starts_s = np.array([group.t_s for group in groups])
        stops_s = np.array([group.generated_s for group in groups])
        for group in groups:
            if any(group.t_s < end and since < group.generated_s for since, end in disturbed):
                continue
            beside = np.flatnonzero((starts_s < group.generated_s) & (stops_s > group.t_s))
            place = bisect_left(ends_s, group.generated_s) + 1
            found.append(_group_point(group, [groups[index] for index in beside], place))
    return found


def csv_points(path: Path) -> list[EnginePoint]:
    """Points from a CSV file with the columns batch, context and ms, in any order and case.

    `context` is the mean tokens per sequence, `ms` the milliseconds of a decode step.
    Lines that begin with # are comments.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist (looked in {Path.cwd()})")
    lines = read_table_text(path).splitlines()
    rows = [(n, line) for n, line in enumerate(lines, 1) if line.strip() and line[0] != "#"]
    if not rows:
        raise ValueError(f"{path} is empty; it needs the columns {', '.join(_COLUMNS)}")
    cells = table_cells([line for _, line in rows], path)
    header = [plain(cell) for cell in cells[0]]
    missing = [name for name in _COLUMNS if name not in header]
    if missing:
        found = ", ".join(cell.strip() for cell in cells[0])[:200]
        raise ValueError(
            f"{path} has no column {' and no '.join(missing)}; its columns are {found}, and "
            f"{', '.join(_COLUMNS)} are needed"
        )
    if len(cells) == 1:
        raise ValueError(
            f"{path} has a header but no rows; it needs one measured decode step per row"
        )
    places = [header.index(name) for name in _COLUMNS]
    return [
        _csv_point(path, number, row, places, place)
        for place, ((number, _), row) in enumerate(zip(rows[1:], cells[1:], strict=True), 1)
    ]


def mean_prompt_tokens(prefills: Sequence[EnginePoint]) -> float | None:
    """Mean tokens of a prompt, from prefills without other work; None if there are none."""
    sequences = sum(point.sequences for point in prefills)
    return sum(point.context_tokens for point in prefills) / sequences if sequences else None


def _span_point(span: SpanRecord, place: int) -> EnginePoint:
    counts = span.args
    return EnginePoint(
        seconds=span.end_s - span.t_s,
        steps=counts["steps"],
        sequences=counts["sequences"],
        context_tokens=counts["context_tokens"],
        prompt_tokens=counts["prompt_tokens"],
        prompt_pairs=counts.get("prompt_pairs", 0.0),
        place=place,
        end_s=span.end_s,
        alone=span.name == PREFILL,
    )


def _group_point(group: GroupRecord, beside: Sequence[GroupRecord], place: int) -> EnginePoint:
    """A group as one stretch, with one step per token of its longest response.

    `beside` are the groups that ran on the same engine meanwhile, including itself.
    """
    seconds = group.generated_s - group.t_s
    moments = group.t_s + seconds * (np.arange(_MOMENTS) + 0.5) / _MOMENTS
    running, context = np.zeros(_MOMENTS), np.zeros(_MOMENTS)
    for other in beside:
        lengths = [max(1, sum(tokens for _, tokens in sample)) for sample in other.segments]
        # Each sequence gets one token per step, so the longest one gives the rate of steps.
        done = (moments - other.t_s) / (other.generated_s - other.t_s) * max(lengths)
        for length in lengths:
            runs = (done > 0) & (done < length)
            running += runs
            context += np.where(runs, done, 0.0)
    steps = max(max(1, sum(tokens for _, tokens in sample)) for sample in group.segments)
    return EnginePoint(
        seconds=seconds,
        steps=steps,
        sequences=steps * max(1.0, float(running.mean())),
        context_tokens=steps * float(context.mean()),
        place=place,
        end_s=group.generated_s,
    )


def _csv_point(
    path: Path, number: int, row: Sequence[str], places: Sequence[int], place: int
) -> EnginePoint:
    if len(row) <= max(places):
        raise ValueError(
            f"{path}, line {number}: {','.join(row)!r} has {len(row)} cells, but needs "
            f"{max(places) + 1} to contain batch, context and ms; complete it, or leave it out"
        )
    try:
        batch, context, ms = (float(row[column]) for column in places)
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: {','.join(row)!r} is not a number") from error
    if not all(map(math.isfinite, (batch, context, ms))) or batch < 1 or context < 0 or ms <= 0:
        raise ValueError(
            f"{path}, line {number}: {','.join(row)!r}, but batch must be >= 1, context >= 0 and "
            "ms > 0, all finite; leave such rows out"
        )
    return EnginePoint(
        seconds=ms / 1e3,
        steps=1.0,
        sequences=batch,
        context_tokens=batch * context,
        place=place,
    )


HELD_OUT: Final = 0.25
"""Share of places that are held out."""
_GOLDEN: Final = 0.6180339887498949
_ALIKE: Final = 1.05
"""Least ratio of the largest to the smallest size to fit its cost."""

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFit:
    """The fit of one part of the costs."""

    name: str
    settings: Mapping[str, float]
    """Coefficients, by name of the setting."""
    places: tuple[int, ...]
    measured_s: Values
    predicted_s: Values
    note: str = ""
    """Range of the points, and what they cannot separate."""
    points: Sequence[EnginePoint] = field(default=(), repr=False)

    @property
    def held_out(self) -> NDArray[np.bool_]:
        """Which points are held out."""
        return np.array([is_held_out(place) for place in self.places])

    @property
    def fit_error(self) -> float:
        """Mean absolute relative error on the fitted points."""
        return self._error(~self.held_out)

    @property
    def held_out_error(self) -> float:
        """Error on the held-out points."""
        return self._error(self.held_out)

    @property
    def bias(self) -> float:
        """Total predicted over total measured seconds of the held-out points, minus 1."""
        out = self.held_out
        return float(self.predicted_s[out].sum() / self.measured_s[out].sum() - 1)

    def _error(self, chosen: NDArray[np.bool_]) -> float:
        relative = self.predicted_s[chosen] / self.measured_s[chosen] - 1
        return float(np.abs(relative).mean())


def is_held_out(place: int) -> bool:
    """Return whether a training step or row is held out: 2, 5, 10, 13, 18, ..., a quarter of them.

    Multiples of the golden ratio spread evenly and do not align with periodic files.
    """
    return place * _GOLDEN % 1 < HELD_OUT


def fit_training(points: Sequence[TrainingPoint], prompt_tokens: float) -> PartFit:
    """Training steps: a constant plus a time per token of prompts and responses."""
    check_enough([point.step for point in points], "training steps", least=3)
    tokens = np.array([point.tokens + point.samples * prompt_tokens for point in points])
    seen = np.array([not is_held_out(point.step) for point in points])
    measured = np.array([point.seconds for point in points])
    note = f"{tokens.min():,.0f} to {tokens.max():,.0f} tokens per step"
    if tokens[seen].max() < _ALIKE * tokens[seen].min():
        step_s, token_s = float(measured[seen].mean()), 0.0
        note += ": too similar to separate the time per token"
    else:
        ratio = measured[seen] / tokens[seen]
        start = (0.3 * float(measured[seen].min()), 0.5 * float(ratio.mean()))
        found = fit_positive(lambda at: at[0] + at[1] * tokens[seen], start, measured[seen])
        step_s, token_s = with_equal_total(
            found.values, found.values[0] + found.values[1] * tokens[seen], measured[seen]
        )
    return PartFit(
        name="training",
        settings={"trainer.step_s": step_s, "trainer.token_s": token_s},
        places=tuple(point.step for point in points),
        measured_s=measured,
        predicted_s=step_s + token_s * tokens,
        note=note,
    )


def with_equal_total(
    values: Sequence[float], predicted_s: Values, measured_s: Values
) -> tuple[float, ...]:
    """Coefficients times one factor, so that the total time equals the measured total.

    The fit with the least relative error is below the mean if times scatter, but a simulation sums
    many of them.
    """
    total_s = float(measured_s.sum())
    factor = total_s / float(predicted_s.sum()) if total_s > 0 else 1.0
    return tuple(factor * value for value in values)


def enough(places: Sequence[int], least: int) -> bool:
    """Return whether there are at least `least` points to fit and one held out."""
    held_out = sum(map(is_held_out, places))
    return len(places) - held_out >= least and held_out >= 1


def check_enough(places: Sequence[int], what: str, least: int) -> None:
    """Refuse too few points to fit and to hold out."""
    if not enough(places, least):
        held_out = sum(map(is_held_out, places))
        raise ValueError(
            f"{what}: {len(places) - held_out} to fit and {held_out} held out, but needs at least "
            f"{least} and 1; record a longer run"
        )
