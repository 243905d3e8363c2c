"""The candidates of a plan: every combination, what is impossible about some, and why.

lists of the plan file --every combination, once--> limits --> check --> possible candidates

Check that measured times in a plan's base apply to all candidates.

A time measured on some GPUs is the same for every candidate, so that more or other GPUs would seem
to change nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from areal_lab.config.problem import Kind
from areal_lab.config.record import value_of
from areal_lab.control.schedule import FIXED_ETA
from simulator.assembly.build import problems
from simulator.assembly.simulate import nearest_split
from simulator.catalogue.gpu import OWN_FILES, find_gpu
from simulator.config.schema import SimulationConfig
from simulator.plan.schema import PlanConfig


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """One combination."""

    number: int
    """Place in the order of the plan file; also its name."""
    config: SimulationConfig

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.config.cluster.gpus

    @property
    def cluster(self) -> tuple[str, str, int]:
        """Types and number of the GPUs to rent or buy."""
        cluster = self.config.cluster
        return (cluster.gpu, cluster.rollout_gpu, cluster.gpus)

    @property
    def eta(self) -> float:
        """Versions that generation may run ahead."""
        return self.config.schedule.versions_ahead

    @property
    def stale(self) -> bool:
        """True if it trains on responses of older weights; else it is synchronous."""
        return self.eta > 0

    @property
    def hardware(self) -> str:
        """GPUs in words, as `128 H100`, `96 H20 + 32 H100` or `8 H100`."""
        cluster = self.config.cluster
        name = find_gpu(cluster.gpu).name
        if cluster.colocated or cluster.generating_gpu == cluster.gpu:
            return f"{cluster.gpus} {name}"
        generates = find_gpu(cluster.generating_gpu).name
        return f"{cluster.generating_gpus} {generates} + {cluster.only_training_gpus} {name}"

    @property
    def split(self) -> str:
        """Who does what, as in `96 + 32, TP 1 / TP 2 PP 2 EP 8`; generation comes first."""
        cluster, trainer = self.config.cluster, self.config.trainer
        place = "shared"
        if not cluster.colocated:
            place = f"{cluster.generating_gpus} + {cluster.only_training_gpus}"
            if cluster.hybrid_gpus:
                place += f", {cluster.hybrid_gpus} hybrid"
        text = f"{place}, TP {self.config.rollout.tensor_parallel}"
        more = {
            "EP": trainer.expert_parallel,
            "CP": trainer.context_parallel,
            "SP": trainer.sequence_parallel,
        }
        others = "".join(f" {name} {size}" for name, size in more.items() if size > 1)
        if trainer.tensor_parallel > 1 or trainer.pipeline_parallel > 1 or others:
            text += f" / TP {trainer.tensor_parallel} PP {trainer.pipeline_parallel}{others}"
        return text

    @property
    def kind(self) -> str:
        """How generation and training share GPUs: `shared`, `separate`, `separate, streamed`,
        `hybrid`."""
        cluster = self.config.cluster
        if cluster.colocated:
            return "shared"
        kind = "hybrid" if cluster.hybrid_gpus else "separate"
        return f"{kind}, streamed" if self.config.batch_parts > 1 else kind

    @property
    def schedule(self) -> str:
        """Schedule in words, as `asynchronous, eta 4`."""
        name = self.config.schedule.name.replace("_", " ")
        if self.config.schedule.name not in FIXED_ETA:
            name += f", eta {self.eta:g}"
        parts = self.config.batch_parts
        return f"{name}, in {parts} parts" if parts > 1 else name


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a candidate is excluded."""

    kind: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """All combinations, sorted."""

    possible: tuple[Candidate, ...]
    impossible: tuple[Refusal, ...]
    over_limits: tuple[Refusal, ...]
    merged: int
    """Combinations that are another one: two shares that give the same split, eta of a synchronous
    schedule."""

    @property
    def combinations(self) -> int:
        """All of them."""
        others = len(self.impossible) + len(self.over_limits) + self.merged
        return len(self.possible) + others


