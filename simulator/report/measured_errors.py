"""Errors of predictions of measured runs, and the model's error that follows from them.

    reproductions.measured_runs --save --> data/measured_errors.json --measured_errors-->
        MeasuredErrors --step, gain, change (a Kind)--> Known (rows, error) --> intervals

The rows are published runs of other systems. A row is in the file only if nothing was fitted to it;
what was fitted to another run of the same system is written beside it. `ln(predicted / measured)`
is > 0 for a step that was predicted too long, and for a gain that was predicted too high.

The model's error in words and as JSON: how far predictions of measured runs were off.

step_record, change_record --> JSON with `says`, the same in sentences
number_record              --> a number with the seeds' interval and the model's error
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from simulator.catalogue.gpu import find_gpu
from simulator.catalogue.models import find_model
from simulator.config.schema import SimulationConfig
from simulator.stats.format import number
from simulator.stats.statistics import (
    SHARE,
    Estimate,
    ModelError,
    Prediction,
    estimate,
    model_error,
    prediction,
    with_model_error,
)

FILE: Final = Path(__file__).parent / "data" / "measured_errors.json"
LEAST_GROUPS: Final = 3
"""Groups in which nothing was fitted that a kind must have before its own rows make its intervals;
with fewer, they come from more kinds. A prediction after a fit to the same kind is an easy one."""
HOPPER: Final = ("H100", "H800", "H200")
"""GPUs of most of the rows."""
OTHER_GPUS: Final = f"GPUs other than {', '.join(HOPPER)}"
STATES: Final = "layers with windows or states"
DRAFTS: Final = "drafted tokens"
EAGER: Final = "decoding without CUDA graphs"
LARGEST: Final = "weights of more than 300 GB"
BROADCASTS: Final = "broadcasts of a mixture's weights"
AGENTS: Final = "agents of several turns"
PARTS: Final[Mapping[str, float]] = MappingProxyType(
    {
        OTHER_GPUS: 0.3,
        STATES: 0.3,
        DRAFTS: 0.4,
        EAGER: 0.4,
        LARGEST: 0.4,
        BROADCASTS: 0.35,
        AGENTS: 0.5,
    }
)
"""Parts of a run whose error the other runs do not know, each with the error that its terms of the
cost model state: ln(seconds), until `LEAST_GROUPS` groups with it were measured.

GPUs         kernels, engines' hosts and trainers (`trainers.ELSEWHERE`)
states       kernels that were not summed for the fits (`DecodeCost.error`)
drafts       between a chain and a tree (`speculation.CHAIN_ERROR`, `TREE_ERROR`)
eager        launches of a layer (`measured_engine.EAGER_ERROR`)
weights      broadcasts of mixtures, each row left out (`SyncSpeed.error`)
broadcasts   the same, of smaller ones: up to 0.9 of a step are such broadcasts
agents       between equal and geometric numbers of calls, 0.48, and between contexts kept in the
             cache or not, 0.14: root mean squares of twelve simulated pairs
             (docs/log.md, 2026-11-29)
