"""The model's error in words and as JSON: how far predictions of measured runs were off.

step_record, change_record --> JSON with `says`, the same in sentences
number_record              --> a number with the seeds' interval and the model's error
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from simulator.report.measured_errors import Kind, Known, MeasuredErrors, Residuals
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
_SIGNS: Final = {"step": "too long", "gain": "too low"}
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
        **_record("step", known),
        "never_compared": never,
        "says": [*known_lines("step", known), *never_line(never)],
    }


def change_record(what: str, known: Known) -> dict[str, Any]:
    """The error of the ratio of two runs, as JSON.

    Args:
        what: `gain`, `change` or `both`, as `simulator.report.measured_errors.change_of` says.
    """
    if what == "both":
        line = (
            "No measured pair of runs differs like A and B (in model, type of GPU, placement or "
            f"turns): the {PERCENT} interval of the ratio takes their errors as independent."
        )
        return {"share": SHARE, "of": what, "spread": known.error.spread, "says": [line]}
    return {"share": SHARE, **_record(what, known), "says": known_lines(what, known)}


def known_lines(what: str, known: Known) -> list[str]:
    """How far predictions of this kind were off, in one or two sentences.

    Args:
        what: `step`, `gain` or `change`.
    """
    used = known.used
    off = f"{_OFF_NAMES[what]} were predicted {_off(what, known)}"
    counted = f"the {PERCENT} interval has the model's error on {_counted(what, known)} of"
    if known.alike:
        line = f"{counted[0].upper()}{counted[1:]} this kind ({known.kind}): {off}"
    else:
        line = f"{_too_few(what, known)}; {counted} more kinds: {off}"
    lines = [f"{line}. Such intervals contained {used.contained} of these {len(used)}."]
    if used.fitted:
        count = sum(bool(one.fitted) for one in used.each)
        lines.append(
            f"For {'all' if count == len(used) else count} of them, {_fitted(used)} was fitted to "
            "another run of the same system; where you fit or measure nothing, expect more."
        )
    return lines


def _too_few(what: str, known: Known) -> str:
    """Why the rows of this kind do not make the interval."""
    own = known.of_kind
    if not own:
        return f"No {_row_name(what)} of this kind ({known.kind}) was ever compared"
    factor = number(round(own.largest_factor, 2))
    off = f"compared, off by a factor of {'up to ' if len(own) > 1 else ''}{factor}"
    names = f"{_row_name(what, len(own))} of this kind ({known.kind})"
    verb = "was" if len(own) == 1 else "were"
    if all(one.fitted for one in own.each):
        return (
            f"{len(own)} {names} {verb} {off}, but after {_fitted(own)} had been fitted to another "
            "run of the same system"
        )
    return f"Only {len(own)} {names} {verb} {off}"


def _fitted(residuals: Residuals) -> str:
    return " or ".join(_FITTED_NAMES.get(name, name) for name in residuals.fitted)


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


def _record(what: str, known: Known) -> dict[str, Any]:
    used, own = known.used, known.of_kind
    return {
        "of": what,
        "kind": str(known.kind),
        "rows": len(used),
        "groups": len(used.groups),
        "median_factor": used.median_factor,
        "largest_factor": used.largest_factor,
        "spread": known.error.spread,
        "contained": used.contained,
        "fitted_before": list(used.fitted),
        "rows_of_kind": len(own),
        "median_factor_of_kind": own.median_factor if own else None,
        "largest_factor_of_kind": own.largest_factor if own else None,
    }


def _counted(what: str, known: Known) -> str:
    rows, groups = len(known.used), len(known.used.groups)
    return f"{rows} {_row_name(what, rows)} ({groups} systems and models)"


def _row_name(what: str, count: int = 1) -> str:
    name = "pair of measured runs" if what == "change" else "measured run"
    if count == 1:
        return name
    return name.replace("pair", "pairs") if what == "change" else f"{name}s"


def _off(what: str, known: Known) -> str:
    used = known.used
    half, most = (number(round(one, 2)) for one in (used.median_factor, used.largest_factor))
    text = f"wrong by a factor of {half} in the median, {most} at most"
    if what == "change":
        return text
    sign = 1 if what == "step" else -1
    wrong = sum(sign * one.value > 0 for one in used.each)
    return f"{text}, {wrong} of {len(used)} {_SIGNS[what]}"
