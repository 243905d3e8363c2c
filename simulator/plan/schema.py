"""A plan file: what is wanted, within which limits, and what may be varied to reach it.

objective, steps, limits     the question
candidates                   lists of what may be varied; an empty list keeps what base has
base                         everything else: the settings of `areal-lab simulate`
prices, search               one's own prices; how thoroughly to look
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

from areal_lab.config.load import load_record
from areal_lab.config.shipped import plan_questions, settings_file
from areal_lab.config.suggest import did_you_mean
from areal_lab.control.schedule import SCHEDULES
from simulator.assembly.check import PLACEMENTS, wrong_values, wrong_workload
from simulator.catalogue.find_gpu import find_gpu
from simulator.config.load import load_simulation
from simulator.config.schema import SimulationConfig

OBJECTIVES: Final = ("gpus", "dollars", "hours")

ALIASES: Final = MappingProxyType(
    {
        "deadline_h": "limits.deadline_h",
        "budget_dollars": "limits.budget_dollars",
        "model": "base.model",
        "seeds": "search.seeds",
        "seed": "base.seed",
    }
)
"""Other spellings of a setting."""


@dataclass(kw_only=True)
class LimitsConfig:
    """What an answer must keep to."""

    eta: float = math.inf
    """Largest staleness bound that the algorithm is trusted with, in versions."""
    deadline_h: float = math.inf
    """Longest duration of all steps, in hours."""
    budget_dollars: float = math.inf
    """Most money for all steps."""
    gpus: float = math.inf
    """Most GPUs."""


@dataclass(kw_only=True)
class CandidatesConfig:
    """What may be varied. Every combination is a candidate; an empty list keeps what base has."""

    gpu: list[str] = field(default_factory=list)
    """Types of GPU."""
    rollout_gpu: list[str] = field(default_factory=list)
    """Types for generation where they differ; '' is the type that trains."""
    gpus: list[int] = field(default_factory=list)
    """Numbers of GPUs, all of them together."""
    nodes: list[int] = field(default_factory=list)
    """The same in nodes; adds to `gpus`."""
    node_range: list[int] = field(default_factory=list)
    """The same as first, last and, if it is not 1, step."""
    placement: list[str] = field(default_factory=list)
    """`disaggregated`, `colocated`."""
    schedule: list[str] = field(default_factory=list)
    """`synchronous`, `one_step_overlap`, `asynchronous`, `partial_rollout`."""
    eta: list[float] = field(default_factory=list)
    """Staleness bounds, of schedules that have one; asynchronous with eta 0 is synchronous."""
    rollout_share: list[float] = field(default_factory=list)
    """Shares of the GPUs that generate, when disaggregated. The nearest number is taken that both
    sides can divide by their parallelism."""
    rollout_tensor_parallel: list[int] = field(default_factory=list)
    """GPUs per engine."""
    trainer_tensor_parallel: list[int] = field(default_factory=list)
    """GPUs that share each matrix product in training."""
    trainer_pipeline_parallel: list[int] = field(default_factory=list)
    """Stages of the trainer."""
    micro_batch_tokens: list[int] = field(default_factory=list)
    """Token budgets of a micro-batch."""


@dataclass(kw_only=True)
class PriceEntry:
    """What one type of GPU costs, in dollars per GPU-hour; replaces the catalogue's price."""

    gpu: str
    typical: float
    low: float | None = None
    """None is `typical`."""
    high: float | None = None
    """None is `typical`."""


@dataclass(kw_only=True)
class SearchConfig:
    """How thoroughly to look."""

    screening_steps: int = 5
    """Training steps of the first look, with one seed."""
    screening_warmup_steps: int = 2
    """Of them, those at the beginning that are left out."""
    steps: int = 8
    """Training steps of the second look, at what is near the front."""
    warmup_steps: int = 3
    """Of them, those at the beginning that are left out."""
    seeds: int = 3
    """Repetitions of the second look, which the intervals are over."""
    near: float = 0.05
    """How much worse than the front, in time or money, a candidate may have seemed for a second
    look."""
    sensitivity: int = 4
    """Candidates, those nearest to the answer, that are tried again under other inputs; 0 leaves
    the sensitivity out."""


@dataclass(kw_only=True)
class PlanConfig:
    """One question."""

    name: str = "plan"
    """Title of results and pictures."""
    objective: str = "hours"
    """What is to be least: `gpus`, `dollars` or `hours`."""
    steps: int = 250
    """Training steps of the whole run."""
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    candidates: CandidatesConfig = field(default_factory=CandidatesConfig)
    prices: list[PriceEntry] = field(default_factory=list)
    """Prices of one's own, as `[{gpu: H800, typical: 2.0}]`."""
    search: SearchConfig = field(default_factory=SearchConfig)
    simulation: str = ""
    """A file or preset of `areal-lab simulate` that `base` starts from."""
    base: SimulationConfig = field(default_factory=SimulationConfig)
    """All that is not varied."""


def load_plan(source: str | Path | None, overrides: Sequence[str] = ()) -> PlanConfig:
    """Merge a plan file and overrides onto the simulation that it starts from.

    Args:
        source: a YAML file, or the name of a shipped one (`plan_example`); None takes the defaults.
        overrides: `a.b=c` each, the value in YAML.

    Raises:
        ValueError: in one line each: no such file, unknown key (with the nearest name), wrong type,
            or a number that cannot be.
    """
    path = None if source is None else settings_file(source, plan_questions(), "plan")
    plan = load_record(PlanConfig, path, overrides, ALIASES, may_be_empty=False)
    if plan.simulation:
        plan = load_record(_starting_from(plan.simulation), path, overrides, ALIASES)
    if path is not None and plan.name == PlanConfig.name:
        plan.name = path.stem
    check_plan(plan)
    return plan


