"""Validate the controller of a simulation: its inputs, and ranks that share everything equally."""

from __future__ import annotations

import math
from collections.abc import Iterator

from areal_lab.config.problem import ConfigError, Kind, Problem
from areal_lab.control.schedule import OnNewWeights, schedule_named
from simulator.config.schema import SimulationConfig
from simulator.costs.controller.measured import load_inputs
from simulator.costs.controller.ways import spmd_ranks, training_ranks


def wrong_controller(config: SimulationConfig) -> list[Problem]:
    """What is impossible about `controller`, on known GPUs and a known model."""
    if config.controller.kind == "none":
        return []
    try:
        load_inputs(config.controller.inputs)
        ranks, most = spmd_ranks(config), training_ranks(config)
    except ConfigError as error:
        return list(error.problems)
    if config.controller.kind != "spmd":
        return []
    found = list(_divided(config, ranks, most)) or list(_shares(config, ranks))
    return [*found, *_together(config, ranks)]


def _divided(config: SimulationConfig, ranks: int, most: int) -> Iterator[Problem]:
    """Numbers that the ranks must divide."""
    cluster, rollout, workload = config.cluster, config.rollout, config.workload
    engines = cluster.generating_gpus // rollout.tensor_parallel
    prompts = workload.prompts_per_batch
    if most % ranks or engines % ranks or prompts % ranks:
        yield Problem(
            Kind.DIVISIBILITY,
            "controller.ranks",
            f"controller.ranks is {ranks}, but must divide the data-parallel ranks of the trainer "
            f"({most}), the engines ({engines}) and the prompts of a batch ({prompts}), of which "
            f"each rank has an equal share; {math.gcd(most, engines, prompts)} does, and what "
            "divides it",
        )


def _shares(config: SimulationConfig, ranks: int) -> Iterator[Problem]:
    """Shares of a rank that are too small."""
    workload = config.workload
    share = workload.prompts_per_batch // ranks * workload.samples_per_prompt
    if share < workload.minibatches:
        yield Problem(
            Kind.SETTINGS,
            "workload.minibatches",
            f"workload.minibatches is {workload.minibatches}, but each of {ranks} ranks "
            f"(controller.kind=spmd) has only {share} responses of a batch; lower it",
        )
    if 0 < (at_once := config.schedule.max_concurrent_prompts) < ranks:
        yield Problem(
            Kind.SETTINGS,
            "schedule.max_concurrent_prompts",
            f"schedule.max_concurrent_prompts is {at_once}, but each of {ranks} ranks "
            "(controller.kind=spmd) needs one or more; raise it",
        )


def _together(config: SimulationConfig, ranks: int) -> Iterator[Problem]:
    """Settings that need one controller."""
    named = config.schedule
    schedule = schedule_named(named.name, eta=named.eta, interruptible=named.interruptible)
    if schedule.on_new_weights is not OnNewWeights.INTERRUPT or schedule.carry_over:
        yield _alone(
            "schedule.name",
            f"{named.name!r} (interruptible: {str(named.interruptible).lower()}), under which "
            f"{ranks} ranks would pause and load at different times; use synchronous, or "
            "asynchronous with interruptible: true",
        )
    for setting, value, unused in (
        ("schedule.require_batches", named.require_batches if config.batch_parts > 1 else 0, 0),
        ("cluster.hybrid_gpus", 0 if config.cluster.colocated else config.cluster.hybrid_gpus, 0),
        ("faults.node_mtbf_h", config.faults.node_mtbf_h, 0),
    ):
        if value:
            yield _alone(setting, f"{value:g}, but needs one controller; set it to {unused}")


def _alone(setting: str, text: str) -> Problem:
    return Problem(
        Kind.SETTINGS, setting, f"{setting} is {text}, or use another controller.kind than spmd"
    )
