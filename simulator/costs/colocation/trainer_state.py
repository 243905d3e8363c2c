"""Seconds to move the trainer's state to the host and back.

Gradients are released, not copied, as Megatron-Core and verl do.
"""

from __future__ import annotations

from functools import cache

from simulator.catalogue.gpu import GPU
from simulator.catalogue.transformer import ModelShape
from simulator.config.schema import Offload, TrainerConfig
from simulator.costs.colocation.host_copies import Direction, copy_rate
from simulator.costs.colocation.published import rows_of
from simulator.costs.trainers.named import SPEEDS
from simulator.costs.training_memory import training_memory


@cache
def move_start_s() -> float:
    """Seconds of a move besides its copies: memory cleared, process groups ended or begun."""
    rows = rows_of("start")
    return sum(row.seconds for row in rows) / len(rows)


def offloaded_bytes(
    offload: Offload, config: TrainerConfig, model: ModelShape, *, gpus: int
) -> float:
    """Bytes that one GPU moves: optimizer state, and with `all` the parameters that it holds.

    A reference that is kept in the host's memory is there already.
    """
    if offload == "none":
        return 0.0
    speed = SPEEDS[config.kind]
    memory = training_memory(
        model,
        config,
        gpus=gpus,
        micro_batch_tokens=0,
        fully_sharded=speed.gathers,
        reference_on_host=speed.reference_on_host,
    )
    return memory.optimizer + (memory.parameters if offload == "all" else 0.0)


def move_s(
    direction: Direction,
    offload: Offload,
    config: TrainerConfig,
    model: ModelShape,
    gpu: GPU,
    *,
    gpus: int,
    pinned: bool,
) -> float:
    """Seconds to move the state in one direction."""
    if offload == "none":
        return 0.0
    moved = offloaded_bytes(offload, config, model, gpus=gpus)
    rate = copy_rate(direction, gpu, pinned=pinned, gpus=gpus)
    return move_start_s() + moved / rate.bytes_per_s