def check_plan(plan: PlanConfig) -> None:
    """Refuse what cannot be asked; candidates are judged later, one by one.

    Raises:
        ValueError: one line for each mistake.
    """
    found = [
        *_wrong_question(plan),
        *_wrong_base(plan.base),
        *_wrong_candidates(plan.candidates),
        *_wrong_search(plan),
    ]
    for entry in plan.prices:
        known = [one for one in (entry.low, entry.typical, entry.high) if one is not None]
        if any(not math.isfinite(one) or one < 0 for one in known) or known != sorted(known):
            found.append(
                f"the price of {entry.gpu} is {entry.low} / {entry.typical} / {entry.high}, but "
                "must be 0 <= low <= typical <= high dollars per GPU-hour"
            )
    found.extend(_wrong_gpus(plan))
    if found:
        raise ValueError("\n".join(found))


def _wrong_question(plan: PlanConfig) -> Iterator[str]:
    if plan.objective not in OBJECTIVES:
        yield f"objective is {plan.objective!r}; {did_you_mean(plan.objective, OBJECTIVES)}"
    if plan.steps < 1:
        yield f"steps is {plan.steps}, but must be >= 1: training steps of the whole run"
    for name in ("eta", "deadline_h", "budget_dollars", "gpus"):
        value = getattr(plan.limits, name)
        least = 0 if name in ("eta", "budget_dollars") else 1e-9
        if math.isnan(value) or value < least:
            bound = ">= 0" if least == 0 else "> 0"
            yield f"limits.{name} is {value}, but must be {bound}; leave it out for no limit"
    if plan.base.workload.answers.drift_per_step != 0:
        yield (
            f"base.workload.answers.drift_per_step is {plan.base.workload.answers.drift_per_step}, "
            "but a plan looks at a few steps and takes them for all: give the mean length of the "
            "whole run as answers.mean_tokens, and drift 0"
        )


def _wrong_base(base: SimulationConfig) -> Iterator[str]:
    """What no candidate can mend, for none has another."""
    for line in wrong_values(base) or wrong_workload(base):
        yield f"base.{line}"


def _wrong_gpus(plan: PlanConfig) -> Iterator[str]:
    for where, names in (
        ("candidates.gpu", plan.candidates.gpu),
        ("candidates.rollout_gpu", [name for name in plan.candidates.rollout_gpu if name]),
        ("prices", [entry.gpu for entry in plan.prices]),
    ):
        for name in names:
            try:
                find_gpu(name)
            except ValueError as error:
                yield f"{where}: {error}"


def _wrong_candidates(candidates: CandidatesConfig) -> Iterator[str]:
    for name in (
        *("gpus", "nodes", "rollout_tensor_parallel", "trainer_tensor_parallel"),
        *("trainer_pipeline_parallel", "micro_batch_tokens"),
    ):
        for value in getattr(candidates, name):
            if value < 1:
                yield f"candidates.{name} has {value}, but each must be >= 1"
    for name, known in (("placement", PLACEMENTS), ("schedule", SCHEDULES)):
        for value in getattr(candidates, name):
            if value not in known:
                yield f"candidates.{name} has {value!r}; {did_you_mean(value, known)}"
    for share in candidates.rollout_share:
        if not 0 < share < 1:
            yield f"candidates.rollout_share has {share}, but each must be between 0 and 1"
    for eta in candidates.eta:
        if math.isnan(eta) or eta < 0:
            yield f"candidates.eta has {eta}, but each must be a number >= 0; inf has no bound"
    span = candidates.node_range
    if span and not (len(span) in (2, 3) and 1 <= span[0] <= span[1] and span[-1] >= 1):
        yield (
            f"candidates.node_range is {span}, but must be [first, last] or [first, last, step], "
            "with 1 <= first <= last"
        )


def _wrong_search(plan: PlanConfig) -> Iterator[str]:
    search = plan.search
    for steps, warmup in (("screening_steps", "screening_warmup_steps"), ("steps", "warmup_steps")):
        some, left_out = getattr(search, steps), getattr(search, warmup)
        if not 0 <= left_out < some:
            yield (
                f"search.{warmup} is {left_out} of search.{steps} {some}, which leaves none to "
                "average; raise steps"
            )
    if search.seeds < 1:
        yield f"search.seeds is {search.seeds}, but must be >= 1; 3 or more give intervals"
    if search.sensitivity < 0:
        yield f"search.sensitivity is {search.sensitivity}, but must be >= 0; 0 leaves it out"
    if not 0 <= search.near < math.inf:
        yield (
            f"search.near is {search.near}, but must be >= 0 and finite: 0.05 is 5 % worse than "
            "the front"
        )


def _starting_from(source: str) -> type[PlanConfig]:
    """The record of a plan whose `base` is not the defaults, but a file or preset."""
    start = load_simulation(source)  # here, for what is wrong with it to be said as it is

    @dataclass(kw_only=True)
    class Based(PlanConfig):
        base: SimulationConfig = field(default_factory=lambda: copy.deepcopy(start))

    return Based
