"""Simulate a config: fit what was not given, build the system, run it with one or several seeds.

SimulationConfig --fit (checks)--> config, System --run_system--> SimulationResult

Settings that were given never change, and nothing changes where the defaults fit. Otherwise the
workload follows its own numbers, and the cluster is divided as near to the defaults as the model
allows: {model: Qwen2.5-72B, cluster: {gpu: H100, gpus: 64}} gets engines and trainers of 8 GPUs.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from areal_lab.config.given import Source
from areal_lab.config.problem import ConfigError, Kind, Problem, refusal
from areal_lab.config.record import given_settings, value_of
from areal_lab.host.durable import replacing
from areal_lab.runlog.records import Log, Record, encode, log_of
from simulator.assembly.build import built, named_of
from simulator.assembly.check import MOST_ANSWERS, MOST_AT_ONCE, longest_tokens
from simulator.config.load import simulation_config
from simulator.config.schema import SimulationConfig
from simulator.run.one_seed import run_system
from simulator.run.result import Replicated, SimulationResult
from simulator.run.system import System


def simulate(
    config: SimulationConfig | Source,
    *,
    seed: int | None = None,
    log: Callable[[Record], None] | str | Path | None = None,
) -> SimulationResult:
    """Simulate one seed.

    Args:
        seed: None uses the config's first seed.
        log: receives the records of `areal_lab.runlog.records`, or is the path of a file for them.
            `simulated_log` gives it in memory.

    Raises:
        ValueError: the config is impossible; one line per problem.
    """
    config = simulation_config(config)
    system = build(config)
    seed = config.seed if seed is None else seed
    if log is None or callable(log):
        return run_system(system, seed, log, name=config.name)
    with replacing(Path(log)) as file:

        def write(record: Record) -> None:
            file.write(f"{encode(record)}\n".encode())

        return run_system(system, seed, write, name=config.name)


def simulated_log(config: SimulationConfig | Source, *, seed: int | None = None) -> Log:
    """Simulate one seed, and return its event log as that of a real run is read.

    Args:
        seed: None uses the config's first seed.

    Raises:
        ValueError: the config is impossible; one line per problem.
    """
    records: list[Record] = []
    simulate(config, seed=seed, log=records.append)
    return log_of(records)


def replicate(
    config: SimulationConfig | Source,
    *,
    processes: int | None = None,
    on_result: Callable[[SimulationResult], object] = lambda _: None,
    log: Callable[[Record], None] | None = None,
) -> Replicated:
    """Simulate all seeds of a config, in parallel processes.

    Seed k of one config has the same draws as seed k of any other, so that the ratio of two configs
    has far less noise than each of them (`Replicated.ratio`).

    Args:
        processes: number of processes; None uses one per CPU core, 1 only the current process.
        on_result: called with each result as soon as it is available, in any order of seeds.
        log: receives the records of the first seed, as of `simulate`; `log_of` makes a log of them.

    Raises:
        ValueError: the config is impossible; one line per problem.
    """
    config, system = fit(simulation_config(config))
    seeds = range(config.seed, config.seed + config.seeds)
    workers = min(len(seeds), processes or os.cpu_count() or 1)
    results: dict[int, SimulationResult] = {}

    def note(result: SimulationResult) -> None:
        results[result.seed] = result
        on_result(result)

    if log is not None:
        note(run_system(system, config.seed, log, name=config.name))
    rest = [seed for seed in seeds if seed not in results]
    if workers == 1:
        for seed in rest:
            note(run_system(system, seed, name=config.name))
    else:
        # Not at the top of the module: Python in a browser has no processes.
        from concurrent.futures import ProcessPoolExecutor, as_completed

        with ProcessPoolExecutor(workers, initializer=_start_worker, initargs=(config,)) as pool:
            futures = [pool.submit(_run_seed, seed) for seed in rest]
            try:
                for future in as_completed(futures):
                    note(future.result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return Replicated(results=tuple(results[seed] for seed in seeds))


_of_worker: list[Fitted] = []
"""The config and system of this worker process. Systems do not travel between processes, for
they hold functions."""


def _start_worker(config: SimulationConfig) -> None:
    """Build the system of a config once, for all seeds that this process simulates."""
    leave_signals_to_parent()
    _of_worker[:] = [fit(config)]


def _run_seed(seed: int) -> SimulationResult:
    ((config, system),) = _of_worker
    return run_system(system, seed, name=config.name)


def leave_signals_to_parent() -> None:
    """Ignore Ctrl-C, which a terminal sends to all processes, in a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def build(config: SimulationConfig | Source) -> System:
    """The system of a config: costs and limits.

    Raises:
        ConfigError: the config is impossible; one line per problem.
    """
    return fit(simulation_config(config)).system


