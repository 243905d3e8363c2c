"""Memory of one training GPU: parameters, gradients, optimizer state and activations.

    bf16 parameters, fp32 gradients       shared out over tensor and pipeline parallelism
    fp32 parameters and Adam's moments    over data parallelism as well (distributed optimizer);
                                          fully sharded, the first two as well (FSDP, ZeRO-3)
    activations                           of the micro-batches in flight; the head's in chunks

Activations were compared with prime-rl's peak memory (benchmarks of 2026-01-15): from 16,384 to
65,536 tokens it grows by 155 kB per token for Qwen3-0.6B and 415 kB for 4B; here by 145 and 427.
"""

from __future__ import annotations

from dataclasses import dataclass

from areal_lab.config.problem import Kind, refusal
from simulator.catalogue.gpu import GPU
from simulator.catalogue.transformer import ModelShape

GIB = 2**30
RESERVED_BYTES = 3 * GIB
"""CUDA context, communication buffers, chunks of the head, fragmentation."""

WEIGHT_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 2, 4, 12
"""Per parameter: bf16, fp32, and fp32 three times (parameter, two moments)."""

_HIDDEN_BYTES, _MLP_BYTES = 34, 10
"""Kept by one layer for its backward pass, per token: of its hidden width (Korthikanti et al.,
arXiv:2205.05198, without the attention matrix) and of its MLP's, gate and product included."""
_WORKING_FACTOR = 1.3
"""What the backward pass of a layer adds: gradients of its activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMemory:
    """Bytes on one GPU."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    reserved: float = RESERVED_BYTES

    @property
    def total(self) -> float:
        """All of them."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.reserved


def training_memory(
    model: ModelShape,
    *,
    gpus: int,
    tensor_parallel: int,
    pipeline_parallel: int,
    micro_batch_tokens: float,
    activation_recompute: bool,
    fully_sharded: bool = False,
    critic: bool = False,
    reference: bool = False,
) -> TrainingMemory:
    """What the fullest GPU (of the first stage) holds.

    Args:
        model: that is trained.
        gpus: all training GPUs.
        tensor_parallel: GPUs that share each layer; activations as well (sequence parallelism).
        pipeline_parallel: stages; the first has as many micro-batches in flight.
        micro_batch_tokens: of the largest micro-batch.
        activation_recompute: keep only what enters a layer.
        fully_sharded: data-parallel ranks share parameters and gradients out as well.
        critic: a second model of the same size is trained on the same GPUs.
        reference: a third one is only read.
    """
    model_parallel = tensor_parallel * pipeline_parallel
    held = model.parameters / (gpus if fully_sharded else model_parallel)
    trained = 2 if critic else 1
    layer_bytes = _HIDDEN_BYTES * model.hidden + _MLP_BYTES * _mlp_width(model)
    entering_bytes = WEIGHT_BYTES * model.hidden
    kept = entering_bytes if activation_recompute else layer_bytes
    in_flight = pipeline_parallel * model.layers / pipeline_parallel
    working = _WORKING_FACTOR * layer_bytes
    per_token = (in_flight * kept + working) / tensor_parallel
    return TrainingMemory(
        parameters=(trained + reference) * WEIGHT_BYTES * held,
        gradients=trained * GRADIENT_BYTES * held,
        optimizer=trained * OPTIMIZER_BYTES * model.parameters / gpus,
        activations=per_token * micro_batch_tokens,
    )


def check_training_memory(
    memory: TrainingMemory, model: ModelShape, gpu: GPU, *, activation_recompute: bool
) -> None:
    """Refuse what does not fit.

    Args:
        memory: of the fullest GPU.
        model: that is trained, for the message.
        gpu: that holds it.
        activation_recompute: is on already.

    Raises:
        ValueError: in one line, with what is needed, what there is and what would help.
    """
    if memory.total <= gpu.memory_bytes:
        return
    state = memory.parameters + memory.gradients + memory.optimizer
    if state + memory.reserved > gpu.memory_bytes:
        mend = "raise trainer.tensor_parallel or trainer.pipeline_parallel, or train on more GPUs"
    elif not activation_recompute:
        mend = "set trainer.activation_recompute, or lower trainer.micro_batch_tokens"
    else:
        mend = "lower trainer.micro_batch_tokens or raise trainer.tensor_parallel"
    raise refusal(
        "trainer",
        f"trainer: training {model.name} takes {memory.total / GIB:.1f} GiB per GPU (state "
        f"{state / GIB:.1f}, activations {memory.activations / GIB:.1f}, reserved "
        f"{memory.reserved / GIB:.1f}), but {gpu.name} has {gpu.memory_bytes / GIB:.1f}; {mend}",
        Kind.MEMORY,
    )


def unchecked_memory(model: ModelShape, gpu: GPU, gpus: int) -> str:
    """A warning if no layout without offloading holds the state; else nothing.

    For training whose step is given: such a step is believed, whatever the layout.
    """
    shares = training_memory(
        model,
        gpus=gpus,
        tensor_parallel=1,
        pipeline_parallel=1,
        micro_batch_tokens=0,
        activation_recompute=True,
        fully_sharded=True,
    )
    if shares.total <= gpu.memory_bytes:
        return ""
    return (
        f"training: its step is given, so that its memory is not checked; parameters, gradients "
        f"and optimizer of {model.name} take {(shares.total - shares.reserved) / GIB:.1f} GiB on "
        f"each of {gpus} GPU{'s' * (gpus > 1)}, but {gpu.name} has {gpu.memory_bytes / GIB:.1f}"
    )


def _mlp_width(model: ModelShape) -> float:
    """Of the MLP that a token passes: the dense one, or its experts together."""
    if not model.experts:
        return model.intermediate
    return model.active_experts * model.moe_intermediate + model.shared_intermediate
