"""What a configuration means for the control core and the machine: limits, threads, bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from areal_lab.config.schema import TrainConfig
from areal_lab.control.limits import Limits
from areal_lab.control.order import order_named
from areal_lab.control.routing import routing_named
from areal_lab.control.schedule import Schedule, schedule_named
from areal_lab.engines.errors import EngineError
from areal_lab.engines.protocol import LoraShape
from areal_lab.engines.weights.records import Transfer
from areal_lab.engines.weights.verify_folder import adapter_parameters
from areal_lab.models.folder import transfer_bytes
from areal_lab.preflight.allocation import engine_plan


def schedule_of(config: TrainConfig) -> Schedule:
    """The schedule that the configuration names."""
    rollout = config.rollout
    return schedule_named(
        rollout.schedule, eta=rollout.max_head_offpolicyness, interruptible=rollout.interruptible
    )


def limits_of(config: TrainConfig) -> Limits:
    """What the coordinator may do in this run."""
    rollout, schedule = config.rollout, schedule_of(config)
    batch = config.dataset.batch_size
    in_flight = rollout.max_concurrent_rollouts
    if in_flight == 0:
        in_flight = int(min(schedule.admissible_groups(0, batch), 2 * batch))
    return Limits(
        batch_groups=batch,
        max_in_flight=in_flight,
        train_steps=config.total_train_steps,
        save_every_steps=config.save_every_steps,
        schedule=schedule,
        order=order_named(
            rollout.batch_order,
            schedule,
            max_lag=rollout.max_lag or None,
            drop_late=rollout.drop_late,
        ),
        routing=routing_named(rollout.routing),
    )


@dataclass(frozen=True, slots=True)
class Threads:
    """CPU threads of each engine and of the trainer."""

    engine: int
    trainer: int


def threads_of(config: TrainConfig, cores: int) -> Threads:
    """Share the cores: phases that overlap split them, phases that alternate each get them all."""
    overlaps = schedule_of(config).overlaps
    engines = engine_plan(config).servers
    trainer = max(1, cores - max(1, cores // 2)) if overlaps else cores
    engine = (max(1, cores // 2) if overlaps else cores) // engines
    return Threads(
        engine=config.rollout.threads or max(1, engine),
        trainer=config.actor.threads or trainer,
    )


def lora_of(config: TrainConfig) -> LoraShape:
    """The adapters that a run wants, if it wants any."""
    actor = config.actor
    return LoraShape(rank=actor.lora_rank, target_modules=tuple(actor.target_modules))


def version_bytes(config: TrainConfig, model_path: Path, parameters: int) -> int:
    """At most; a whole model's where the folder does not tell how large an adapter is.

    Args:
        parameters: of the whole model.
    """
    if Transfer(config.rollout.transfer) is Transfer.ADAPTER:
        try:
            parameters = adapter_parameters(model_path, lora_of(config)) or parameters
        except EngineError:
            pass  # who loads the model says what is wrong with it
    return transfer_bytes(parameters, config.rollout.dtype)