def expand(plan: PlanConfig) -> Space:
    """Every combination that the plan file allows."""
    possible: list[Candidate] = []
    impossible: list[Refusal] = []
    over: list[Refusal] = []
    seen: set[tuple[object, ...]] = set()
    merged = 0
    for number, found in enumerate(_combinations(plan)):
        if isinstance(found, Refusal):
            impossible.append(found)
            continue
        key = _key(found)
        if key in seen:
            merged += 1
            continue
        seen.add(key)
        candidate = Candidate(number, found)
        if candidate.gpus > plan.limits.gpus:
            over.append(Refusal(kind="limits.gpus", why=_gpus(candidate.gpus)))
        elif candidate.eta > plan.limits.eta:
            over.append(Refusal(kind="limits.eta", why=f"eta {candidate.eta:g}"))
        elif wrong := problems(found):
            impossible.append(Refusal(kind=wrong[0].kind, why=wrong[0].message))
        else:
            possible.append(candidate)
    return Space(
        possible=tuple(possible),
        impossible=tuple(impossible),
        over_limits=tuple(over),
        merged=merged,
    )


def _gpus(number: int) -> str:
    return "1 GPU" if number == 1 else f"{number} GPUs"


_LISTS: Final = {
    "rollout_gpu": "cluster.rollout_gpu",
    "placement": "cluster.placement",
    "schedule": "schedule.name",
    "eta": "schedule.eta",
    "require_batches": "schedule.require_batches",
    "rollout_tensor_parallel": "rollout.tensor_parallel",
    "trainer_tensor_parallel": "trainer.tensor_parallel",
    "trainer_pipeline_parallel": "trainer.pipeline_parallel",
    "trainer_expert_parallel": "trainer.expert_parallel",
    "trainer_context_parallel": "trainer.context_parallel",
    "trainer_sequence_parallel": "trainer.sequence_parallel",
    "micro_batch_tokens": "trainer.micro_batch_tokens",
}
"""Lists whose values are those of one setting."""


def _combinations(plan: PlanConfig) -> Iterator[SimulationConfig | Refusal]:
    base, lists = plan.base, plan.candidates
    shares = lists.rollout_share or [base.cluster.rollout_gpus / base.cluster.gpus]
    hybrids: Sequence[bool | None] = lists.hybrid or [None]
    values = [getattr(lists, name) or [value_of(base, of)] for name, of in _LISTS.items()]
    for gpu in lists.gpu or [base.cluster.gpu]:
        for gpus, *choice, hybrid, share in itertools.product(
            _counts(plan, gpu), *values, hybrids, shares
        ):
            settings = dict(zip(_LISTS.values(), choice, strict=True))
            settings |= {"cluster.gpu": _spelled(gpu), "cluster.gpus": gpus}
            yield _combine(base, settings, hybrid, share)


def _spelled(gpu: str) -> str:
    """A GPU as the catalogue spells it; one of the user's own stays the file that it is."""
    return gpu if gpu.endswith(OWN_FILES) or not gpu else find_gpu(gpu).name


def _combine(
    base: SimulationConfig, settings: dict[str, Any], hybrid: bool | None, share: float
) -> SimulationConfig | Refusal:
    """A combination.

    Args:
        hybrid: whether GPUs that train generate, too; None keeps the number of `base`.
        share: of the GPUs, which only generate.
    """
    gpus, rollout_gpu = settings["cluster.gpus"], _spelled(settings["cluster.rollout_gpu"])
    settings["cluster.rollout_gpu"] = "" if rollout_gpu == settings["cluster.gpu"] else rollout_gpu
    settings["cluster.rollout_gpus"] = gpus
    if settings["cluster.placement"] == "colocated":
        # What separate trainers have.
        settings |= {"schedule.require_batches": 0, "cluster.hybrid_gpus": 0}
    else:
        engine = settings["rollout.tensor_parallel"]
        sizes = {name: settings[f"trainer.{name}_parallel"] for name in (*_OF_A_RANK, "expert")}
        experts = sizes["pipeline"] * sizes.pop("expert")  # divide the GPUs of a stage
        trainer = math.lcm(math.prod(sizes.values()), experts)
        split = nearest_split(gpus, share, engine, trainer)
        if split is None:
            return Refusal(
                kind=Kind.DIVISIBILITY,
                why=(
                    f"{_gpus(gpus)} cannot be split into engines of {engine} and a trainer of "
                    f"{trainer} (tensor x pipeline parallel, and more) GPUs or multiples; "
                    "take more GPUs or less parallelism"
                ),
            )
        settings["cluster.rollout_gpus"] = gpus if hybrid else split
        if hybrid is not None:
            settings["cluster.hybrid_gpus"] = gpus - split if hybrid else 0
    if settings["schedule.name"] == "asynchronous" and settings["schedule.eta"] == 0:
        settings["schedule.name"] = "synchronous"
    return base.with_settings(settings)


