"""Schema of a plan file: the objective, its limits, and the candidates.

objective, steps, limits     what to minimize, and within which limits
candidates                   lists of values to try; an empty list keeps the value of base
base                         everything else: the settings of `areal-lab simulate`
prices, search               your own prices; how thoroughly to search
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Final, Literal

from annotated_types import Ge, Gt, Lt
from pydantic import Field

from areal_lab.config.dump import to_yaml
from areal_lab.config.given import Overrides, Source, given_config, source_files
from areal_lab.config.load import load_record
from areal_lab.config.problem import ConfigError, Kind, Problem, below, problems_of
from areal_lab.config.record import About, Count, NonNegative, Record, Whole
from areal_lab.config.shipped import plan_questions
from areal_lab.control.schedule import ScheduleName
from simulator.assembly.build import lengths_of, named_of
from simulator.catalogue.gpu import find_gpu
from simulator.config.load import load_simulation
from simulator.config.schema import Placement, Seconds, SimulationConfig, Versions

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


_NO_LIMIT: Final = About(hint="leave it out for no limit")
_AboveZero = Annotated[float, Gt(0), _NO_LIMIT]


class LimitsConfig(Record):
    """Limits of an acceptable plan."""

    eta: Versions = math.inf
    """Largest staleness bound that the algorithm tolerates."""
    deadline_h: _AboveZero = math.inf
    """Maximum duration of the whole run."""
    budget_dollars: Annotated[float, Ge(0), _NO_LIMIT] = math.inf
    """Maximum cost of the whole run."""
    gpus: _AboveZero = math.inf
    """Maximum number of GPUs."""


class CandidatesConfig(Record):
    """Values to try, in every combination. An empty list keeps the value of `base`."""

    gpu: list[str] = Field(default_factory=list)
    """GPU types."""
    rollout_gpu: list[str] = Field(default_factory=list)
    """GPU types for generation if they differ; '' is the type that trains."""
    gpus: list[Count] = Field(default_factory=list)
    """Numbers of GPUs."""
    nodes: list[Count] = Field(default_factory=list)
    """Numbers of GPUs, counted in nodes; adds to `gpus`."""
    node_range: list[Count] = Field(default_factory=list)
    """The same as [first, last] or [first, last, step]."""
    placement: list[Placement] = Field(default_factory=list)
    """Placements."""
    schedule: list[ScheduleName] = Field(default_factory=list)
    """Schedules."""
    eta: list[Versions] = Field(default_factory=list)
    """Staleness bounds, for schedules that have one; asynchronous with eta 0 is synchronous."""
    rollout_share: list[Annotated[float, Gt(0), Lt(1)]] = Field(default_factory=list)
    """Shares of the GPUs used for generation, when disaggregated. Each is rounded to the nearest
    split that both sides can divide by their parallelism."""
    rollout_tensor_parallel: list[Count] = Field(default_factory=list)
    """GPUs per engine."""
    trainer_tensor_parallel: list[Count] = Field(default_factory=list)
    """GPUs that share each matrix product in training."""
    hybrid: list[bool] = Field(default_factory=list)
    """True lets the GPUs that train generate, too, until the batch is complete, when disaggregated
    (`cluster.hybrid_gpus`)."""
    require_batches: list[Whole] = Field(default_factory=list)
    """Minibatches that the trainer takes at once, when disaggregated
    (`schedule.require_batches`); 0 waits for the whole batch."""
    trainer_pipeline_parallel: list[Count] = Field(default_factory=list)
    """Pipeline stages of the trainer."""
    trainer_expert_parallel: list[Count] = Field(default_factory=list)
    """GPUs that share the experts of a layer in training."""
    trainer_context_parallel: list[Count] = Field(default_factory=list)
    """GPUs that share the tokens of a micro-batch around a ring."""
    trainer_sequence_parallel: list[Count] = Field(default_factory=list)
    """GPUs that exchange tokens for heads (Ulysses)."""
    micro_batch_tokens: list[Count] = Field(default_factory=list)
    """Token budgets of a micro-batch."""


class PriceEntry(Record):
    """Price of a GPU type, in dollars per GPU-hour; replaces the catalogue's."""

    gpu: str
    """Name in the catalogue."""
    typical: NonNegative
    """Usual price."""
    low: NonNegative | None = None
    """Low end; null takes `typical`."""
    high: NonNegative | None = None
    """High end; null takes `typical`."""
    reserved: NonNegative | None = None
    """With a contract of a year or more."""
    spot: NonNegative | None = None
    """Of capacity that may be taken away."""
    interruptions_per_day: NonNegative = 0.0
    """How often each spot node is taken away. The whole run stops each time, and continues from its
    last checkpoint (`base.outside.checkpoint_steps`)."""
    restart_s: Seconds | None = None
    """Seconds from an interruption until the run continues, with a new node."""


