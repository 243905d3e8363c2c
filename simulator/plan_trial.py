"""One candidate simulated with one seed, what limits it, and many of them in parallel processes.

Job (configuration, changed inputs, seed) --run_job--> Trial
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

from areal_lab.control.activity import (
    LOST,
    NOTHING_ADMITTED,
    ON_ITS_WAY,
    PAUSED,
    WAIT_BATCH,
    WAIT_REWARDS,
    WAIT_WEIGHTS,
)
from areal_lab.control.events import EngineId
from simulator.config import SimulationConfig
from simulator.decode_cost import decode_cost
from simulator.draws import STRAGGLERS, stream
from simulator.faults import engine_slowdowns
from simulator.hardware import find_gpu
from simulator.measured_engine import measured_decode, measured_prefill
from simulator.memory import cache_tokens
from simulator.model_shape import find_model
from simulator.pools import GENERATE, MOVING_WEIGHTS
from simulator.prefill_cost import prefill_cost
from simulator.replica import Replica
from simulator.run import run_system
from simulator.simulation import build, running_sequences
from simulator.system import MakeEngine, System, Timing, Training
from simulator.timesheet import RecordSpan
from simulator.training_timing import Sizes
from simulator.typical_coefficients import kernel_coefficients

TRAIN_BOUND: Final = "train-bound"
GENERATION_BOUND: Final = "generation-bound"
STALENESS_BOUND: Final = "staleness-bound"
WEIGHT_UPDATES: Final = "weight updates"
REWARDS_AND_TOOLS: Final = "rewards and tools"
FAILURES: Final = "failures"

_GENERATING: Final = ("decode", "prefill", "recompute", GENERATE)
_FULL: Final = 0.9
"""Share of its time from which the trainer counts as always busy."""
_WAITING: Final = 0.1
"""Share of the engines' time from which their waiting, not their speed, limits."""
_CAUSES: Final[Mapping[str, str]] = {
    NOTHING_ADMITTED: STALENESS_BOUND,
    PAUSED: WEIGHT_UPDATES,
    WAIT_WEIGHTS: WEIGHT_UPDATES,
    WAIT_REWARDS: REWARDS_AND_TOOLS,
    ON_ITS_WAY: REWARDS_AND_TOOLS,
    LOST: FAILURES,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one process is asked."""

    config: SimulationConfig
    seed: int
    training_slowdown: float = 1.0
    """How many times longer a training step takes than the cost model says."""
    memory_slowdown: float = 1.0
    """The same of reading weights and cache while decoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What it answers, in a few numbers. Shares are of a pool's time after warm-up."""

    step_s: float
    """Mean seconds of a training step."""
    tokens_per_s: float
    """Trained tokens only."""
    kwh: float
    """Of one step, GPUs alone."""
    busy: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Pool to shares by what was done."""
    idle: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Pool to shares by cause."""


Run: TypeAlias = Callable[[Sequence[Job]], Iterator[Trial]]
"""Answers jobs in their order."""


class Progress(Protocol):
    """Is told how far the search is."""

    def stage(self, name: str, total: int) -> None:
        """From now on so many simulations are to be done, at most."""
        ...

    def advance(self, count: int = 1) -> None:
        """So many are done, or need not be."""
        ...


class Silent:
    """Tells nobody."""

    def stage(self, name: str, total: int) -> None:
        """Nothing."""

    def advance(self, count: int = 1) -> None:
        """Nothing."""


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


@contextmanager
def workers(count: int) -> Iterator[Run]:
    """So many processes; 1 is this one. Answers are the same whatever the number."""
    if count <= 1:
        yield lambda jobs: map(run_job, jobs)
        return
    with ProcessPoolExecutor(count) as pool:
        try:
            yield lambda jobs: pool.map(run_job, jobs)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def shortened(config: SimulationConfig, steps: int, warmup_steps: int) -> SimulationConfig:
    """A configuration that is simulated for so many training steps."""
    workload = dataclasses.replace(config.workload, steps=steps, warmup_steps=warmup_steps)
    return dataclasses.replace(config, workload=workload)


def limit_of(trials: Sequence[Trial]) -> str:
    """What holds a candidate up, from where its pools' time went, mean over the seeds.

    train-bound       the trainer works 90 % of the time or more
    weight updates    it does not, and waits for them longer than for batches
    staleness-bound   it waits for batches, and engines wait 10 % or more: for new weights to start
                      more answers. Synchronous schedules are, where neither side fills the time
    generation-bound  it waits for batches, and engines hardly wait

    Where the same GPUs do both, it is what takes the largest part of their time.
    """
    if "all" in trials[0].busy:
        return _largest_part(trials)
    training, engines = _mean_shares(trials, "training"), _mean_shares(trials, "rollout")
    updating = sum(training.get(name, 0.0) for name in (*MOVING_WEIGHTS, WAIT_WEIGHTS))
    waiting = training.get(WAIT_BATCH, 0.0)
    if 1 - updating - waiting >= _FULL:
        return TRAIN_BOUND
    if updating > waiting:
        return WEIGHT_UPDATES
    idle = _by_limit(engines)
    limit = max(idle, key=lambda name: idle[name])
    return limit if idle[limit] >= _WAITING else GENERATION_BOUND


def trainer_share(trials: Sequence[Trial]) -> float:
    """Share of the time in which GPUs that train do so."""
    pool = "all" if "all" in trials[0].busy else "training"
    busy = [
        sum(
            share
            for name, share in trial.busy[pool].items()
            if name not in MOVING_WEIGHTS and name not in _GENERATING
        )
        for trial in trials
    ]
    return sum(busy) / len(busy)


def engine_share(trials: Sequence[Trial]) -> float:
    """Share of the time in which GPUs that generate do so."""
    pool = "all" if "all" in trials[0].busy else "rollout"
    busy = [sum(trial.busy[pool].get(name, 0.0) for name in _GENERATING) for trial in trials]
    return sum(busy) / len(busy)


def changed_system(job: Job) -> System:
    """The system of a job, with its inputs changed."""
    system = build(job.config)
    if job.training_slowdown != 1:
        slower = SlowedTraining(system.training, job.training_slowdown)
        system = dataclasses.replace(system, training=slower)
    if job.memory_slowdown != 1:
        make = _engines_with_memory(job.config, system.engines, job.memory_slowdown)
        system = dataclasses.replace(system, make_engine=make)
    return system


@dataclass(frozen=True, slots=True)
class SlowedTraining:
    """Training steps that all take so many times longer."""

    training: Training
    slowdown: float

    def step(self, lengths: Sizes, *, minibatches: int) -> Timing:
        """One step."""
        timing = self.training.step(lengths, minibatches=minibatches)
        return SlowedTiming(
            timing.seconds * self.slowdown,
            {name: part * self.slowdown for name, part in timing.parts.items()},
        )


@dataclass(frozen=True, slots=True)
class SlowedTiming:
    """What it took."""

    seconds: float
    parts: Mapping[str, float]
    micro_batches: int = 0
    flops: float = 0.0


def _engines_with_memory(config: SimulationConfig, engines: int, slowdown: float) -> MakeEngine:
    """Engines as `simulator.simulation` makes them, that reach less of their memory's bandwidth."""
    rollout = config.rollout
    gpu = find_gpu(config.cluster.rollout_gpu or config.cluster.gpu)
    model = find_model(config.model)
    known = kernel_coefficients(gpu)
    changed = dataclasses.replace(
        known,
        weight_reading=known.weight_reading * slowdown,
        cache_reading=known.cache_reading * slowdown,
    )
    running = running_sequences(config, model, gpu)
    cache = cache_tokens(model, gpu, rollout.tensor_parallel, rollout.memory_utilization)

    def make(engine: EngineId, seed: int, record: RecordSpan | None) -> Replica:
        slow = engine_slowdowns(config.faults, engines, stream(seed, STRAGGLERS, 0))[engine]
        return Replica(
            decode=decode_cost(
                model,
                gpu,
                rollout.tensor_parallel,
                overhead_s=rollout.engine_overhead_s,
                overlap=rollout.engine_overlap,
                slowdown=float(slow),
                measured=measured_decode(config),
                coefficients=changed,
            ),
            prefill=measured_prefill(config, float(slow))
            or prefill_cost(model, gpu, rollout.tensor_parallel, slowdown=float(slow)),
            max_running=running,
            cache_tokens=cache,
            prefix_sharing=rollout.prefix_sharing,
            record_spans=record,
        )

    return make


def _largest_part(trials: Sequence[Trial]) -> str:
    shares = _mean_shares(trials, "all")
    generating = sum(shares.get(name, 0.0) for name in _GENERATING)
    idle = _by_limit(shares)
    moving = sum(shares.get(name, 0.0) for name in MOVING_WEIGHTS)
    training = 1 - generating - moving - sum(idle.values())
    parts = dict(idle)
    parts[WEIGHT_UPDATES] += moving
    parts[GENERATION_BOUND] = generating
    parts[TRAIN_BOUND] = training
    return max(parts, key=lambda name: parts[name])


def _by_limit(shares: Mapping[str, float]) -> dict[str, float]:
    """Idle shares added up by what stands behind them."""
    idle = dict.fromkeys(_CAUSES.values(), 0.0)
    for cause, limit in _CAUSES.items():
        idle[limit] += shares.get(cause, 0.0)
    return idle


def _mean_shares(trials: Sequence[Trial], pool: str) -> dict[str, float]:
    """Busy and idle shares of a pool by name, mean over the seeds."""
    shares: dict[str, float] = {}
    for trial in trials:
        for name, share in (*trial.busy[pool].items(), *trial.idle[pool].items()):
            shares[name] = shares.get(name, 0.0) + share / len(trials)
    return shares
