"""The simulated cluster of a run: a preset, scaled to the run's batch, with the run's schedule.

    preset, simulator.settings --> SimulationConfig --scaled GPUs--> System
    rollout, dataset.batch_size --> Limits of the real pipeline ------^

So the coordinator has the limits of a real run of this config, and only its seconds are simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from areal_lab.config.problem import ConfigError, Kind, Problem, problems_of
from areal_lab.resolve.limits import limits_of
from cosim.schema import ClusterConfig, CosimConfig
from simulator.assembly.simulate import build
from simulator.config.load import ALIASES, load_simulation
from simulator.config.schema import SimulationConfig
from simulator.run.system import System
from simulator.workload.lengths import lengths_from

_INSTEAD: Final = {
    "schedule.name": "rollout.schedule",
    "schedule.eta": "eta",
    "schedule.interruptible": "rollout.interruptible",
    "schedule.batch_order": "rollout.batch_order",
    "schedule.max_lag": "rollout.max_lag",
    "schedule.on_late": "rollout.on_late",
    "schedule.max_concurrent_prompts": "rollout.max_concurrent_rollouts",
    "schedule.slots": "rollout.slots",
    "schedule.max_drift": "rollout.bounded_drift.max_drift",
    "schedule.min_eta": "rollout.bounded_drift.min_eta",
    "rollout.routing": "rollout.routing",
    "workload.prompts_per_batch": "dataset.batch_size",
    "workload.samples_per_prompt": "gconfig.n_samples",
    "workload.minibatches": "actor.ppo_n_minibatches",
    "workload.steps": "total_train_steps",
    "workload.warmup_steps": "total_train_steps",
    "workload.whole_run": "total_train_steps",
    "workload.equal_rewards_share": "rollout.dynamic_sampling",
    "seed": "simulator.seed",
    "seeds": "simulator.seed",
}
"""Settings of a simulation that the run's own settings replace."""


def cluster_of(config: CosimConfig) -> SimulationConfig:
    """The cluster to simulate."""
    preset = _preset(config.simulator)
    if preset.cluster.hybrid_gpus:
        raise ConfigError(
            Problem(
                Kind.SETTINGS,
                "simulator.settings",
                f"simulator.preset has cluster.hybrid_gpus={preset.cluster.hybrid_gpus}, but "
                "engines of a run do not join its training; use "
                "simulator.settings=[cluster.hybrid_gpus=0]",
            )
        )
    workload = preset.workload
    batch = config.dataset.batch_size * config.gconfig.n_samples
    share = batch / (workload.prompts_per_batch * workload.samples_per_prompt)
    schedule = config.rollout
    return preset.with_settings(
        {
            **_gpus(preset, config.simulator.scale or share),
            "name": config.experiment_name,
            "workload.prompts_per_batch": config.dataset.batch_size,
            "workload.samples_per_prompt": config.gconfig.n_samples,
            "workload.minibatches": config.actor.ppo_n_minibatches,
            "workload.steps": config.total_train_steps,
            "workload.warmup_steps": 0,
            "workload.whole_run": True,
            "workload.equal_rewards_share": 0.0,  # rewards are the model's
            "schedule.name": schedule.schedule,
            "schedule.eta": schedule.max_head_offpolicyness,
            "schedule.interruptible": schedule.interruptible,
            "schedule.batch_order": schedule.batch_order,
            "schedule.max_drift": schedule.bounded_drift.max_drift,
            "schedule.min_eta": schedule.bounded_drift.min_eta,
            "schedule.max_lag": schedule.max_lag,
            "schedule.on_late": schedule.on_late,
            "schedule.max_concurrent_prompts": limits_of(config).max_in_flight,
            "schedule.slots": schedule.slots,
            "rollout.routing": schedule.routing,
            "seed": config.simulator.seed,
            "seeds": 1,
        }
    )


def system_of(config: CosimConfig) -> System:
    """The system to simulate, with the limits of a real run of this config."""
    try:
        system = build(cluster_of(config))
    except ConfigError as error:
        raise ConfigError(*map(_of_cluster, error.problems)) from error
    if system.workload.most_turns > 1:
        raise ConfigError(
            Problem(
                Kind.SETTINGS,
                "simulator.settings",
                f"simulator.preset has workload.turns={system.workload.most_turns}, but a "
                "co-simulated response has one turn; use simulator.settings=[workload.turns=1]",
            )
        )
    if system.limits.batch_parts > 1:
        raise ConfigError(
            Problem(
                Kind.SETTINGS,
                "simulator.settings",
                f"simulator.preset trains on a batch in {system.limits.batch_parts} parts "
                "(schedule.require_batches), but a co-simulated step trains on a whole batch; use "
                "simulator.settings=[schedule.require_batches=0]",
            )
        )
    limits = limits_of(config)
    if config.mode == "along":  # its schedule is made before there are rewards
        limits = replace(limits, sampling=None)
    return replace(system, limits=limits)


def mean_response_tokens(config: CosimConfig) -> float:
    """Mean length of the cluster's responses."""
    return lengths_from(_preset(config.simulator).workload.answers).mean_tokens()


def _preset(cluster: ClusterConfig) -> SimulationConfig:
    if found := list(_replaced(cluster.settings)):
        raise ConfigError(*found)
    try:
        return load_simulation(cluster.preset, cluster.settings)
    except ValueError as error:
        raise ConfigError(*problems_of(error, "simulator")) from error


def _replaced(settings: Sequence[str]) -> Iterator[Problem]:
    """Settings of the cluster that would have no effect."""
    for override in settings:
        name = override.partition("=")[0].strip()
        if instead := _INSTEAD.get(ALIASES.get(name, name)):
            yield Problem(
                Kind.SETTINGS,
                "simulator.settings",
                f"simulator.settings has {override!r}, which has no effect: use {instead}",
            )


def _gpus(preset: SimulationConfig, factor: float) -> dict[str, Any]:
    """Scaled numbers of GPUs, in whole engines and whole replicas of the trainer."""
    cluster = preset.cluster
    engine = preset.rollout.tensor_parallel
    replica = preset.trainer.tensor_parallel * preset.trainer.pipeline_parallel
    if cluster.colocated:
        unit = max(engine, replica)
        return {"cluster.gpus": _scaled(cluster.gpus, factor, unit)}
    rollout = _scaled(cluster.rollout_gpus, factor, engine)
    training = _scaled(cluster.training_gpus, factor, replica)
    return {"cluster.gpus": rollout + training, "cluster.rollout_gpus": rollout}


def _scaled(gpus: int, factor: float, unit: int) -> int:
    return max(1, round(gpus * factor / unit)) * unit


def _of_cluster(problem: Problem) -> Problem:
    """A problem of the simulated cluster, named as one."""
    return replace(
        problem,
        setting=f"simulator.{problem.setting}",
        message=f"the simulated cluster: {problem.message}",
    )
