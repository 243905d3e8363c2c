"""Tables of measured and predicted rows: numbers, parts of a step, and what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from reproductions.measured_runs.families import LAG, PREFETCHED, Family, MeasuredRuns
from reproductions.measured_runs.predict import Predicted, measured_parts
from reproductions.measured_runs.score import Number, Scored, lags_with_error
from simulator.report.lags import lag_span
from simulator.report.step_parts import PARTS_OF_A_STEP, seconds_of
from simulator.stats.statistics import Prediction


def numbers(scored: Sequence[Scored]) -> list[dict[str, Any]]:
    """Step and gain of every row, with their intervals."""
    return [_numbers(one) for one in scored]


def parts(predicted: Sequence[Predicted]) -> list[dict[str, Any]]:
    """Simulated seconds of every row by part, beside the printed ones."""
    return [_parts(one) for one in predicted]


def lags(predicted: Sequence[Predicted], runs: MeasuredRuns) -> list[dict[str, Any]]:
    """Simulated lags of the rows that print a mean, in versions."""
    return [_lags(one) for one in printed_lags(predicted, runs, predicted)]


class PrintedLag(NamedTuple):
    """A printed mean lag with the simulated one, in versions, prefetched batches included."""

    row: str
    measured: float
    simulated: Mapping[str, float]
    """`SimulationResult.staleness`, means over the seeds; without prefetched batches."""
    prefetched: float
    span: tuple[float, float] | None
    """From the low end of the mean of tokens to the high end of first tokens: pages do not say
    which mean they print. None without an interval."""

    @property
    def predicted(self) -> float:
        """Mean of first tokens."""
        return self.simulated["head_mean"] + self.prefetched

    @property
    def error(self) -> float:
        """Predicted - measured."""
        return self.predicted - self.measured

    @property
    def covered(self) -> bool | None:
        """Whether the interval contains the printed mean; None without an interval."""
        return None if self.span is None else self.span[0] <= self.measured <= self.span[1]


def printed_lags(
    rows: Sequence[Predicted], runs: MeasuredRuns, predicted: Sequence[Predicted]
) -> list[PrintedLag]:
    """Those of `rows` that print a mean lag, with errors of `predicted`."""
    found = []
    for one in rows:
        if (measured := one.row.measured.get(LAG)) is None:
            continue
        each = [result.staleness() for result in one.run.results]
        simulated = {name: sum(own[name] for own in each) / len(each) for name in each[0]}
        more, span = one.row.measured.get(PREFETCHED, 0.0), None
        if (known := lags_with_error(one, predicted, runs)) is not None:
            first = known["mean"].range
            tokens = simulated["head_mean"] - simulated["token_mean"]
            span = max(0.0, first.low - tokens) + more, first.high + more
        found.append(PrintedLag(one.row.id, measured, simulated, more, span))
    return found


def reasons(predicted: Sequence[Predicted]) -> list[dict[str, Any]]:
    """How a row's settings differ from the run, what confounds it, and what was missing."""
    return [
        {
            "row": one.row.id,
            "nearest settings": one.row.nearest or "as described",
            "confounders": "; ".join(one.row.confounders),
            "missing": one.row.missing,
        }
        for one in predicted
    ]


def families(predicted: Sequence[Predicted]) -> list[dict[str, Any]]:
    """What each family is, and its fitted numbers."""
    first: dict[str, Predicted] = {}
    for one in predicted:
        first.setdefault(one.family.id, one)
    return [_family(one.family, one) for one in first.values()]


def _numbers(one: Scored) -> dict[str, Any]:
    step, gain = one.step_s, one.gain
    return {
        "row": one.of.row.id,
        "measured s": _short(step.measured),
        "predicted s": _short(step.predicted.value),
        "90 % interval, s": _interval(step.predicted),
        "error": f"{step.relative_error:+.0%}",
        "measured gain": "" if gain is None else f"{gain.measured:.2f}",
        "predicted gain": "" if gain is None else f"{gain.predicted.value:.2f}",
        "90 % interval": "" if gain is None else _interval(gain.predicted),
        "ln error": "" if gain is None else f"{gain.log_error:+.2f}",
        "sign": "" if gain is None else _sign(gain),
        "how": "fitted" if one.of.is_fitted else "predicted",
    }


def _sign(gain: Number) -> str:
    return {None: "no clear gain", True: "right", False: "WRONG"}[gain.sign_is_right]


def _parts(one: Predicted) -> dict[str, Any]:
    each = [seconds_of(result) for result in one.run.results]
    simulated = {name: sum(own[name] for own in each) / len(each) for name in each[0]}
    printed = measured_parts(one.row)
    return {
        "row": one.row.id,
        **{
            name: _short(simulated[name])
            + (f" (printed {_short(printed[name])})" if name in printed else "")
            for name in PARTS_OF_A_STEP
        },
    }


def _lags(one: PrintedLag) -> dict[str, Any]:
    simulated = one.simulated
    return {
        "row": one.row,
        "measured mean": _short(one.measured),
        "predicted mean": _short(one.predicted),
        "error": f"{one.error:+.2f}",
        "90 % interval": "" if one.span is None else lag_span(*one.span),
        "mean of tokens": _short(simulated["token_mean"] + one.prefetched),
        "before the queue": _short(simulated["before_queue_mean"]),
        "in the queue": _short(simulated["in_queue_mean"]),
        "prefetched": _short(one.prefetched),
        "95th percentile": _short(simulated["head_p95"] + one.prefetched),
        "thrown away": f"{simulated['thrown_away']:.0%}",
    }


def _model(named: str) -> str:
    """Name of a model, or of the file that describes it."""
    return Path(named).name.removesuffix(".json")


def _family(family: Family, one: Predicted) -> dict[str, Any]:
    fitted = "; ".join(
        f"{each.fit.setting} {each.value:.4g} to {each.fit.part}"
        + ("" if each.reached else " (end of its range)")
        for each in one.fitted
    )
    return {
        "family": family.id,
        "system": family.system,
        "model, GPU": f"{_model(family.settings['model'])}, {family.settings['cluster.gpu']}",
        "fitted": fitted,
        "assumed": "; ".join(family.assumed),
        "source": family.source,
    }


def _interval(prediction: Prediction) -> str:
    return f"{_short(prediction.low)} .. {_short(prediction.high)}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{round(value, 6):.3g}"
