"""Simulations of candidates: one with one seed, many in parallel processes, each only once.

Job (configuration, changed inputs, seed) --run_job--> Trial

Trials that are simulated once: a plan with other prices or limits asks for the same ones.

    cache = TrialCache()                       or TrialCache.load(path)
    PlanSearch(config, cache)                  simulates what is not in the cache
    PlanSearch(other_prices, cache)            simulates nothing

A trial belongs to everything that decides it: the settings, the GPUs and the model with their
numbers, the seed and the changed inputs; not to names, prices and the other seeds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Protocol, Self, TypeAlias

from areal_lab.host.durable import replace_text
from areal_lab.host.foreign import read_json
from simulator.assembly.engines import engines_of
from simulator.assembly.simulate import build, leave_signals_to_parent
from simulator.catalogue.gpu import find_gpu
from simulator.catalogue.models import find_model
from simulator.config.schema import SimulationConfig
from simulator.costs.coefficients import kernel_coefficients
from simulator.costs.training_timing import Sizes
from simulator.run.one_seed import run_system
from simulator.run.system import System, Timing, Training


@dataclass(frozen=True, kw_only=True)
class Job:
    """One simulation to perform."""

    config: SimulationConfig
    seed: int
    training_slowdown: float = 1.0
    """Factor on the cost model's time of a training step."""
    memory_slowdown: float = 1.0
    """Factor on the times of reading weights and cache in decode steps."""

    @cached_property
    def key(self) -> str | None:
        """The name of its trial (`key`), computed once."""
        return key(self)


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
    staleness: Mapping[str, float] = field(default_factory=dict)
    """Lags and tokens thrown away (`simulator.run.result.SimulationResult.staleness`)."""


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
        staleness=result.staleness(),
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

    with ProcessPoolExecutor(count, initializer=leave_signals_to_parent) as pool:
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
        engines = dataclasses.replace(engines_of(job.config), coefficients=changed)
        system = dataclasses.replace(system, make_engine=engines)
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


_SHIPPED: Final = Path(__file__).parent / "data"
_NOT_DECIDING: Final = {"name": "", "seed": 1, "seeds": 1}
"""Settings that change nothing in one trial."""
_KEPT: Final = ("step_s", "tokens_per_s", "kwh", "busy", "idle", "staleness")
_MONEY: Final = ("price", "purchase", "sources")


class TrialCache:
    """Performs jobs, each of them once; a `Run`."""

    def __init__(self, run: Run = run_here, trials: Mapping[str, Trial] | None = None) -> None:
        """Start with known trials.

        Args:
            run: simulates jobs that are not known.
            trials: known trials by `key`.
        """
        self._run = run
        self._trials = dict(trials or {})
        self.paused = False
        """Return whether jobs that are not known wait (`Step.waits`), and nothing is simulated."""
        self.simulated = 0
        """Jobs that were not known."""
        self.made_by = ""
        """Version and command that made a loaded file."""

    def __len__(self) -> int:
        return len(self._trials)

    def __call__(self, jobs: Sequence[Job]) -> Iterator[Trial | None]:
        """The trials of the jobs in their order; unknown ones are simulated in their turn."""
        # A job without a key is known by its place: it is never kept.
        names = [job.key or place for place, job in enumerate(jobs)]
        asked: list[str | int] = []
        fresh: Iterator[Trial | None] = iter(())
        for place, name in enumerate(names):
            trial = self._trials.get(str(name))
            while trial is None and self.paused:
                yield None
                trial = self._trials.get(str(name))
            if trial is None and (not asked or asked[0] != name):
                # Others may have simulated some of what was asked for; each job is asked for once.
                unknown = {
                    one: job
                    for one, job in zip(names[place:], jobs[place:], strict=True)
                    if str(one) not in self._trials
                }
                asked, fresh = list(unknown), self._run(list(unknown.values()))
            while trial is None:
                trial = next(fresh)
                if trial is None:
                    yield None
                    continue
                del asked[0]
                self.simulated += 1
                if isinstance(name, str):
                    self._trials[name] = trial
            yield trial

    def save(self, path: Path, *, made_by: str) -> None:
        """Write all trials as JSON, and what made them."""
        trials = {
            name: [getattr(trial, one) for one in _KEPT]
            for name, trial in sorted(self._trials.items())
        }
        head = {"made_by": made_by, "areal_lab": _version()}
        lines = [f'"{name}": {json.dumps(row)}' for name, row in trials.items()]
        text = f'{json.dumps(head)[:-1]}, "trials": {{\n' + ",\n".join(lines) + "\n}}\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, text)

    @classmethod
    def load(cls, path: Path, run: Run = run_here) -> Self:
        """Read a file that `save` wrote.

        Raises:
            ValueError: in one line, if it is missing or is another file.
        """
        try:
            told: dict[str, Any] = read_json(path)
            trials = {name: _trial(row) for name, row in told["trials"].items()}
            made_by = f"areal_lab {told['areal_lab']}, {told['made_by']}"
        except FileNotFoundError:
            raise ValueError(f"{path} does not exist (looked in {Path.cwd()})") from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} holds no trials of a plan: {error}") from error
        cache = cls(run, trials)
        cache.made_by = made_by
        return cache


def shipped_trials(plan: str, run: Run = run_here) -> TrialCache:
    """The shipped trials of a shipped plan file (`plan_small`), which need no simulation.

    Raises:
        ValueError: in one line, if there are none.
    """
    return TrialCache.load(_SHIPPED / f"{plan}.json", run)


def key(job: Job) -> str | None:
    """Hash of what decides a trial; None if it depends on a file of lengths or inputs."""
    config = job.config
    if config.controller.inputs:
        return None
    answers = config.workload.answers
    if answers.kind == "recorded" or (answers.kind == "trace" and answers.trace.endswith(".csv")):
        return None
    decides: list[Any] = [
        config.model_dump() | _NOT_DECIDING,
        *(job.seed, job.training_slowdown, job.memory_slowdown),
        repr(find_model(config.model)),
    ]
    cluster = config.cluster
    decides[0]["cluster"] = cluster.model_dump(exclude={"price_per_gpu_h", "overhead"})
    if config.rollout.time_factor == 1:  # as in trials that were stored before there was one
        decides[0]["rollout"] = config.rollout.model_dump(exclude={"time_factor"})
    for name in (cluster.gpu, cluster.generating_gpu):
        gpu = find_gpu(name)
        decides.append([getattr(gpu, field) for field in _deciding(type(gpu))])
    # Computed settings differ between processors in their last digits.
    rounded = json.loads(json.dumps(decides), parse_float=lambda text: f"{float(text):.12g}")
    written = json.dumps(rounded, sort_keys=True)
    return hashlib.sha256(written.encode()).hexdigest()[:24]


def _deciding(record: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(record) if field.name not in _MONEY]


def _trial(row: Sequence[Any]) -> Trial:
    return Trial(**dict(zip(_KEPT, row, strict=True)))


def _version() -> str:
    try:
        return version("areal_lab")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "unknown"
