"""Build the system of a config, or name all of its problems: the one pass over a config.

    names -> workload -> placement, schedule -> costs -> sizes, failures -> System | [Problem]

Each part is made once. What raises while it is made is a problem; a stage needs those before it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, TypeVar

from areal_lab.config.given import Source
from areal_lab.config.problem import ConfigError, Kind, Problem, problems_of
from areal_lab.control.drift import DriftLaw
from areal_lab.control.limits import Limits, group_slots_of
from areal_lab.control.order import order_named
from areal_lab.control.routing import routing_named
from areal_lab.control.sampling import DynamicSampling
from simulator.assembly.check import (
    longest_tokens,
    wrong_failures,
    wrong_hybrid_schedule,
    wrong_in_flight,
    wrong_numbers,
    wrong_overlap,
    wrong_parts,
    wrong_placement,
    wrong_ranks,
    wrong_scaling,
)
from simulator.assembly.engines import Engines
from simulator.catalogue.gpu import GPU, find_gpu
from simulator.catalogue.models import ModelShape, find_model
from simulator.config.load import simulation_config
from simulator.config.schema import (
    LatencyConfig,
    OutsideConfig,
    SimulationConfig,
    TrainerConfig,
)
from simulator.costs.controller import ControllerCost, OwnBatches, controller_cost
from simulator.costs.switch import SwitchCost, switch_cost
from simulator.costs.trainers import STREAMED_CALL_S, STREAMED_TIME
from simulator.costs.training import training_cost
from simulator.costs.training_timing import Training, outside_from
from simulator.costs.weight_bytes import check_adapters, check_precision
from simulator.costs.weight_sync import WeightSync, weight_update
from simulator.run.system import System
from simulator.workload.lengths import Lengths, lengths_from
from simulator.workload.randomness import Latency, TurnCounts, failures_from
from simulator.workload.recorded_run import RecordedLengths

Made = TypeVar("Made")


class Named(NamedTuple):
    """Model and GPUs that a config names."""

    model: ModelShape
    gpu: GPU
    """GPU of the trainer."""
    rollout_gpu: GPU


class Costs(NamedTuple):
    """Costs of generation, training, and the steps between them."""

    engines: Engines
    training: Training
    """Cost of a part of a batch."""
    switch: SwitchCost | None
    weights: WeightSync


def problems(config: SimulationConfig | Source) -> list[Problem]:
    """Return every problem of a configuration; empty if it can be simulated.

    Placement and costs need a known GPU and model, and costs everything else.
    """
    found = built(simulation_config(config))
    return [] if isinstance(found, System) else found


def check_config(config: SimulationConfig | Source) -> None:
    """Refuse what cannot be simulated.

    Raises:
        ConfigError: with everything that `problems` finds.
    """
    if found := problems(config):
        raise ConfigError(*found)


def built(config: SimulationConfig) -> System | list[Problem]:
    """The system of a config as it is, or what is impossible about it."""
    found: list[Problem] = []
    named = named_of(config, found)
    lengths = lengths_of(config, found)
    if named is None:
        return found
    found += wrong_placement(config, named.rollout_gpu)
    schedule: list[Problem] = [*wrong_parts(config)]
    controller = _made(schedule, "controller", lambda: controller_cost(config))
    schedule += [*wrong_ranks(config, controller), *wrong_hybrid_schedule(config)]
    limits = None
    if not schedule:
        schedule += wrong_overlap(config)
        limits = _limits(config, controller, schedule)
    found += schedule
    if found or lengths is None or limits is None:
        return found
    costs = _costs(config, named, lengths, found)
    if costs is None:
        return found
    slots = costs.engines.most * costs.engines.running
    nodes = math.ceil(config.cluster.training_gpus / named.gpu.node_gpus)
    found = (
        list(wrong_in_flight(config, slots))
        or list(wrong_scaling(config))
        or list(wrong_failures(config, costs.training, costs.engines, nodes))
    )
    return found or _system(config, named, costs, controller, limits)


def named_of(config: SimulationConfig, found: list[Problem]) -> Named | None:
    """The model and the GPUs; None if one is unknown, which `found` then has."""
    cluster = config.cluster
    gpu = rollout_gpu = _made(found, "cluster.gpu", lambda: find_gpu(cluster.gpu))
    if cluster.rollout_gpu:
        rollout_gpu = _made(found, "cluster.rollout_gpu", lambda: find_gpu(cluster.rollout_gpu))
    model = _made(found, "model", lambda: find_model(config.model))
    return Named(model, gpu, rollout_gpu) if model and gpu and rollout_gpu else None


def lengths_of(config: SimulationConfig, found: list[Problem]) -> Lengths | None:
    """The lengths of responses; `found` has what is wrong about the workload, whatever it runs on.

    None if the lengths are wrong.
    """
    found += wrong_numbers(config)

    def make() -> Lengths:
        lengths = lengths_from(config.workload.answers)
        if isinstance(lengths, RecordedLengths):
            lengths.check_samples(config.workload.samples_per_prompt)
        return lengths

    return _made(found, "workload.answers", make)


def limits_of(config: SimulationConfig, *, ranks: int = 1) -> Limits:
    """Limits of the coordinator, on engines that hold a batch or less."""
    workload, named, cluster = config.workload, config.schedule, config.cluster
    schedule, lag = named.policy, named.max_lag or None
    hybrid = 0 if cluster.colocated else cluster.hybrid_gpus // config.rollout.tensor_parallel
    # Without a bound: a share below 1 fills every batch.
    sampling = DynamicSampling(max_filtered=sys.maxsize) if workload.equal_rewards_share else None
    return Limits(
        batch_groups=workload.prompts_per_batch,
        max_in_flight=named.max_concurrent_prompts or workload.prompts_per_batch,
        group_slots=group_slots_of(named.slots, workload.samples_per_prompt),
        batch_parts=config.batch_parts,
        hybrid_engines=hybrid,
        ranks=ranks,
        train_steps=workload.steps if workload.whole_run else None,
        schedule=schedule,
        order=order_named(named.batch_order, schedule, max_lag=lag, on_late=named.on_late),
        routing=routing_named(config.rollout.routing),
        sampling=sampling,
    )


def _limits(
    config: SimulationConfig, controller: ControllerCost | None, found: list[Problem]
) -> Limits | None:
    try:
        return limits_of(config, ranks=1 if controller is None else controller.programs)
    except ValueError as error:
        text = f"schedule.max_lag schedule.{error}"
        found.append(Problem(Kind.SETTINGS, "schedule.max_lag", text))
        return None


def _costs(
    config: SimulationConfig, named: Named, lengths: Lengths, found: list[Problem]
) -> Costs | None:
    workload, cluster = config.workload, config.cluster
    model, gpu, rollout_gpu = named
    engines = Engines(config=config, model=model, gpu=rollout_gpu, lengths=lengths)
    longest = longest_tokens(workload)
    _made(found, "rollout.weight_precision", lambda: check_precision(config, rollout_gpu))
    known = len(found)
    _made(found, "trainer.lora_rank", lambda: check_adapters(config))
    if len(found) == known:
        _made(found, "rollout.speculative_tokens", lambda: engines.speculation)
    if len(found) > known:
        return None
    _made(found, "rollout", lambda: engines.check_longest(longest))
    sequences = workload.prompts_per_batch * workload.samples_per_prompt
    training = _made(
        found,
        "trainer",
        lambda: training_cost(
            part_trainer(config.trainer, config.batch_parts),
            model,
            gpu,
            cluster.training_gpus,
            longest_tokens=longest,
            fewest_sequences=sequences // workload.minibatches,
        ),
    )
    switch, weights = None, None
    if cluster.switches and training:  # whose layout it moves
        switch = _made(found, "weights", lambda: switch_cost(config, model, gpu))
    if cluster.sends_weights:
        weights = _made(found, "weights", lambda: weight_update(config, model, gpu))
    if found or training is None:
        return None
    return Costs(engines, training, switch, weights or WeightSync())


def _system(
    config: SimulationConfig,
    named: Named,
    costs: Costs,
    controller: ControllerCost | None,
    limits: Limits,
) -> System:
    cluster, workload, rollout = config.cluster, config.workload, config.rollout
    engines, training = costs.engines, costs.training
    limits = replace(limits, max_in_flight=engines.prompts_in_flight)
    if limits.ranks > 1:
        training = OwnBatches(training=training, ranks=limits.ranks)
    outside = part_outside(config.outside, config.batch_parts)
    return System(
        limits=limits,
        workload=workload,
        rollout=rollout,
        lengths=engines.lengths,
        engines=engines.count,
        scaling=config.scaling.rule(config.scaling.startup_s),
        make_engine=engines,
        training=training,
        training_gpus=cluster.gpus if cluster.colocated else cluster.only_training_gpus,
        weights=costs.weights,
        # The trainer takes part in a broadcast, but not in loading from disk.
        push_holds_trainer=config.weights.backend != "disk",
        switch=costs.switch,
        controller=controller,
        outside=outside_from(outside, colocated=cluster.colocated, trainer=config.trainer),
        drift=DriftLaw(minibatches=workload.minibatches, **workload.drift.model_dump()),
        reward=_latency(workload.reward),
        turn_counts=TurnCounts(workload.turns, workload.turns_most)
        if workload.turns_most
        else None,
        tool=_latency(workload.tool),
        failures=failures_from(config.faults),
        engines_per_node=max(1, named.rollout_gpu.node_gpus // rollout.tensor_parallel),
        nodes_per_engine=math.ceil(rollout.tensor_parallel / named.rollout_gpu.node_gpus),
        training_nodes=math.ceil(cluster.training_gpus / named.gpu.node_gpus),
        rollout_gpu=named.rollout_gpu,
        training_gpu=named.gpu,
        price_per_gpu_h=cluster.price_per_gpu_h,
        overhead=cluster.overhead,
    )


def part_trainer(trainer: TrainerConfig, parts: int) -> TrainerConfig:
    """The trainer, with its constant times per part of a batch (`schedule.require_batches`).

    What grows with tokens or minibatches divides itself.
    """
    if parts == 1:
        return trainer
    step_s = None if trainer.step_s is None else trainer.step_s / parts
    changed = {"step_s": step_s, "fixed_s": trainer.fixed_s / parts}
    if trainer.kind == "fsdp2" and not _measured(trainer):
        changed |= {"time_factor": STREAMED_TIME, "fixed_s": STREAMED_CALL_S}
    return trainer.with_settings(changed)


def _measured(trainer: TrainerConfig) -> bool:
    """Whether the trainer's times were given, rather than modeled."""
    given = trainer.step_s is not None or trainer.mfu is not None
    return given or trainer.time_factor != 1 or trainer.fixed_s > 0


def part_outside(outside: OutsideConfig, parts: int) -> OutsideConfig:
    """Time outside generation and training, with that of data, advantages and logs per part."""
    if parts == 1 or outside.batch_s is None:
        return outside
    return outside.with_settings({"batch_s": outside.batch_s / parts})


def _latency(config: LatencyConfig) -> Latency | None:
    return Latency(config) if config.mean_s > 0 else None


def _made(found: list[Problem], setting: str, make: Callable[[], Made]) -> Made | None:
    """Return what `make` returns, or None if it raises; its problems are added to `found`."""
    try:
        return make()
    except ValueError as error:
        found += problems_of(error, setting)
        return None
