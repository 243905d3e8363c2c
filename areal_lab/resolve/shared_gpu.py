"""One GPU for an engine and a trainer process at the same time (`rollout.share_gpu`).

    GPU = 2 contexts + trainer's tensors + engine's weights + its passes + keys and values
          reckoned     resolve.memory      bytes of the model  reckoned     `rollout.cache_gib`

Each process gets a part of the memory that it cannot exceed, so that the one that needs too much
runs out of memory, and not the other. Without `rollout.cache_gib` keys and values get what is left.
None of these numbers has been compared with a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from areal_lab.config.problem import refusal
from areal_lab.data.problems import ProblemSet
from areal_lab.engines.weights.records import Transfer
from areal_lab.host.machine import gpu_memory_bytes
from areal_lab.models.folder import (
    cache_room,
    dtype_name,
    read_model_facts,
    read_model_shape,
    transfer_bytes,
)
from areal_lab.resolve.memory import estimate
from areal_lab.resolve.placement import Placed

_SHARE: Final = "rollout.share_gpu"
_GIB: Final = 1 << 30
CONTEXT_BYTES: Final = _GIB
"""CUDA context of one process with its libraries; reckoned."""
_PASS_BYTES: Final = _GIB
"""Activations of one forward pass of an engine, of 4,096 prompt tokens; reckoned."""
_BYTES_PER_LOGIT: Final = 20
"""Logits of the running requests in float32, in five passes of the sampler; reckoned."""
_MARGIN: Final = 0.1
"""Memory of the trainer beyond its estimate, for free blocks of the allocator; reckoned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuShare:
    """Memory of a GPU that an engine and a trainer process share."""

    gpu_bytes: int
    trainer_bytes: int
    """Most memory of the trainer's tensors."""
    engine_bytes: int
    """Most memory of the engine's tensors, with `cache_bytes`."""
    cache_bytes: int
    """Most memory of keys and values."""

    @property
    def trainer_fraction(self) -> float:
        """Part of the GPU's memory, as torch limits a process."""
        return self.trainer_bytes / self.gpu_bytes

    @property
    def engine_fraction(self) -> float:
        """Part of the GPU's memory, as torch limits a process."""
        return self.engine_bytes / self.gpu_bytes

    def line(self) -> str:
        """The parts in one line."""
        return (
            f"each GPU is shared: of {_gib(self.gpu_bytes)} the trainer gets at most "
            f"{_gib(self.trainer_bytes)} and the engine {_gib(self.engine_bytes)}, of which "
            f"{_gib(self.cache_bytes)} for keys and values; reckoned, never compared with a GPU"
        )


def share_gpu(
    placed: Placed,
    model: Path,
    problems: ProblemSet | None,
    *,
    memory_of: Callable[[str], int | None] = gpu_memory_bytes,
) -> GpuShare | None:
    """Divide the memory of the GPUs; None for a run that shares none.

    Args:
        problems: bound the tokens of a micro-batch, as in `resolve.memory.estimate`.
        memory_of: memory of a GPU by its name in `CUDA_VISIBLE_DEVICES`.

    Raises:
        ConfigError: in one line with the numbers, if they do not fit or are not known.
    """
    config, rollout = placed.config, placed.config.rollout
    if not placed.engines.together:
        return None
    found = {gpu: memory_of(gpu) for gpu in placed.trainer.gpus}
    known = [size for size in found.values() if size is not None]
    if len(known) < len(found):
        unknown = next(gpu for gpu, size in found.items() if size is None)
        raise refusal(
            _SHARE,
            f"{_SHARE} is true, but nvidia-smi does not report the memory of GPU {unknown}, which "
            "would be divided; leave it out, and use + or | in allocation_mode with a GPU each or "
            "in turns",
        )
    total = min(known)
    estimated = estimate(config, model, placed.trainer.sizes, problems, device="cuda")
    if estimated is None:
        raise refusal(
            _SHARE,
            f"{_SHARE} is true, but the memory of the trainer is not known for the layers of "
            f"actor.path {config.actor.path}; write | in allocation_mode to take turns",
        )
    dtype = dtype_name(rollout.dtype, native=True)
    weights = transfer_bytes(read_model_facts(model).parameters, dtype)
    shape = read_model_shape(model)
    logits = 0 if shape is None else _BYTES_PER_LOGIT * rollout.max_running_requests * shape.vocab
    trainer = int((1 + _MARGIN) * estimated.tensors)
    if Transfer(rollout.transfer) is Transfer.CUDA_IPC:
        trainer += (1 + (rollout.max_engine_restarts > 0)) * weights  # `kept_versions`
    engine = weights + _PASS_BYTES + logits
    left = total - 2 * CONTEXT_BYTES - trainer - engine
    asked = int(rollout.cache_gib * _GIB)
    least = asked or cache_room(model, dtype=dtype, sequences=1).bytes
    if left < least:
        cache = "rollout.cache_gib" if asked else "keys and values of one longest sequence"
        raise refusal(
            _SHARE,
            f"{_SHARE} is true, but a GPU of {_gib(total)} does not hold all: the trainer "
            f"{_gib(trainer)}, the engine {_gib(engine)} (weights {_gib(weights)}), contexts "
            f"{_gib(2 * CONTEXT_BYTES)} and {cache} {_gib(least)}; take a lower "
            "actor.max_tokens_per_mb, actor.gradient_checkpointing=true, actor.use_lora=true"
            + (", a lower rollout.cache_gib" if asked else "")
            + ", or | in allocation_mode to take turns",
        )
    cache_bytes = asked or left
    return GpuShare(
        gpu_bytes=total,
        trainer_bytes=total - 2 * CONTEXT_BYTES - engine - cache_bytes,
        engine_bytes=engine + cache_bytes,
        cache_bytes=cache_bytes,
    )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / _GIB:.1f} GiB"
