"""Simulations of candidates: one with one seed, or many in parallel processes.

Job (configuration, changed inputs, seed) --run_job--> Trial
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from simulator.assembly.engines import make_engines
from simulator.assembly.simulate import build
from simulator.catalogue.find_gpu import find_gpu
from simulator.catalogue.models import find_model
from simulator.config.schema import SimulationConfig
from simulator.costs.training_timing import Sizes
from simulator.costs.typical_coefficients import kernel_coefficients
from simulator.run.one_seed import run_system
from simulator.run.system import System, Timing, Training


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One simulation to perform."""

    config: SimulationConfig
    seed: int
    training_slowdown: float = 1.0
    """Factor on the cost model's time of a training step."""
    memory_slowdown: float = 1.0
    """Factor on the times of reading weights and cache in decode steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Result of a job. Shares are of a pool's time after warm-up."""

    step_s: float
    """Mean seconds of a training step."""
    tokens_per_s: float
    """Trained tokens only."""
    kwh: float
    """Energy of one step, GPUs only."""
    busy: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Shares by activity, by pool."""
    idle: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Shares by cause, by pool."""


Run: TypeAlias = Callable[[Sequence[Job]], Iterator[Trial | None]]
"""Performs jobs, and yields their trials in order; None if the next one is not there yet."""


class Progress(Protocol):
    """Receives the progress of the search."""

    def stage(self, name: str, total: int) -> None:
        """Start a stage of at most `total` simulations."""
        ...

    def advance(self, count: int = 1) -> None:
        """Count simulations that are done, or not needed."""
        ...


class Silent:
    """Shows no progress."""

    def stage(self, name: str, total: int) -> None:
        """Do nothing."""

    def advance(self, count: int = 1) -> None:
        """Do nothing."""


def run_job(job: Job) -> Trial:
    """Simulate one seed of one candidate."""
    result = run_system(changed_system(job), job.seed, name=job.config.name)
    return Trial(
        step_s=result.step_s,
        tokens_per_s=result.tokens_per_s,
        kwh=result.energy.kwh,
        busy={name: dict(pool.busy) for name, pool in result.pools.items()},
        idle={name: dict(pool.idle) for name, pool in result.pools.items()},
    )


def run_here(jobs: Sequence[Job]) -> Iterator[Trial]:
    """Simulate in this process, one after another."""
    return map(run_job, jobs)


@contextmanager
def workers(count: int) -> Iterator[Run]:
    """Run jobs in `count` processes; 1 uses this process. Results do not depend on the number."""
    if count <= 1:
        yield run_here
        return
    # Not at the top of the module: Python in a browser has no processes.
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(count) as pool:
        try:
            yield lambda jobs: pool.map(run_job, jobs)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def shortened(config: SimulationConfig, steps: int, warmup_steps: int) -> SimulationConfig:
    """A copy of a config with the given numbers of steps."""
    return config.with_settings({"workload.steps": steps, "workload.warmup_steps": warmup_steps})


def changed_system(job: Job) -> System:
    """The system of a job, with its slowdowns."""
    system = build(job.config)
    if job.training_slowdown != 1:
        slower = SlowedTraining(system.training, job.training_slowdown)
        system = dataclasses.replace(system, training=slower)
    if job.memory_slowdown != 1:
        gpu = find_gpu(job.config.cluster.generating_gpu)
        known = kernel_coefficients(gpu)
        changed = dataclasses.replace(
            known,
            weight_reading=known.weight_reading * job.memory_slowdown,
            cache_reading=known.cache_reading * job.memory_slowdown,
        )
        model = find_model(job.config.model)
        make = make_engines(job.config, model, gpu, system.most_engines, coefficients=changed)
        system = dataclasses.replace(system, make_engine=make)
    return system


@dataclass(frozen=True, slots=True)
class SlowedTraining:
    """Training steps that all take longer by a factor."""

    training: Training
    slowdown: float

    def step(self, lengths: Sizes, *, minibatches: int) -> Timing:
        """One slowed step."""
        timing = self.training.step(lengths, minibatches=minibatches)
        return SlowedTiming(
            timing.seconds * self.slowdown,
            {name: part * self.slowdown for name, part in timing.parts.items()},
        )


@dataclass(frozen=True, slots=True)
class SlowedTiming:
    """Duration of a slowed step."""

    seconds: float
    parts: Mapping[str, float]
    micro_batches: int = 0
    flops: float = 0.0