"""
_LARGEST_BYTES: Final = 300e9
_OF_A_RATIO: Final = 0.5
"""Share of such an error in a ratio of two runs that both have the part: half of it cancels. An
assumption, until enough groups were measured."""
_WIDER: Final[tuple[tuple[str, ...], ...]] = (
    ("mixture", "colocated"),
    ("colocated",),
    (),
)
"""Fields that rows must share with a kind: all of them, then fewer and fewer."""


class Kind(NamedTuple):
    """Kind of run of a prediction."""

    mixture: bool
    """A mixture of experts; else a dense model."""
    colocated: bool
    """All GPUs generate and train in turn; else some generate and the others train."""
    parts: tuple[str, ...] = ()
    """Names of `PARTS` that the run has."""

    def __str__(self) -> str:
        words = [
            "mixture of experts" if self.mixture else "dense",
            "colocated" if self.colocated else "disaggregated",
        ]
        return ", ".join([*words, *self.parts])

    @property
    def plain(self) -> Kind:
        """The same without parts that widen its interval."""
        return self._replace(parts=())


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRow:
    """A measured run with the error of its prediction."""

    row: str
    family: str
    """Runs of one system under one workload."""
    group: str
    """System, model and GPU: rows of one group share their errors."""
    kind: Kind
    gpu: str
    fitted: tuple[str, ...]
    """Settings whose values were fitted to another run of the family."""
    step: float
    """ln(predicted / measured) of the seconds of a step."""
    gain: float | None
    """ln(predicted / measured) of the synchronous over this run's seconds; None of synchronous
    runs."""


class Residual(NamedTuple):
    """The error of one predicted number."""

    kind: Kind
    group: str
    value: float
    """ln(predicted / measured)."""
    fitted: tuple[str, ...]
    """Settings that were fitted to another run of the same system."""


@dataclass(frozen=True, slots=True)
class Residuals:
    """Errors of one number of several runs."""

    each: tuple[Residual, ...]

    def __len__(self) -> int:
        return len(self.each)

    @property
    def groups(self) -> dict[str, list[float]]:
        """Their values, by group."""
        found: dict[str, list[float]] = {}
        for one in self.each:
            found.setdefault(one.group, []).append(one.value)
        return found

    @property
    def median_factor(self) -> float:
        """The factor by which half of the predictions are off, either way."""
        return math.exp(median(abs(one.value) for one in self.each))

    @property
    def largest_factor(self) -> float:
        """The largest factor by which a prediction is off, either way."""
        return math.exp(max(abs(one.value) for one in self.each))

    @property
    def contained(self) -> int:
        """Number of residuals within an interval made from the other groups, without seeds."""
        groups, count = self.groups, 0
        for group, own in groups.items():
            others = [values for other, values in groups.items() if other != group]
            if others:
                around = with_model_error([1.0, 1.0], model_error(others))
                count += sum(around.contains(math.exp(-value)) for value in own)
        return count

    @property
    def enough(self) -> bool:
        """True if they have enough groups in which nothing was fitted."""
        return len({one.group for one in self.each if not one.fitted}) >= LEAST_GROUPS

    @property
    def fitted(self) -> tuple[str, ...]:
        """Settings that were fitted for some of them."""
        return tuple(sorted({name for one in self.each for name in one.fitted}))


class Known(NamedTuple):
    """Known error of one number."""

    kind: Kind
    of_kind: Residuals
    """Residuals of runs of this kind."""
    used: Residuals
    """Residuals that make the interval: the same, or of more kinds if there are too few groups."""
    error: ModelError
    parts: Mapping[str, float]
    """Errors that are added to that of `used`, in quadrature, by part: ln(seconds)."""

    @property
    def alike(self) -> bool:
        """True if the interval comes from runs of this kind only."""
        return self.used == self.of_kind


class MeasuredErrors:
    """The errors of predictions of measured runs."""

    def __init__(self, rows: Sequence[MeasuredRow]) -> None:
        if not rows:
            raise ValueError("no measured row; run: python -m reproductions.measured_runs --save")
        self.rows = tuple(rows)

    def step(self, kind: Kind) -> Known:
        """Error of seconds per step, and of numbers that are proportional to them or their
        inverse."""
        return known_error(
            kind, [Residual(row.kind, row.group, row.step, row.fitted) for row in self.rows]
        )

    def gain(self, kind: Kind) -> Known:
        """Error of the gain of asynchrony over a synchronous run of the same system.

        Without such a row, the errors of steps are those of a gain: the synchronous step is fitted.
        """
        found = [
            Residual(row.kind, row.group, row.gain, row.fitted)
            for row in self.rows
            if row.gain is not None
        ]
        return known_error(kind, found, ratio=True) if found else self.step(kind)

    def change(self, kind: Kind) -> Known:
        """Error of the ratio of two runs of one kind: other GPUs, splits or staleness, the same
        system.

        ln(ratio predicted / measured) is the difference of the rows' errors. Of three rows or more
        every pair counts, but each group counts once.
        """
        found = [
            Residual(one.kind, one.group, one.step - other.step, one.fitted)
            for one, other in itertools.combinations(self.rows, 2)
            if one.family == other.family and one.kind == other.kind
        ]
        return known_error(kind, found, ratio=True) if found else self.step(kind)

    def gpus(self) -> set[str]:
        """Types of GPU with a row."""
        return {row.gpu for row in self.rows}

    def parts(self) -> set[str]:
        """Names of `PARTS` that a row has."""
        return {name for row in self.rows for name in row.kind.parts}


def kind_of(config: SimulationConfig) -> Kind:
    """The kind of a simulated run."""
    workload, rollout, model = config.workload, config.rollout, find_model(config.model)
    large = model.weight_bytes() > _LARGEST_BYTES
    broadcasts = config.cluster.sends_weights and config.weights.backend == "nccl"
    given = config.weights.update_s is not None or config.weights.load_s is not None
    has = {
        OTHER_GPUS: any(name not in HOPPER for name in gpus_of(config)),
        STATES: model.linear is not None or model.window is not None,
        DRAFTS: rollout.speculative_tokens > 0,
        EAGER: not rollout.cuda_graphs,
        LARGEST: large,
        BROADCASTS: bool(model.experts) and broadcasts and not given and not large,
        AGENTS: workload.turns > 1 or workload.turns_most > 1,
    }
    return Kind(
        mixture=bool(model.experts),
        colocated=config.cluster.colocated,
        parts=tuple(name for name, there in has.items() if there),
    )


def gpus_of(config: SimulationConfig) -> list[str]:
    """Types of GPU of a run: the one that trains, then that which generates if it differs."""
    cluster = config.cluster
    return list(dict.fromkeys(find_gpu(one).name for one in (cluster.gpu, cluster.generating_gpu)))


def change_of(
    first: SimulationConfig, second: SimulationConfig, errors: MeasuredErrors
) -> tuple[str, Known]:
    """Kind of the ratio of two runs, and its known error.

    `gain` if one is synchronous and the other is not, `change` if they are of one kind. Otherwise,
    or with other models or types of GPU, it is `both`: no measured pair differs in these, so the
    errors of the two are taken as independent.
    """
    kind, other = kind_of(second), kind_of(first)
    stale = [one.schedule.versions_ahead > 0 for one in (first, second)]
    alike = first.model == second.model and gpus_of(first) == gpus_of(second)
    if alike and stale[0] != stale[1] and (AGENTS in kind.parts) == (AGENTS in other.parts):
        return "gain", errors.gain(other if stale[0] else kind)
    if alike and kind == other:
        return "change", errors.change(kind)
    return "both", _independent(errors.step(other), errors.step(kind))


@cache
def measured_errors() -> MeasuredErrors:
    """The packaged errors."""
    record = json.loads(FILE.read_text(encoding="utf-8"))
    return MeasuredErrors([_row(one) for one in record["rows"]])


def _row(record: Mapping[str, Any]) -> MeasuredRow:
    kind = Kind(**{**record["kind"], "parts": tuple(record["kind"]["parts"])})
    return MeasuredRow(**{**record, "kind": kind, "fitted": tuple(record["fitted"])})


def known_error(kind: Kind, found: Sequence[Residual], *, ratio: bool = False) -> Known:
    """The error of a number of runs of a kind.

    Rows without `PARTS` make the interval, if there are any. The error of each part that the kind
    has is added in quadrature: what the rows with it are off by beyond the others, or what the cost
    model states while fewer than `LEAST_GROUPS` groups have it.

    Args:
        found: errors of this number of measured runs.
        ratio: the number is one of two runs, both with these parts.
    """
    everything, found = found, [one for one in found if not one.kind.parts] or found

    def alike(names: Sequence[str]) -> Residuals:
        return Residuals(
            tuple(
                one
                for one in found
                if all(getattr(one.kind, name) == getattr(kind, name) for name in names)
            )
        )

    nearest = [alike(names) for names in _WIDER]
    same = [one for one in everything if one.kind == kind]
    of_kind = Residuals(tuple(same)) if kind.parts else nearest[0]
    used = next((some for some in nearest if some.enough), nearest[-1])
    error = model_error(used.groups.values())
    parts = {name: _part_error(name, everything, error.spread, ratio=ratio) for name in kind.parts}
    error = ModelError(spread=math.hypot(error.spread, *parts.values()), groups=error.groups)
    if of_kind:
        # If few systems of this kind are known, but were predicted worse than the others.
        own = model_error(of_kind.groups.values())
        error = ModelError(spread=max(error.spread, own.spread), groups=error.groups)
    return Known(kind, of_kind, used, error, parts)


def _part_error(name: str, found: Sequence[Residual], others: float, *, ratio: bool) -> float:
    """Error of a part beyond the spread of the others."""
    own = Residuals(tuple(one for one in found if name in one.kind.parts))
    if len(own.groups) < LEAST_GROUPS:
        return PARTS[name] * (_OF_A_RATIO if ratio else 1.0)
    spread = model_error(own.groups.values()).spread
    return math.sqrt(max(0.0, spread**2 - others**2))


def _independent(one: Known, other: Known) -> Known:
    error = ModelError(
        spread=math.hypot(one.error.spread, other.error.spread),
        groups=min(one.error.groups, other.error.groups),
    )
    return other._replace(error=error)


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
    known = math.isfinite(seeds.high)
    return {
        "mean": value.value,
        "low": value.low,
        "high": value.high,
        "seeds_low": seeds.low if known else None,
        "seeds_high": seeds.high if known else None,
    }


def step_record(kind: Kind, gpus: Sequence[str], errors: MeasuredErrors) -> dict[str, Any]:
    """The error of seconds per step of a kind of run, as JSON."""
    known, never = errors.step(kind), never_compared([kind], gpus, errors)
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
    """Errors of predictions of this kind, in one or two sentences."""
    used = known.used
    off = f"{_OFF_NAMES[what]} were predicted {_off(what, known)}"
    counted = f"the {PERCENT} interval has the model's error on {_counted(what, known)} of"
    if known.alike:
        line = f"{counted[0].upper()}{counted[1:]} this kind ({known.kind}): {off}"
    else:
        line = f"{_too_few(what, known)}; {counted} more kinds: {off}"
    lines = [f"{line}. Such intervals contained {used.contained} of these {len(used)}."]
    if wider := {name: error for name, error in known.parts.items() if error > 0}:
        each = ", ".join(f"{name} ({math.expm1(error):.0%})" for name, error in wider.items())
        lines.append(f"The interval is wider by the error of what these rows do not have: {each}.")
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


def never_compared(kinds: Iterable[Kind], gpus: Iterable[str], errors: MeasuredErrors) -> list[str]:
    """What these runs have and no measured one has: a kind, a part, a type of GPU."""
    compared = {row.kind.plain for row in errors.rows}
    known = {*errors.parts(), OTHER_GPUS}  # these are named one by one
    found: dict[str, None] = {}
    for kind in kinds:
        if kind.plain not in compared:
            found[str(kind.plain)] = None
        found |= dict.fromkeys(part for part in kind.parts if part not in known)
    measured = errors.gpus()
    return [*found, *(f"{gpu} GPUs" for gpu in gpus if gpu not in measured)]


def never_line(never: Sequence[str]) -> list[str]:
    """The same as a sentence; none if there is nothing."""
    return [f"Never compared with a measured run: {'; '.join(never)}."] if never else []


def undecided(low: float | None, high: float | None) -> bool:
    """Return whether a ratio with this interval may be a gain or a loss: whether it contains 1."""
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
        "parts": dict(known.parts),
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
