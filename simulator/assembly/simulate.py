"""Simulate a config: check it, build the system, and run it with one or several seeds.

SimulationConfig --build (checks)--> System --run_system--> SimulationResult
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

from areal_lab.runlog.records import Log, Record, encode, log_of
from simulator.assembly.check import check_config
from simulator.assembly.engines import make_engines, running_sequences
from simulator.assembly.limits import limits_of, scaling_of
from simulator.assembly.parts import part_outside, part_trainer
from simulator.catalogue.find_gpu import find_gpu
from simulator.catalogue.models import find_model
from simulator.config.schema import LatencyConfig, SimulationConfig, WorkloadConfig
from simulator.costs.colocation.switch import switch_cost
from simulator.costs.controller.own_batches import OwnBatches
from simulator.costs.controller.ways import controller_cost
from simulator.costs.outside import outside_from
from simulator.costs.training import training_cost
from simulator.costs.weight_sync import weight_update
from simulator.run.one_seed import run_system
from simulator.run.result import Replicated, SimulationResult
from simulator.run.system import System, UpdateSeconds
from simulator.workload.faults import failures_from
from simulator.workload.latency import Latency, latency_from
from simulator.workload.lengths import lengths_from
from simulator.workload.turn_counts import TurnCounts


def simulate(
    config: SimulationConfig,
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
    system = build(config)
    seed = config.seed if seed is None else seed
    if log is None or callable(log):
        return run_system(system, seed, log, name=config.name)
    with Path(log).open("w", encoding="utf-8") as file:
        return run_system(
            system, seed, lambda record: _write_line(file.write, record), name=config.name
        )


def simulated_log(config: SimulationConfig, *, seed: int | None = None) -> Log:
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
    config: SimulationConfig,
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
    check_config(config)
    seeds = range(config.seed, config.seed + config.seeds)
    workers = min(len(seeds), processes or os.cpu_count() or 1)
    results: dict[int, SimulationResult] = {}

    def note(result: SimulationResult) -> None:
        results[result.seed] = result
        on_result(result)

    if log is not None:
        note(simulate(config, log=log))
    rest = [seed for seed in seeds if seed not in results]
    if workers == 1:
        for seed in rest:
            note(simulate(config, seed=seed))
    else:
        # Not at the top of the module: Python in a browser has no processes.
        from concurrent.futures import ProcessPoolExecutor, as_completed

        with ProcessPoolExecutor(workers) as pool:
            futures = [pool.submit(simulate, config, seed=seed) for seed in rest]
            for future in as_completed(futures):
                note(future.result())
    return Replicated(results=tuple(results[seed] for seed in seeds))


def build(config: SimulationConfig) -> System:
    """The system of a config: costs and limits.

    Raises:
        ValueError: the config is impossible; one line per problem.
    """
    check_config(config)
    cluster, workload, rollout = config.cluster, config.workload, config.rollout
    gpu = find_gpu(cluster.gpu)
    rollout_gpu = find_gpu(cluster.generating_gpu)
    model = find_model(config.model)
    colocated, training_gpus = cluster.colocated, cluster.training_gpus
    engines = cluster.generating_gpus // rollout.tensor_parallel
    running = running_sequences(config, model, rollout_gpu)
    most = max(engines, config.scaling.max_engines)
    limits = limits_of(config, room=most * running // workload.samples_per_prompt)
    training = training_cost(
        part_trainer(config.trainer, config.batch_parts), model, gpu, training_gpus
    )
    return System(
        limits=limits,
        steps=workload.steps,
        warmup_steps=workload.warmup_steps,
        samples=workload.samples_per_prompt,
        prompt_tokens=workload.prompt_tokens,
        lengths=lengths_from(workload.answers),
        max_tokens=workload.answers.max_tokens,
        engines=engines,
        scaling=scaling_of(config),
        make_engine=make_engines(config, model, rollout_gpu, most),
        gpus_per_engine=rollout.tensor_parallel,
        training=training
        if limits.ranks == 1
        else OwnBatches(training=training, ranks=limits.ranks),
        training_gpus=training_gpus if colocated else cluster.only_training_gpus,
        minibatches=workload.minibatches,
        weights=weight_update(config, model, gpu) if cluster.sends_weights else UpdateSeconds(),
        # The trainer takes part in a broadcast, but not in loading from disk.
        push_holds_trainer=config.weights.backend != "disk",
        switch=switch_cost(config, model, gpu) if cluster.switches else None,
        controller=controller_cost(config),
        outside=outside_from(part_outside(config.outside, config.batch_parts), colocated=colocated),
        reward=_latency(workload.reward),
        reward_workers=workload.reward_workers,
        equal_rewards_share=workload.equal_rewards_share or None,
        turns=workload.turns_most or workload.turns,
        turn_counts=turn_counts(workload),
        tool=_latency(workload.tool),
        tool_tokens=workload.tool_tokens,
        turn_prefix_cache=rollout.turn_prefix_cache,
        samples_per_engine=rollout.max_samples,
        failures=failures_from(config.faults),
        engines_per_node=max(1, rollout_gpu.node_gpus // rollout.tensor_parallel),
        nodes_per_engine=math.ceil(rollout.tensor_parallel / rollout_gpu.node_gpus),
        training_nodes=math.ceil(training_gpus / gpu.node_gpus),
        rollout_gpu=rollout_gpu,
        training_gpu=gpu,
        price_per_gpu_h=cluster.price_per_gpu_h,
        overhead=cluster.overhead,
    )


def _write_line(write: Callable[[str], object], record: Record) -> None:
    write(encode(record) + "\n")


def turn_counts(workload: WorkloadConfig) -> TurnCounts | None:
    """The distribution of turns; None if all responses have the same number."""
    if not workload.turns_most:
        return None
    return TurnCounts(workload.turns, workload.turns_most)


def _latency(config: LatencyConfig) -> Latency | None:
    return latency_from(config) if config.mean_s > 0 else None
