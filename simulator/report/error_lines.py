"""The model's error in words and as JSON: how far predictions of measured runs were off.

step_record, change_record --> JSON with `says`, the same in sentences
number_record              --> a number with the seeds' interval and the model's error
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from simulator.report.measured_errors import (
    Kind,
    Known,
    MeasuredErrors,
    flat,
    largest_factor,
    median_factor,
)
from simulator.stats.format import number
from simulator.stats.model_error import SHARE, ModelError, Prediction, prediction
from simulator.stats.statistics import Estimate, estimate

PERCENT: Final = f"{100 * SHARE:.0f} %"
"""The share of measured numbers that an interval should contain, in words."""
_FITTED_NAMES: Final = {
    "trainer.mfu": "the trainer's speed",
    "workload.answers.mean_tokens": "the mean response length",
}
_OFF_NAMES: Final = {
    "step": "seconds per step",
    "gain": "gains of asynchrony",
    "change": "ratios of two such runs",
}
_SIGNS: Final = {"step": "too long", "gain": "too low", "change": ""}
"""The side of an error that is counted in words."""


def number_record(values: Sequence[float], error: ModelError) -> dict[str, float | None]:
    """A number as JSON, from that of each seed; see `record_of`.

    Args:
        values: of each seed. If one is 0, such as the cost of free GPUs, there is no relative
            error, and the interval is the seeds'.
    """
    seeds = estimate(values)
    if min(values) > 0:
        return record_of(prediction(values, error), seeds)
    known = math.isfinite(seeds.low)
    low, high = (seeds.low, seeds.high) if known else (seeds.mean, seeds.mean)
    return record_of(Prediction(value=seeds.mean, low=low, high=high), seeds)


def record_of(value: Prediction, seeds: Estimate) -> dict[str, float | None]:
    """A number as JSON: `low` and `high` contain the model's error and the seeds' interval.

    `seeds_low` and `seeds_high` are the 95 % interval over the seeds alone, null for one seed.
    """
    known = math.isfinite(seeds.low)
    return {
        "mean": value.value,
        "low": value.low,
        "high": value.high,
        "seeds_low": seeds.low if known else None,
        "seeds_high": seeds.high if known else None,
    }


def step_record(kind: Kind, gpus: Sequence[str], errors: MeasuredErrors) -> dict[str, Any]:
    """The error of seconds per step of a kind of run, as JSON.

    Args:
        gpus: types of GPU of the run.
    """
    known, never = errors.step(kind), never_compared(gpus, errors)
    return {
        "share": SHARE,
        **_record("step", known, errors),
        "never_compared": never,
        "says": [*known_lines("step", known, errors), *never_line(never)],
    }


def change_record(what: str, known: Known, errors: MeasuredErrors) -> dict[str, Any]:
    """The error of the ratio of two runs, as JSON.

    Args:
        what: `gain`, `change` or `both`, as `simulator.report.measured_errors.change_of` says.
    """
    if what == "both":
        line = (
            "No measured pair of runs differs in model or GPU: the interval of the ratio takes "
            "the errors of A and B as independent."
        )
        return {"share": SHARE, "of": what, "spread": known.error.spread, "says": [line]}
    return {
        "share": SHARE,
        **_record(what, known, errors),
        "says": known_lines(what, known, errors),
    }


def known_lines(what: str, known: Known, errors: MeasuredErrors) -> list[str]:
    """How far predictions of this kind were off, in one or two sentences.

    Args:
        what: `step`, `gain` or `change`.
    """
    off = f"{_OFF_NAMES[what]} were predicted"
    if known.alike:
        line = (
            f"The {PERCENT} interval has the model's error on {_counted(what, known)} of this "
            f"kind ({known.kind}): {off} {_off(what, known)}"
        )
    else:
        seen = len(flat(known.of_kind))
        own = f"No {_row_name(what)} of this kind ({known.kind}) was ever compared"
        if seen:
            own = (
                f"Only {seen} {_row_name(what, seen)} of this kind ({known.kind}) "
                f"{'was' if seen == 1 else 'were'} compared, off by a factor of up to "
                f"{number(_rounded(largest_factor(known.of_kind)))}"
            )
        line = (
            f"{own}; the {PERCENT} interval has the model's error on {_counted(what, known)} of "
            f"more kinds, and may be too narrow: {off} {_off(what, known)}"
        )
    lines = [f"{line}. Such intervals contained {known.contained} of the {len(flat(known.used))}."]
    if fitted := errors.fitted(known):
        names = " or ".join(_FITTED_NAMES.get(name, name) for name in fitted)
        lines.append(
            f"Before, {names} was fitted to another run of the same system; where nothing is "
            "fitted or measured, expect more."
        )
    return lines


def never_compared(gpus: Sequence[str], errors: MeasuredErrors) -> list[str]:
    """Kinds of runs without a measured one, and those of these GPUs that have none."""
    known = errors.gpus()
    return [*errors.never_compared(), *(f"{gpu} GPUs" for gpu in gpus if gpu not in known)]


def never_line(never: Sequence[str]) -> list[str]:
    """The same as a sentence; none if there is nothing."""
    return [f"Never compared with a measured run: {'; '.join(never)}."] if never else []


def undecided(low: float | None, high: float | None) -> bool:
    """Whether a ratio with this interval may be a gain or a loss: whether it contains 1."""
    return low is not None and high is not None and low <= 1 <= high


def _record(what: str, known: Known, errors: MeasuredErrors) -> dict[str, Any]:
    used, own = known.used, known.of_kind
    return {
        "of": what,
        "kind": str(known.kind),
        "rows": len(flat(used)),
        "groups": len(used),
        "median_factor": median_factor(used),
        "largest_factor": largest_factor(used),
        "spread": known.error.spread,
        "contained": known.contained,
        "rows_of_kind": len(flat(own)),
        "median_factor_of_kind": median_factor(own) if own else None,
        "largest_factor_of_kind": largest_factor(own) if own else None,
        "fitted_before": list(errors.fitted(known)),
    }


def _counted(what: str, known: Known) -> str:
    rows, groups = len(flat(known.used)), len(known.used)
    return f"{rows} {_row_name(what, rows)} ({groups} systems and models)"


def _row_name(what: str, count: int = 1) -> str:
    name = "measured pair" if what == "change" else "measured run"
    return name if count == 1 else f"{name}s"


def _off(what: str, known: Known) -> str:
    used = flat(known.used)
    factors = (median_factor(known.used), largest_factor(known.used))
    half, most = (number(_rounded(one)) for one in factors)
    text = f"wrong by a factor of {half} in the median, {most} at most"
    if what in ("step", "gain"):
        wrong = sum(one > 0 if what == "step" else one < 0 for one in used)
        text += f", {wrong} of {len(used)} {_SIGNS[what]}"
    return text


def _rounded(factor: float) -> float:
    return round(factor, 2)