_SHARES: Final = (0.75, 0.5, 0.25)
"""Shares of GPUs that generate, the default first."""
_ENGINES: Final = (1, 2, 4, 8, 16, 32, 64)
"""GPUs per engine."""
_TRAINERS: Final = tuple(
    sorted(
        itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16)),
        key=lambda sizes: (sizes[0] * sizes[1], sizes[1]),
    )
)
"""Tensor and pipeline sizes of a trainer, the fewest GPUs first."""
_PARALLEL: Final = (
    *("rollout.tensor_parallel", "trainer.tensor_parallel", "trainer.pipeline_parallel"),
    *("trainer.context_parallel", "trainer.sequence_parallel", "trainer.expert_parallel"),
)
_MOST_GPUS: Final = 4096
"""The largest cluster that is tried to say what a model needs."""


class Fitted(NamedTuple):
    """A config that can be simulated, and its system."""

    config: SimulationConfig
    system: System


def fitted(config: SimulationConfig) -> SimulationConfig:
    """The config, or a copy with other values of settings that were not given."""
    return fit(config).config


def fit(config: SimulationConfig) -> Fitted:
    """The config, or a copy with other values of settings that were not given, and its system."""
    if isinstance(found := built(config), System):
        return Fitted(config, found)
    given = {one.name for one in given_settings(config, defaults=True)}
    unknown: list[Problem] = []
    if named_of(config, unknown) is None:
        raise ConfigError(*unknown)
    changed = config.with_settings(_workload(config, given))
    if "trainer.micro_batch_tokens" not in given:
        most = max(changed.trainer.micro_batch_tokens, longest_tokens(changed.workload))
        if most > changed.trainer.micro_batch_tokens and changed.trainer.dynamic_batching:
            changed = changed.with_settings({"trainer.micro_batch_tokens": most})
    if isinstance(found := built(changed), System):
        return Fitted(changed, found)
    if own := [one for one in found if one.setting in given]:
        raise ConfigError(*own)
    if (divided := _divided(changed, given)) is not None:
        return divided
    raise _too_small(changed, given, found)


def changes_of(config: SimulationConfig, other: SimulationConfig) -> dict[str, Any]:
    """Settings that `fitted` changed, by name, with their values."""
    before = {one.name for one in given_settings(config, defaults=True)}
    after = given_settings(other, defaults=True)
    return {one.name: value_of(other, one.name) for one in after if one.name not in before}


def nearest_split(gpus: int, share: float, engine: int, trainer: int) -> int | None:
    """GPUs that generate, as near to a share of all as both sides can divide; None if none can."""
    fitting = [
        rollout for rollout in range(engine, gpus, engine) if (gpus - rollout) % trainer == 0
    ]
    return min(fitting, key=lambda rollout: (abs(rollout - share * gpus), rollout), default=None)


