"""Derive limits, threads and transfer sizes from a config."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from areal_lab.config.schema import TrainConfig
from areal_lab.config.sections import BoundedDriftConfig
from areal_lab.control.limits import SLOTS, Limits, group_slots_of
from areal_lab.control.order import order_named
from areal_lab.control.routing import routing_named
from areal_lab.control.sampling import DynamicSampling
from areal_lab.control.schedule import OnNewWeights, Schedule, schedule_named
from areal_lab.engines.launch.backends import BACKENDS
from areal_lab.engines.protocol import EngineError, LoraShape
from areal_lab.engines.weights.records import Transfer
from areal_lab.engines.weights.verify_folder import adapter_parameters
from areal_lab.models.folder import transfer_bytes
from areal_lab.resolve.allocation import EnginePlan
from areal_lab.resolve.placement import Placed


def schedule_of(config: TrainConfig) -> Schedule:
    """The schedule of the config."""
    rollout = config.rollout
    return schedule_named(
        rollout.schedule,
        eta=rollout.max_head_offpolicyness,
        interruptible=rollout.interruptible,
        bound=rollout.bounded_drift.bound,
    )


def limits_of(config: TrainConfig) -> Limits:
    """Limits of the coordinator in this run."""
    rollout, schedule = config.rollout, schedule_of(config)
    batch = config.dataset.batch_size
    in_flight = rollout.max_concurrent_rollouts
    if in_flight == 0:
        most = replace(schedule, eta=schedule.largest_eta).admissible_groups(0, batch)
        in_flight = int(min(most, 2 * batch))
    return Limits(
        batch_groups=batch,
        max_in_flight=in_flight,
        group_slots=group_slots_of(rollout.slots, config.gconfig.n_samples),
        train_steps=config.total_train_steps,
        save_every_steps=config.save_every_steps,
        schedule=schedule,
        order=order_named(
            rollout.batch_order,
            schedule,
            max_lag=rollout.max_lag or None,
            on_late=rollout.on_late,
        ),
        routing=routing_named(rollout.routing),
        sampling=sampling_of(config),
    )


def rollout_settings(limits: Limits) -> dict[str, Any]:
    """Settings of `rollout` with the schedule of `limits`: the inverse of `limits_of`.

    Without dynamic sampling, and without what a run of one controller does not have.
    """
    schedule, order = limits.schedule, limits.order
    settings: dict[str, Any] = {
        "schedule": schedule.name,
        "max_head_offpolicyness": schedule.largest_eta,
        "interruptible": schedule.on_new_weights is not OnNewWeights.DRAIN,
        "max_concurrent_rollouts": limits.max_in_flight,
        "slots": SLOTS[limits.group_slots > 1],
        "batch_order": order.name,
        "on_late": order.on_late,
        "routing": limits.routing.name,
    }
    if order.name == "bounded_lag":
        # 0 would stand for eta; a lag is whole, so that any fraction of a version is 0.
        settings["max_lag"] = order.max_lag or 0.5
    if schedule.bound is not None:
        for name in BoundedDriftConfig.model_fields:
            settings[f"bounded_drift.{name}"] = getattr(schedule.bound, name)
    return settings


def usable_context(engines: EnginePlan | None, context_tokens: int) -> int:
    """Tokens of a model's context that a prompt and its response may have.

    Args:
        engines: may reserve some; None if they are not known.
    """
    return context_tokens - (0 if engines is None else BACKENDS[engines.backend].reserved_tokens)


def sampling_of(config: TrainConfig) -> DynamicSampling | None:
    """Dynamic sampling of this run, if it is on; a smaller batch has a group per minibatch."""
    settings, batch = config.rollout.dynamic_sampling, config.dataset.batch_size
    if not settings.enabled:
        return None
    smaller = settings.on_exhausted == "smaller_batch"
    return DynamicSampling(
        max_filtered=settings.max_batches * batch,
        smallest_batch=min(config.actor.ppo_n_minibatches, batch) if smaller else None,
        tolerance=settings.tolerance,
    )


@dataclass(frozen=True, slots=True)
class Threads:
    """CPU threads of each engine and of the trainer."""

    engine: int
    trainer: int


def threads_of(placed: Placed) -> Threads:
    """Share the cores: overlapping phases split them, alternating phases get all of them."""
    config, cores, engines = placed.config, placed.machine.cores, placed.engines.servers
    overlaps = schedule_of(config).overlaps
    trainer = max(1, cores - max(1, cores // 2)) if overlaps else cores
    engine = (max(1, cores // 2) if overlaps else cores) // engines
    return Threads(
        engine=config.rollout.threads or max(1, engine),
        trainer=config.actor.threads or max(1, trainer // placed.trainer.ranks),
    )


def lora_of(config: TrainConfig) -> LoraShape:
    """Shape of the LoRA adapters of a run, if it uses any."""
    actor = config.actor
    return LoraShape(rank=actor.lora_rank, target_modules=tuple(actor.target_modules))


def version_bytes(config: TrainConfig, model_path: Path, parameters: int) -> int:
    """Upper bound of the bytes to transfer per version.

    The size of the whole model if the folder does not give the size of an adapter.

    Args:
        parameters: of the whole model.
    """
    if Transfer(config.rollout.transfer) is Transfer.ADAPTER:
        try:
            parameters = adapter_parameters(model_path, lora_of(config)) or parameters
        except EngineError:
            pass  # loading the model reports the problem
    return transfer_bytes(parameters, config.rollout.dtype)