class SearchConfig(Record):
    """Effort of the search."""

    screening_steps: Count = 5
    """Training steps of the screening, with one seed."""
    screening_warmup_steps: Whole = 2
    """First of them left out of averages."""
    steps: Count = 8
    """Training steps of the final simulations of candidates near the Pareto front."""
    warmup_steps: Whole = 3
    """First of them left out of averages."""
    seeds: Annotated[int, Ge(1), About(hint="3 or more give intervals")] = 3
    """Repetitions of the final simulations, for confidence intervals."""
    near: Annotated[NonNegative, About(hint="0.05 is 5 % worse than the front")] = 0.05
    """How much worse than the front, in time or money, a screened candidate may be to be simulated
    again, as a share."""
    sensitivity: Whole = 4
    """Best candidates simulated again under changed inputs; 0 skips the sensitivity analysis."""


class PlanConfig(Record):
    """A question about a cluster."""

    name: str = "plan"
    """Title of results and pictures."""
    objective: Literal["gpus", "dollars", "hours"] = "hours"
    """What to minimize."""
    rank_by: Literal["mean", "pessimistic"] = "mean"
    """Hours and dollars by which candidates are ranked and held against the limits: the `mean`, or
    the `pessimistic` (high) end of the 90 % interval with the model's error."""
    steps: Count = 250
    """Training steps of the whole run."""
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    candidates: CandidatesConfig = Field(default_factory=CandidatesConfig)
    prices: list[PriceEntry] = Field(default_factory=list)
    """Your own prices, as `[{gpu: H800, typical: 2.0}]`."""
    search: SearchConfig = Field(default_factory=SearchConfig)
    simulation: str = ""
    """File or preset of `areal-lab simulate` that `base` starts from."""
    base: SimulationConfig = Field(default_factory=SimulationConfig)


def load_plan(source: Source | None = None, overrides: Overrides | None = ()) -> PlanConfig:
    """Merge a plan file and overrides onto the simulation that it starts from.

    Args:
        source: a YAML file, the name of a shipped one (`plan_example`), settings by name, or a plan
            to start from; None takes the defaults.
        overrides: `a.b=c` each, the value in YAML; or values by name.

    Raises:
        ValueError: in one line each: no such file, unknown key (with the nearest name), or a value
            that is not allowed.
    """
    files = source_files(source, plan_questions(), "plan")
    start = PlanConfig()
    for path in files:
        if isinstance(path, Path):
            start.name = path.stem
    plan = load_record(start, files, overrides, ALIASES, may_be_empty=False)
    if plan.simulation and not isinstance(source, PlanConfig):
        start.base = load_simulation(plan.simulation)
        plan = load_record(start, files, overrides, ALIASES)
    check_plan(plan)
    return plan


def plan_config(given: object) -> PlanConfig:
    """The plan of an argument: a `PlanConfig`, or what `load_plan` takes."""
    return given_config(given, PlanConfig, load_plan)