def _workload(config: SimulationConfig, given: set[str]) -> Mapping[str, Any]:
    """Numbers of the workload and the schedule that follow others of them."""
    work, taken = config.workload, config.schedule.require_batches
    changed: dict[str, Any] = {}
    answers = work.answers
    usual = type(answers)()
    ratio = usual.max_tokens / usual.mean_tokens
    if answers.mean_tokens >= answers.max_tokens and answers.kind == "lognormal":
        lowest = min(1.5, (1 + answers.max_tokens) / 2)
        changed["workload.answers.mean_tokens"] = max(lowest, answers.max_tokens / ratio)
        if answers.max_tokens == 1:
            changed["workload.answers.kind"] = "constant"
        if "workload.answers.max_tokens" not in given:
            changed = {"workload.answers.max_tokens": round(ratio * answers.mean_tokens)}
    prompts, samples = work.prompts_per_batch, work.samples_per_prompt
    turns = max(work.turns, work.turns_most)
    if prompts * samples > MOST_AT_ONCE:
        most = type(work)().prompts_per_batch * type(work)().samples_per_prompt
        changed["workload.samples_per_prompt"] = samples = max(1, most // prompts)
        if "workload.prompts_per_batch" not in given:
            del changed["workload.samples_per_prompt"]
            samples = work.samples_per_prompt
            changed["workload.prompts_per_batch"] = prompts = max(1, most // samples)
    minibatches = min(work.minibatches, prompts * samples)
    if taken and minibatches % taken:
        minibatches = taken * max(1, round(minibatches / taken))
    changed["workload.minibatches"] = minibatches
    steps = work.steps
    if prompts * samples * turns * steps > MOST_ANSWERS:
        steps = max(1, MOST_ANSWERS // (prompts * samples * turns))
    if {"workload.steps", "workload.warmup_steps"} & given == {"workload.warmup_steps"} and (
        work.warmup_steps >= steps
    ):
        steps = 5 * work.warmup_steps
    changed["workload.steps"] = steps
    if work.warmup_steps >= steps:
        changed["workload.warmup_steps"] = steps // 5
    if config.cluster.colocated and config.schedule.name == "asynchronous":
        ahead = "schedule.eta" in given and config.schedule.eta > 0
        changed["schedule.name"] = "partial_rollout" if ahead else "synchronous"
    return {
        name: value
        for name, value in changed.items()
        if name not in given and value != value_of(config, name)
    }


def _divided(config: SimulationConfig, given: set[str]) -> Fitted | None:
    """The config with engines, a trainer and a split that fit; None if none does."""
    gpus, engines, trainers = config.cluster.gpus, list(_ENGINES), list(_TRAINERS)
    if "rollout.tensor_parallel" in given:
        engines = [config.rollout.tensor_parallel]
    sizes = (config.trainer.tensor_parallel, config.trainer.pipeline_parallel)
    for at, name in enumerate(("trainer.tensor_parallel", "trainer.pipeline_parallel")):
        if name in given:
            trainers = [(one[0], sizes[1]) if at else (sizes[0], one[1]) for one in trainers]
    trainers = list(dict.fromkeys(trainers))
    shares = [config.cluster.rollout_gpus / gpus]
    if "cluster.rollout_gpus" not in given:
        shares = [*_SHARES]
    for share, engine in itertools.product(shares, engines):
        for trainer in trainers:
            tried = _split(config, share, engine, trainer, given)
            if tried is None:
                continue
            if isinstance(found := built(tried), System):
                return Fitted(tried, found)
            if any(one.setting == "rollout" for one in found):
                break  # this engine is too small, whatever the trainer
    return None


def _split(
    config: SimulationConfig,
    share: float,
    engine: int,
    trainer: tuple[int, int],
    given: set[str],
) -> SimulationConfig | None:
    cluster, (tensor, pipeline) = config.cluster, trainer
    changed: dict[str, Any] = {
        "rollout.tensor_parallel": engine,
        "trainer.tensor_parallel": tensor,
        "trainer.pipeline_parallel": pipeline,
    }
    if cluster.colocated:
        if cluster.gpus % engine or cluster.gpus % (tensor * pipeline):
            return None
    else:
        split = nearest_split(cluster.gpus, share, engine, tensor * pipeline)
        if split is None or ("cluster.rollout_gpus" in given and split != cluster.rollout_gpus):
            return None
        changed["cluster.rollout_gpus"] = split
    return config.with_settings(
        {name: value for name, value in changed.items() if value != value_of(config, name)}
    )


def _needed_gpus(config: SimulationConfig, given: set[str]) -> int | None:
    """GPUs, a power of 2 times those of the config, at which it fits; None if none are enough."""
    gpus = config.cluster.gpus
    while (gpus := 2 * gpus) <= _MOST_GPUS:
        larger = config.with_settings({"cluster.gpus": gpus})
        if _divided(larger, given) is not None:
            return gpus
    return None


def _too_small(config: SimulationConfig, given: set[str], found: list[Problem]) -> ConfigError:
    cluster, needed = config.cluster, _needed_gpus(config, given)
    if needed is None and given & {*_PARALLEL, "cluster.rollout_gpus"}:
        # No cluster is large enough with these.
        own = [one for one in found if any(name.startswith(one.setting) for name in given)]
        if own:
            return ConfigError(*own)
        name = min(given & {*_PARALLEL, "cluster.rollout_gpus"})
        text = (
            f"{name} is {value_of(config, name)}, but no division of up to {_MOST_GPUS:,} GPUs "
            f"fits with it ({found[0].message}); leave it out, or change it"
        )
        return refusal(name, text)
    fix = "raise cluster.gpus" if needed is None else f"it needs {needed}"
    text = (
        f"cluster.gpus is {cluster.gpus}, but {cluster.gpus} x {cluster.gpu} "
        f"{'is' if cluster.gpus == 1 else 'are'} too small for {config.model}; {fix}"
    )
    return refusal("cluster.gpus", text, Kind.MEMORY)