_OF_A_RANK: Final = ("tensor", "pipeline", "context", "sequence")
"""Parallelism whose product is the GPUs of a data-parallel rank."""


def _counts(plan: PlanConfig, gpu: str) -> Sequence[int]:
    lists, node = plan.candidates, find_gpu(gpu).node_gpus
    nodes = list(lists.nodes)
    if lists.node_range:
        first, last, *step = lists.node_range
        nodes.extend(range(first, last + 1, step[0] if step else 1))
    counts = [*lists.gpus, *(node * count for count in nodes)]
    return sorted(set(counts)) or [plan.base.cluster.gpus]


def _key(config: SimulationConfig) -> tuple[object, ...]:
    """Identity of a combination, whatever it was combined from."""
    cluster, trainer, schedule = config.cluster, config.trainer, config.schedule
    return (
        *(cluster.gpu, cluster.rollout_gpu, cluster.gpus, cluster.placement, cluster.rollout_gpus),
        *(cluster.hybrid_gpus, schedule.name, schedule.versions_ahead, schedule.require_batches),
        *(config.rollout.tensor_parallel, trainer.micro_batch_tokens),
        *(trainer.tensor_parallel, trainer.pipeline_parallel, trainer.expert_parallel),
        *(trainer.context_parallel, trainer.sequence_parallel),
    )


def check_measured(plan: PlanConfig, candidates: Sequence[Candidate]) -> None:
    """Refuse candidates that differ in something that a measured number of the base depends on."""
    found = list(_differing(plan, candidates))
    if found:
        raise ValueError("\n".join(found))


def _differing(plan: PlanConfig, candidates: Sequence[Candidate]) -> Iterator[str]:
    rollout, trainer = plan.base.rollout, plan.base.trainer
    training = [_training_side(one) for one in candidates]
    engines = [_engine_side(one) for one in candidates]
    for name, seconds, sides, added in (
        ("trainer.step_s", trainer.step_s, training, {"trainer.token_s": trainer.token_s}),
        (
            "rollout.decode_step_s",
            rollout.decode_step_s,
            engines,
            {
                "rollout.decode_sequence_s": rollout.decode_sequence_s,
                "rollout.decode_context_token_s": rollout.decode_context_token_s,
            },
        ),
        (
            "rollout.prefill_pass_s",
            rollout.prefill_pass_s,
            engines,
            {
                "rollout.prefill_token_s": rollout.prefill_token_s,
                "rollout.prefill_pair_s": rollout.prefill_pair_s,
            },
        ),
    ):
        differ = _what_differs(sides)
        if seconds is None or not differ:
            continue
        fix = " ".join(
            [f"base.{name}=null", *(f"base.{other}=0" for other, value in added.items() if value)]
        )
        yield (
            f"base.{name} is {seconds:g}, measured on some GPUs, but candidates differ in "
            f"{'; '.join(differ)}; let the cost model compute it ({fix}), or use only candidates "
            "like those that were measured"
        )


def _training_side(one: Candidate) -> Mapping[str, object]:
    cluster, trainer = one.config.cluster, one.config.trainer
    return {
        "type of GPU that trains": find_gpu(cluster.gpu).name,
        "number of GPUs that train": cluster.training_gpus,
        "trainer.tensor_parallel": trainer.tensor_parallel,
        "trainer.pipeline_parallel": trainer.pipeline_parallel,
        "trainer.expert_parallel": trainer.expert_parallel,
        "trainer.context_parallel": trainer.context_parallel,
        "trainer.sequence_parallel": trainer.sequence_parallel,
        "trainer.micro_batch_tokens": trainer.micro_batch_tokens,
    }


def _engine_side(one: Candidate) -> Mapping[str, object]:
    cluster = one.config.cluster
    return {
        "type of GPU that generates": find_gpu(cluster.generating_gpu).name,
        "rollout.tensor_parallel": one.config.rollout.tensor_parallel,
    }


def _what_differs(sides: Sequence[Mapping[str, object]]) -> list[str]:
    values = (
        {name: dict.fromkeys(side[name] for side in sides) for name in sides[0]} if sides else {}
    )
    return [
        f"{name} ({', '.join(map(str, sorted(some, key=_order)))})"
        for name, some in values.items()
        if len(some) > 1
    ]


def _order(value: object) -> tuple[float, str]:
    return (float(value), "") if isinstance(value, int) else (0.0, str(value))
