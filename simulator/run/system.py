"""A system to simulate: limits for the coordinator, and what everything costs. Seconds and tokens.

    SimulationConfig --simulation.build--> System --drive.run--> SimulationResult

Tests and planners make a `System` by hand: its parts are protocols, and a constant is a part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
import simpy
from numpy.typing import NDArray

from areal_lab.control.events import EngineId, GroupId, Version
from areal_lab.control.limits import Limits
from areal_lab.runlog.records import Segments
from simulator.catalogue.gpu import GPU
from simulator.costs.training_timing import Sizes
from simulator.engine.clock import RecordSpan
from simulator.engine.versions import Decoded


class Done(Protocol):
    """A group whose samples all ended on the engine."""

    @property
    def group(self) -> GroupId:
        """As it was submitted."""
        ...

    @property
    def segments(self) -> tuple[Segments, ...]:
        """(version, tokens) stretches, one tuple per sample."""
        ...

    @property
    def decoded(self) -> Sequence[Decoded]:
        """The same, of all samples that decoded together at once."""
        ...


class Engine(Protocol):
    """One generation engine in simulated time; `simulator.engine.replica` has the real one."""

    @property
    def activity_s(self) -> Mapping[str, float]:
        """Seconds by what was done: decode, prefill, recompute, paused, idle."""
        ...

    @property
    def generated_tokens(self) -> int:
        """Since the start."""
        ...

    @property
    def recomputed_tokens(self) -> int:
        """Read again after an interruption or a preemption."""
        ...

    @property
    def preemptions(self) -> int:
        """Sequences that lost their place for lack of cache."""
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
        """Take a group; also while paused."""
        ...

    def next_s(self) -> float:
        """When `advance` has something to do next; infinite if nothing is going on."""
        ...

    def advance(self, now_s: float, /) -> Sequence[Done]:
        """Do everything up to and including `now_s`; returns the groups that ended."""
        ...

    def pause(self, now_s: float, /) -> None:
        """Stop, and keep what is unfinished."""
        ...

    def resume(self, now_s: float, version: Version, /) -> None:
        """Go on, under the weights of `version`."""
        ...

    def drop(self, now_s: float, group: GroupId, /) -> int:
        """Give up a group; returns the tokens lost."""
        ...

    def fail(self, now_s: float, /) -> Sequence[GroupId]:
        """Lose everything, as the node failed; returns the groups that were lost."""
        ...


class Timing(Protocol):
    """What one training step took."""

    @property
    def seconds(self) -> float:
        """All of it."""
        ...

    @property
    def parts(self) -> Mapping[str, float]:
        """Seconds by what was done, in order; they sum to `seconds`."""
        ...


class Training(Protocol):
    """What a training step costs; `simulator.costs.training.TrainingCost` is the real one."""

    def step(self, lengths: Sizes, *, minibatches: int) -> Timing:
        """Train on sequences of so many tokens (prompt and answer), in batch order."""
        ...


class Weights(Protocol):
    """What it takes to bring new weights to the engines."""

    @property
    def export_s(self) -> float:
        """The trainer is busy with it, after its step."""
        ...

    @property
    def delay_s(self) -> float:
        """Until the engines notice; generation goes on meanwhile."""
        ...

    @property
    def load_s(self) -> float:
        """Engines are paused."""
        ...


class Switch(Protocol):
    """Colocated: what it takes to give the GPUs from one side to the other."""

    @property
    def to_training_s(self) -> float:
        """Before a training step."""
        ...

    @property
    def to_generation_s(self) -> float:
        """After new weights are ready, while engines are paused."""
        ...


class Lengths(Protocol):
    """How many tokens the answers have."""

    def draw(
        self, generator: np.random.Generator, groups: int, samples: int, *, step: float = 0.0
    ) -> NDArray[np.int64]:
        """[groups, samples], each at least 1."""
        ...


class Latency(Protocol):
    """How long something outside the GPUs takes."""

    def draw(self, generator: np.random.Generator, size: Any, /) -> NDArray[np.float64]:
        """Seconds, of that shape."""
        ...


class Failures(Protocol):
    """When nodes fail, and how long it takes to go on."""

    @property
    def detection_s(self) -> float:
        """From the failure until the run knows."""
        ...

    @property
    def restart_s(self) -> float:
        """From there until the node works again."""
        ...

    def uptime_s(self, generator: np.random.Generator, /) -> float:
        """Seconds of work of one node until it fails; may be infinite."""
        ...


Process: TypeAlias = Generator[simpy.Event, Any, None]
"""What simpy runs: yields what it waits for."""

MakeEngine: TypeAlias = Callable[[EngineId, int, RecordSpan | None], Engine]
"""From the engine's number, the run's seed and where its spans go (None: nowhere)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """A training step that takes the same time whatever it is given."""

    seconds: float
    name: str = "train"

    @property
    def parts(self) -> Mapping[str, float]:
        """All in one."""
        return {self.name: self.seconds}

    # Part of the protocol; given seconds do not depend on it.
    def step(self, lengths: Sizes, *, minibatches: int) -> Seconds:  # noqa: ARG002
        """Itself."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSeconds:
    """An update of the weights in constant times; see `Weights`."""

    export_s: float = 0.0
    delay_s: float = 0.0
    load_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Everything that a simulation needs to know."""

    limits: Limits
    """For the coordinator. With `train_steps` the run ends by itself when they are done; with None
    it is stopped after `steps`, so that the last ones do not see generation run dry."""
    steps: int
    """Training steps to simulate."""
    warmup_steps: int = 0
    """First steps that the averages leave out."""
    samples: int
    """Per group."""
    prompt_tokens: int
    lengths: Lengths
    max_tokens: int | None = None
    """Where answers are cut, for the log's finish reasons."""
    engines: int
    make_engine: MakeEngine
    gpus_per_engine: int = 1
    training: Training
    training_gpus: int = 1
    """Not looked at when colocated."""
    minibatches: int = 1
    weights: Weights = field(default_factory=UpdateSeconds)
    push_holds_trainer: bool = False
    """The trainer takes part in the transfer, and trains on only when all engines have loaded."""
    switch: Switch | None = None
    """Colocated: the engines' GPUs train, too."""
    reward: Latency | None = None
    """Time to judge one sample; None is no time."""
    reward_workers: int = 0
    """Samples judged at a time; 0 has no limit."""
    turns: int = 1
    tool: Latency | None = None
    """Between two turns of a sample; None is no time."""
    failures: Failures | None = None
    engines_per_node: int = 8
    training_nodes: int = 1
    rollout_gpu: GPU | None = None
    """For money and energy; None has neither."""
    training_gpu: GPU | None = None
    price_per_gpu_h: float | None = None
    """Replaces the catalogue's prices."""
    overhead: float = 0.0
    """Share added to the price."""

    def __post_init__(self) -> None:
        for name in (
            *("steps", "samples", "engines", "gpus_per_engine", "training_gpus", "minibatches"),
            *("turns", "engines_per_node", "training_nodes"),
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be >= 1")
        for name in ("warmup_steps", "prompt_tokens", "reward_workers"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be >= 0")
        if self.warmup_steps >= self.steps:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps} of {self.steps} steps, which leaves none to "
                "average; raise steps or lower warmup_steps"
            )
        if self.limits.train_steps not in (None, self.steps):
            raise ValueError(
                f"limits.train_steps is {self.limits.train_steps}, but must be steps "
                f"({self.steps}), or None to simulate a part of a longer run"
            )
        for name in ("export_s", "delay_s", "load_s"):
            value = getattr(self.weights, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"weights.{name} is {value}, but must be finite and >= 0")
        if self.switch is not None and not generates_or_trains(self.limits):
            raise ValueError(
                f"schedule {self.limits.schedule.name!r} generates while it trains, which GPUs "
                "that do one or the other cannot; use synchronous, or partial_rollout"
            )

    @property
    def colocated(self) -> bool:
        """Whether the same GPUs generate and train."""
        return self.switch is not None

    @property
    def gpus(self) -> int:
        """All of them."""
        rollout = self.engines * self.gpus_per_engine
        return rollout if self.colocated else rollout + self.training_gpus


def generates_or_trains(limits: Limits) -> bool:
    """Whether the schedule never generates while it trains."""
    return limits.schedule.eta == 0 or limits.schedule.carry_over
