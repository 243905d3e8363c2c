"""How far predictions of measured runs were off, and the model's error that follows from them.

    reproductions.measured_runs --save --> data/measured_errors.json --measured_errors-->
        MeasuredErrors --step, gain, change (a Kind)--> Known (rows, error) --> intervals

The rows are published runs of other systems. A row is in the file only if nothing was fitted to it;
what was fitted to another run of the same system is written beside it. `ln(predicted / measured)`
is > 0 for a step that was predicted too long, and for a gain that was predicted too high.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from simulator.catalogue.find_gpu import find_gpu
from simulator.catalogue.models import find_model
from simulator.config.schema import SimulationConfig
from simulator.stats.model_error import ModelError, model_error, with_model_error

FILE: Final = Path(__file__).parent / "data" / "measured_errors.json"
LEAST_GROUPS: Final = 3
"""Groups in which nothing was fitted that a kind must have before its own rows make its intervals;
with fewer, they come from more kinds. A prediction after a fit to the same kind is an easy one."""
_WIDER: Final[tuple[tuple[str, ...], ...]] = (
    ("mixture", "colocated", "agent"),
    ("mixture", "colocated"),
    ("colocated",),
    (),
)
"""What rows must have in common with a kind: all of it, then less and less."""


class Kind(NamedTuple):
    """What kind of run a prediction is of."""

    mixture: bool
    """A mixture of experts; else a dense model."""
    colocated: bool
    """All GPUs generate and train in turn; else some generate and the others train."""
    agent: bool
    """Several model calls per response, with tools."""

    def __str__(self) -> str:
        """As in `dense, disaggregated`."""
        words = [
            "mixture of experts" if self.mixture else "dense",
            "colocated" if self.colocated else "disaggregated",
        ]
        return ", ".join([*words, "agent"] if self.agent else words)


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
    """The same of the synchronous over this run's seconds; None of synchronous runs."""


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
        """How many."""
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
        """How many are within an interval that is made from the other groups, without seeds."""
        groups, count = self.groups, 0
        for group, own in groups.items():
            others = [values for other, values in groups.items() if other != group]
            if others:
                around = with_model_error([1.0, 1.0], model_error(others))
                count += sum(around.contains(math.exp(-value)) for value in own)
        return count

    @property
    def enough(self) -> bool:
        """Whether they have enough groups in which nothing was fitted."""
        return len({one.group for one in self.each if not one.fitted}) >= LEAST_GROUPS

    @property
    def fitted(self) -> tuple[str, ...]:
        """Settings that were fitted for some of them."""
        return tuple(sorted({name for one in self.each for name in one.fitted}))


class Known(NamedTuple):
    """What is known of the error of one number."""

    kind: Kind
    of_kind: Residuals
    """Of runs of this kind."""
    used: Residuals
    """Those that make the interval: the same, or of more kinds if there are too few groups."""
    error: ModelError

    @property
    def alike(self) -> bool:
        """Whether the interval comes from runs of this kind only."""
        return self.used == self.of_kind


class MeasuredErrors:
    """The errors of predictions of measured runs."""

    def __init__(self, rows: Sequence[MeasuredRow]) -> None:
        """Keep the rows.

        Raises:
            ValueError: there is none.
        """
        if not rows:
            raise ValueError("no measured row; run: python -m reproductions.measured_runs --save")
        self.rows = tuple(rows)

    def step(self, kind: Kind) -> Known:
        """Of seconds per step, and of numbers that are proportional to them or their inverse."""
        return _known(
            kind, [Residual(row.kind, row.group, row.step, row.fitted) for row in self.rows]
        )

    def gain(self, kind: Kind) -> Known:
        """Of the gain of asynchrony over a synchronous run of the same system.

        Without such a row, the errors of steps are those of a gain: the synchronous step is fitted.
        """
        found = [
            Residual(row.kind, row.group, row.gain, row.fitted)
            for row in self.rows
            if row.gain is not None
        ]
        return _known(kind, found) if found else self.step(kind)

    def change(self, kind: Kind) -> Known:
        """Of the ratio of two runs of one kind: other GPUs, splits or staleness, the same system.

        ln(ratio predicted / measured) is the difference of the rows' errors. Of three rows or more
        every pair counts, but each group counts once.
        """
        found = [
            Residual(one.kind, one.group, one.step - other.step, one.fitted)
            for one, other in itertools.combinations(self.rows, 2)
            if one.family == other.family and one.kind == other.kind
        ]
        return _known(kind, found) if found else self.step(kind)

    def never_compared(self) -> list[str]:
        """Kinds of runs without a row, in words."""
        kinds = {row.kind for row in self.rows}
        found = []
        if not any(kind.agent for kind in kinds):
            found.append("agents (several model calls per response, tools)")
        for mixture, colocated in itertools.product((False, True), repeat=2):
            kind = Kind(mixture=mixture, colocated=colocated, agent=False)
            if kind not in kinds:
                found.append(str(kind))
        return found

    def gpus(self) -> set[str]:
        """Types of GPU with a row."""
        return {row.gpu for row in self.rows}


def kind_of(config: SimulationConfig) -> Kind:
    """The kind of a simulated run."""
    workload = config.workload
    return Kind(
        mixture=bool(find_model(config.model).experts),
        colocated=config.cluster.colocated,
        agent=workload.turns > 1 or workload.turns_most > 1,
    )


def gpus_of(config: SimulationConfig) -> list[str]:
    """Types of GPU of a run: the one that trains, then that which generates if it differs."""
    cluster = config.cluster
    return list(dict.fromkeys(find_gpu(one).name for one in (cluster.gpu, cluster.generating_gpu)))


def change_of(
    first: SimulationConfig, second: SimulationConfig, errors: MeasuredErrors
) -> tuple[str, Known]:
    """What the ratio of two runs is, and what is known of its error.

    `gain` if one is synchronous and the other is not, `change` if they are of one kind. Otherwise,
    or with other models or types of GPU, it is `both`: no measured pair differs in these, so the
    errors of the two are taken as independent.
    """
    kind, other = kind_of(second), kind_of(first)
    stale = [one.schedule.versions_ahead > 0 for one in (first, second)]
    alike = first.model == second.model and gpus_of(first) == gpus_of(second)
    if alike and stale[0] != stale[1] and kind.agent == other.agent:
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
    fields = {**record, "kind": Kind(**record["kind"]), "fitted": tuple(record["fitted"])}
    return MeasuredRow(**fields)


def _known(kind: Kind, found: Sequence[Residual]) -> Known:
    def alike(names: Sequence[str]) -> Residuals:
        return Residuals(
            tuple(
                one
                for one in found
                if all(getattr(one.kind, name) == getattr(kind, name) for name in names)
            )
        )

    nearest = [alike(names) for names in _WIDER]
    of_kind = nearest[0]
    used = next((some for some in nearest if some.enough), nearest[-1])
    error = model_error(used.groups.values())
    if of_kind:
        # If few systems of this kind are known, but were predicted worse than the others.
        own = model_error(of_kind.groups.values())
        error = ModelError(spread=max(error.spread, own.spread), groups=error.groups)
    return Known(kind, of_kind, used, error)


def _independent(one: Known, other: Known) -> Known:
    error = ModelError(
        spread=math.hypot(one.error.spread, other.error.spread),
        groups=min(one.error.groups, other.error.groups),
    )
    return other._replace(error=error)