def plan_yaml(plan: PlanConfig | Source) -> str:
    """A plan as the text of a file for `areal-lab plan`; only what differs from the defaults.

        Path("my_plan.yaml").write_text(plan_yaml(plan))    load_plan("my_plan.yaml") == plan

    Settings of `base` are written where they differ from the file or preset `simulation`.

    Raises:
        ValueError: there is no such file or preset, or a text that YAML cannot hold.
    """
    plan = plan_config(plan)
    # The name always differs, and is written: without one, a plan has the name of its file.
    start = PlanConfig(name=f"not {plan.name}")
    if plan.simulation:
        start.base = load_simulation(plan.simulation)
    return to_yaml(plan, start, head=["Run it with: areal-lab plan FILE"])


def check_plan(plan: PlanConfig) -> None:
    """Refuse what cannot be asked; candidates are checked later, one by one.

    Raises:
        ConfigError: one line for each mistake.
    """
    base, unfit = plan.base, list[Problem]()
    named_of(base, unfit)
    lengths_of(base, unfit)
    found = [
        *_wrong_lengths(base),
        # What no candidate can fix, for none has another.
        *(below("base", one) for one in unfit),
        *_wrong_range(plan.candidates.node_range),
        *_wrong_warmup(plan.search),
        *_wrong_prices(plan.prices),
        *_wrong_spot(plan),
        *_wrong_gpus(plan),
    ]
    if found:
        raise ConfigError(*found)


def _wrong_lengths(base: SimulationConfig) -> Iterator[Problem]:
    if drift := base.workload.answers.drift_per_step:
        yield _wrong(
            "base.workload.answers.drift_per_step",
            f"is {drift}, but a plan looks at a few steps and takes them for all: give the mean "
            "length of the whole run as answers.mean_tokens, and drift 0",
        )


def _wrong_prices(prices: Sequence[PriceEntry]) -> Iterator[Problem]:
    for entry in prices:
        known = [one for one in (entry.low, entry.typical, entry.high) if one is not None]
        if known != sorted(known):
            yield Problem(
                Kind.SETTINGS,
                "prices",
                f"the price of {entry.gpu} is {entry.low} / {entry.typical} / {entry.high}, but "
                "must be low <= typical <= high dollars per GPU-hour",
            )


def _wrong_spot(plan: PlanConfig) -> Iterator[Problem]:
    for entry in plan.prices:
        if not entry.interruptions_per_day:
            continue
        missing = [
            fix
            for absent, fix in (
                (entry.spot is None, "spot, dollars per GPU-hour"),
                (entry.restart_s is None, "restart_s, seconds until the run continues"),
                (
                    not plan.base.outside.checkpoint_steps,
                    "base.outside.checkpoint_steps, training steps from one checkpoint to the next",
                ),
            )
            if absent
        ]
        if missing:
            yield Problem(
                Kind.SETTINGS,
                "prices",
                f"the price of {entry.gpu} has interruptions_per_day="
                f"{entry.interruptions_per_day:g}, but not what their cost depends on; set "
                f"{' and '.join(missing)}",
            )


def _wrong_gpus(plan: PlanConfig) -> Iterator[Problem]:
    for where, names in (
        ("candidates.gpu", plan.candidates.gpu),
        ("candidates.rollout_gpu", [name for name in plan.candidates.rollout_gpu if name]),
        ("prices", [entry.gpu for entry in plan.prices]),
    ):
        for name in names:
            try:
                find_gpu(name)
            except ValueError as error:
                yield from problems_of(error, where)


def _wrong_range(span: Sequence[int]) -> Iterator[Problem]:
    if span and not (len(span) in (2, 3) and span[0] <= span[1]):
        yield _wrong(
            "candidates.node_range",
            f"is {list(span)}, but must be [first, last] or [first, last, step], with first <= "
            "last",
        )


def _wrong_warmup(search: SearchConfig) -> Iterator[Problem]:
    for steps, warmup in (("screening_steps", "screening_warmup_steps"), ("steps", "warmup_steps")):
        some, left_out = getattr(search, steps), getattr(search, warmup)
        if left_out >= some:
            yield _wrong(
                f"search.{warmup}",
                f"is {left_out} of search.{steps} {some}, which leaves none to average; raise "
                "steps",
            )


def _wrong(setting: str, text: str) -> Problem:
    return Problem(Kind.SETTINGS, setting, f"{setting} {text}")
