"""A system to simulate: limits for the coordinator, and a cost for each part. Seconds and tokens.

    SimulationConfig --simulate.build--> System --one_seed.run_system--> SimulationResult

Tests make a `System` by hand: those of its parts that they replace are protocols.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import simpy
from numpy.typing import NDArray

from areal_lab.control.drift import DriftLaw
from areal_lab.control.events import (
    EngineId,
    EtaRequested,
    GroupId,
    PauseRequested,
    ResumeRequested,
    Version,
)
from areal_lab.control.limits import Limits
from areal_lab.control.ranks import coordinator_of
from areal_lab.control.scaling import ScalingRule
from areal_lab.runlog.records import Segments
from simulator.catalogue.gpu import GPU
from simulator.config.schema import RolloutConfig, WorkloadConfig
from simulator.costs.controller import ControllerCost
from simulator.costs.switch import SwitchCost
from simulator.costs.training_timing import OutsideCost, Sizes
from simulator.costs.weight_sync import WeightSync
from simulator.engine.clock import RecordSpan
from simulator.engine.sequences import Decoded
from simulator.workload.randomness import TurnCounts


class Done(Protocol):
    """A group whose samples have all ended on the engine."""

    @property
    def group(self) -> GroupId:
        """Number with which the group was submitted."""
        ...

    @property
    def segments(self) -> tuple[Segments, ...]:
        """(version, tokens) stretches, one tuple per sample."""
        ...

    @property
    def decoded(self) -> Sequence[Decoded]:
        """The segments, with samples that decoded together in one entry."""
        ...


class Engine(Protocol):
    """One generation engine in simulated time, such as `simulator.engine.replica.Replica`."""

    @property
    def activity_s(self) -> Mapping[str, float]:
        """Seconds by activity: decode, prefill, recompute, paused, idle."""
        ...

    @property
    def generated_tokens(self) -> int:
        """Since the start."""
        ...

    @property
    def recomputed_tokens(self) -> int:
        """Tokens prefilled again after an interruption or a preemption."""
        ...

    @property
    def preemptions(self) -> int:
        """Sequences sent back to the queue because the cache was full."""
        ...

    def submit(
        self,
        now_s: float,
        group: GroupId,
        prompt_tokens: int,
        lengths: Sequence[int],
        version: Version,
        /,
    ) -> None:
        """Accept a group; also while paused."""
        ...

    def next_s(self) -> float:
        """When `advance` has something to do next; infinite if the engine has no work."""
        ...

    def advance(self, now_s: float, /) -> Sequence[Done]:
        """Do everything up to and including `now_s`; returns the groups that ended."""
        ...

    def pause(self, now_s: float, /) -> None:
        """Stop, and keep unfinished groups."""
        ...

    def resume(self, now_s: float, version: Version, /) -> None:
        """Continue under the weights of `version`."""
        ...

    def drop(self, now_s: float, group: GroupId, /) -> int:
        """Drop a group; returns the tokens lost."""
        ...

    def fail(self, now_s: float, /) -> Sequence[GroupId]:
        """Lose everything because the node failed; returns the lost groups."""
        ...


@runtime_checkable
class SampleEngine(Engine, Protocol):
    """An engine that reports samples before their group ends."""

    def report_samples(self) -> None:
        """From now on, keep the end of each sample for `ended_samples`."""
        ...

    def ended_samples(self, now_s: float, /) -> Sequence[tuple[GroupId, int]]:
        """Groups and numbers of their samples that ended until `now_s`, each once; after
        `advance`."""
        ...


@runtime_checkable
class RevisableEngine(Engine, Protocol):
    """An engine whose responses may change their lengths while it is paused."""

    def tokens_of(self, group: GroupId, /) -> Sequence[int]:
        """Tokens of each sample so far; all of them if the group has ended."""
        ...

    def revise(self, group: GroupId, lengths: Sequence[int], /) -> None:
        """Replace the lengths: as before for samples that have ended, else more than so far."""
        ...


class Timing(Protocol):
    """Duration of one training step."""

    @property
    def seconds(self) -> float:
        """The whole step."""
        ...

    @property
    def parts(self) -> Mapping[str, float]:
        """Seconds by activity, in order; they sum to `seconds`."""
        ...


class Training(Protocol):
    """Cost of training steps, such as `simulator.costs.training.TrainingCost`."""

    def step(self, lengths: Sizes, *, minibatches: int) -> Timing:
        """Train on sequences of `lengths` tokens (prompt and response), in batch order."""
        ...


class Lengths(Protocol):
    """Distribution of response lengths."""

    def draw(
        self, generator: np.random.Generator, groups: int, samples: int, *, step: float = 0.0
    ) -> NDArray[np.int64]:
        """[groups, samples], each at least 1."""
        ...


class Latency(Protocol):
    """Distribution of the time that something outside the GPUs takes."""

    def draw(self, generator: np.random.Generator, size: Any, /) -> NDArray[np.float64]:
        """Seconds, in an array of that shape."""
        ...


class Failures(Protocol):
    """When nodes fail, and how long they are down."""

    @property
    def detection_s(self) -> float:
        """Seconds from the failure until the run notices."""
        ...

    @property
    def restart_s(self) -> float:
        """Seconds from then until the node works again."""
        ...

    def uptime_s(self, generator: np.random.Generator, /) -> float:
        """Seconds that one node works until it fails; may be infinite."""
        ...


Process: TypeAlias = Generator[simpy.Event, Any, None]
"""A simpy process: a generator of the events it waits for."""

MakeEngine: TypeAlias = Callable[[EngineId, int, RecordSpan | None], Engine]
"""Makes an engine from its number, the run's seed and a callback for its spans (or None)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Everything that a simulation needs."""

    limits: Limits
    """Limits of the coordinator. With `train_steps` the run ends by itself after them; with None
    it is stopped after `steps`, so that generation does not run dry during the last ones."""
    workload: WorkloadConfig
    """Sizes of a step; `lengths`, `reward`, `tool` and `turn_counts` replace its distributions."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """GPUs of an engine, and what it keeps between turns."""
    lengths: Lengths
    engines: int
    """Number of engines at first."""
    scaling: ScalingRule | None = None
    """Rule by which engines join and leave; None keeps them."""
    make_engine: MakeEngine
    training: Training
    """Cost of training; its step is one part of a batch (`limits.batch_parts`)."""
    training_gpus: int = 1
    """GPUs that only train; 0 if hybrid engines' GPUs are the only ones. Ignored when colocated."""
    weights: WeightSync = field(default_factory=WeightSync)
    push_holds_trainer: bool = False
    """The trainer takes part in the transfer and continues only when all engines have loaded."""
    switch: SwitchCost | None = None
    """Cost of switching if GPUs of engines also train: of all of them (colocated), or of the hybrid
    ones (`limits.hybrid_engines`); None if none does."""
    outside: OutsideCost | None = None
    """Data, logs, validation, checkpoints; None takes no time. `before_training` is of a part."""
    controller: ControllerCost | None = None
    """Cost of bringing responses to the trainer; None takes no time."""
    drift: DriftLaw = field(default_factory=DriftLaw)
    """Drift of a batch, for a schedule that bounds it."""
    reward: Latency | None = None
    """Time to score one sample; None means no time."""
    turn_counts: TurnCounts | None = None
    """Turns of each sample; None gives every one `workload.turns`."""
    tool: Latency | None = None
    """Time between two turns of a sample; None means no time."""
    failures: Failures | None = None
    requests: Sequence[tuple[float, PauseRequested | ResumeRequested | EtaRequested]] = ()
    """Requests of a person with their seconds, in order; a pause must end."""
    engines_per_node: int = 8
    nodes_per_engine: int = 1
    training_nodes: int = 1
    rollout_gpu: GPU | None = None
    """GPU type for cost and energy; None computes neither."""
    training_gpu: GPU | None = None
    price_per_gpu_h: float | None = None
    """Replaces the prices of the catalogue."""
    overhead: float = 0.0
    """Fraction added to the price."""

    def __post_init__(self) -> None:
        hybrid = self.limits.hybrid_engines
        for name, least in {
            "engines": 1,
            "engines_per_node": 1,
            "nodes_per_engine": 1,
            "training_nodes": 1,
            "training_gpus": 0 if hybrid else 1,
        }.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be >= {least}")
        steps, minibatches = self.workload.steps, self.workload.minibatches
        if self.workload.warmup_steps >= steps:
            raise ValueError(
                f"warmup_steps is {self.workload.warmup_steps} of {steps} steps, which leaves none "
                "to average; raise steps or lower warmup_steps"
            )
        if self.limits.train_steps not in (None, steps):
            raise ValueError(
                f"limits.train_steps is {self.limits.train_steps}, but must be steps "
                f"({steps}), or None to simulate a part of a longer run"
            )
        if minibatches % self.limits.batch_parts:
            raise ValueError(
                f"limits.batch_parts is {self.limits.batch_parts}, but must divide minibatches "
                f"({minibatches})"
            )
        self._check_hybrid()
        if self.engines % self.limits.ranks or (self.limits.ranks > 1 and self.failures):
            raise ValueError(
                f"limits.ranks is {self.limits.ranks}, but must divide engines ({self.engines}), "
                "and failures of ranks are not simulated; set failures to None"
            )
        self._check_scaling()
        if self.colocated and not generates_or_trains(self.limits):
            raise ValueError(
                f"schedule {self.limits.schedule.name!r} generates while it trains, but colocated "
                "GPUs do one at a time; use synchronous or partial_rollout, with batch_parts 1"
            )
        self._check_requests()

    def _check_hybrid(self) -> None:
        hybrid = self.limits.hybrid_engines
        if hybrid > self.engines:
            raise ValueError(
                f"limits.hybrid_engines is {hybrid}, but must be <= {self.engines}, the engines"
            )
        if hybrid and self.switch is None:
            raise ValueError(
                f"limits.hybrid_engines is {hybrid}, but switch is None; give the cost of "
                "switching between generation and training"
            )
        if hybrid and self.failures is not None:
            raise ValueError(
                f"limits.hybrid_engines is {hybrid}, but failures of nodes that generate and train "
                "are not simulated; set failures to None"
            )

    def _check_scaling(self) -> None:
        if (rule := self.scaling) is None:
            return
        if not rule.min_engines <= self.engines <= rule.max_engines:
            raise ValueError(
                f"engines is {self.engines}, but scaling keeps {rule.min_engines} to "
                f"{rule.max_engines} of them"
            )
        if self.limits.ranks > 1:
            raise ValueError(
                f"limits.ranks is {self.limits.ranks}, but ranks keep their engines; set scaling "
                "to None"
            )
        if self.switch is not None or self.failures is not None:
            raise ValueError(
                "engines that join and leave are simulated on GPUs that only generate and do not "
                "fail; set switch and failures to None, or scaling"
            )

    def _check_requests(self) -> None:
        times_s = [0.0, *(at_s for at_s, _ in self.requests)]
        if times_s != sorted(times_s):
            raise ValueError(f"requests are at {times_s[1:]} s, but must be in order, from 0 s on")
        pauses = [r for _, r in self.requests if not isinstance(r, EtaRequested)]
        if pauses and isinstance(pauses[-1], PauseRequested):
            raise ValueError("the last pause of requests has no end; add a ResumeRequested")
        for _, request in self.requests:
            if (reason := coordinator_of(self.limits).refusal(request)) is not None:
                raise ValueError(f"{request} cannot be done: {reason}")
            if self.colocated and isinstance(request, EtaRequested):
                raise ValueError(f"{request} cannot be done: colocated GPUs generate or train")

    @property
    def most_engines(self) -> int:
        """Engines at any time."""
        return self.engines if self.scaling is None else self.scaling.max_engines

    @property
    def colocated(self) -> bool:
        """True if all GPUs generate and train."""
        return self.switch is not None and not self.limits.hybrid_engines

    @property
    def gpus(self) -> int:
        """GPUs in total."""
        rollout = self.engines * self.rollout.tensor_parallel
        return rollout if self.colocated else rollout + self.training_gpus


def generates_or_trains(limits: Limits) -> bool:
    """Return whether the schedule never generates while it trains."""
    alternates = limits.schedule.eta == 0 or limits.schedule.carry_over
    return alternates and limits.batch_parts == 1
