"""Groups of GPUs of a training layout, and the memory of one GPU.

    gpus = pipeline x data x sequence (context x ulysses) x tensor
    gpus = pipeline x copies of the experts x expert             (a second view of the same GPUs)

Order: tensor parallel innermost, then sequence, then data parallel, then pipeline stages, as in
Megatron-LM. Expert parallelism lies across tensor, sequence and data parallelism, and then does not
cut an expert's matrices (`expert_tensor_parallel_size` 1, as in Megatron's recipes for mixtures);
without it tensor parallelism cuts them.

Memory of one training GPU: parameters, gradients, optimizer state and activations.

    bf16 parameters, gradients            split over tensor and pipeline parallelism; those of
                                          experts over expert instead of tensor parallelism
    fp32 parameters and Adam's moments    also over data parallelism (distributed optimizer), or
                                          in the host's memory; fully sharded, the first two as
                                          well (FSDP, ZeRO-3), with two layers gathered
    activations                           of the micro-batches in flight; the head's in chunks

Activations were compared with prime-rl's peak memory (benchmarks of 2026-01-15): from 16,384 to
65,536 tokens it grows by 155 kB per token for Qwen3-0.6B and 415 kB for 4B; here by 145 and 427.
"""

from __future__ import annotations

from dataclasses import dataclass

from areal_lab.config.problem import Kind, refusal
from simulator.catalogue.gpu import GPU
from simulator.catalogue.transformer import ModelShape
from simulator.config.schema import TrainerConfig
from simulator.costs.weight_bytes import adapters_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Sizes of the groups."""

    gpus: int
    tensor: int
    pipeline: int
    sequence: int
    """GPUs that share the tokens of a micro-batch, in the two ways together."""
    expert: int
    """1 without expert parallelism."""
    shard_gpus: int
    """GPUs that shard one copy of a stage's parameters, if they are gathered for each pass."""

    @property
    def data(self) -> int:
        """Ranks that train on different sequences."""
        return self.gpus // (self.tensor * self.pipeline * self.sequence)

    @property
    def cuts(self) -> int:
        """GPUs that share the work of a micro-batch."""
        return self.tensor * self.pipeline * self.sequence

    @property
    def expert_shards(self) -> int:
        """GPUs that share the experts of a layer."""
        return self.expert if self.expert > 1 else self.tensor

    def held_parameters(self, model: ModelShape) -> tuple[float, float]:
        """Parameters of one copy on one GPU that is not sharded further: dense, experts."""
        experts = float(model.moe_layers * model.experts * model.expert_parameters)
        dense = (model.parameters - experts) / (self.tensor * self.pipeline)
        return dense, experts / (self.expert_shards * self.pipeline)

    def copies(self) -> tuple[int, int]:
        """GPUs that hold the same part of a stage, if it is not sharded: dense, experts."""
        stage = self.gpus // self.pipeline
        return stage // self.tensor, stage // self.expert_shards


def groups_of(config: TrainerConfig, model: ModelShape, gpus: int) -> Groups:
    """The groups of a layout."""
    tensor, pipeline = config.tensor_parallel, config.pipeline_parallel
    sequence = config.context_parallel * config.sequence_parallel
    replica = tensor * pipeline * sequence
    if gpus % replica:
        more = ""
        if config.context_parallel > 1:
            more += f" x context_parallel {config.context_parallel}"
        if config.sequence_parallel > 1:
            more += f" x sequence_parallel {config.sequence_parallel}"
        raise refusal(
            "trainer",
            f"trainer: {gpus} training GPUs cannot be divided into replicas of {replica} "
            f"(tensor_parallel {tensor} x pipeline_parallel {pipeline}{more}); use a "
            f"multiple of {replica}",
            Kind.DIVISIBILITY,
        )
    if model.heads % tensor:
        raise refusal(
            "trainer.tensor_parallel",
            f"trainer.tensor_parallel is {tensor}, but must divide the {model.heads} "
            f"heads of {model.name}",
            Kind.DIVISIBILITY,
        )
    if model.heads % (tensor * config.sequence_parallel):
        raise refusal(
            "trainer.sequence_parallel",
            f"trainer.sequence_parallel is {config.sequence_parallel}, but with tensor_parallel "
            f"{tensor} must divide the {model.heads} heads of {model.name}; use "
            "trainer.context_parallel for more",
            Kind.DIVISIBILITY,
        )
    if config.context_parallel > 1 and model.linear is not None:
        raise refusal(
            "trainer.context_parallel",
            f"trainer.context_parallel is {config.context_parallel}, but the states of "
            f"{model.name} pass from token to token, not around a ring of keys; use "
            "trainer.sequence_parallel",
        )
    if model.linear is not None and model.linear.key_heads % (tensor * config.sequence_parallel):
        raise refusal(
            "trainer.tensor_parallel",
            f"trainer.tensor_parallel is {tensor} and trainer.sequence_parallel "
            f"{config.sequence_parallel}, but their product must divide the "
            f"{model.linear.key_heads} key heads of linear attention of {model.name}",
            Kind.DIVISIBILITY,
        )
    # Embedding and head may stand for a layer each in an interleaved schedule.
    ends = 2 * (config.pipeline_chunks > 1)
    if pipeline * config.pipeline_chunks > model.layers + ends:
        raise refusal(
            "trainer.pipeline_parallel",
            f"trainer.pipeline_parallel is {pipeline}, but {model.name} has only "
            f"{model.layers} layers"
            + (f" for {config.pipeline_chunks} chunks each" if config.pipeline_chunks > 1 else ""),
            Kind.DIVISIBILITY,
        )
    _check_experts(config, model, gpus)
    return Groups(
        gpus=gpus,
        tensor=tensor,
        pipeline=pipeline,
        sequence=sequence,
        expert=config.expert_parallel,
        shard_gpus=_shard_gpus(config, gpus),
    )


def _check_experts(config: TrainerConfig, model: ModelShape, gpus: int) -> None:
    expert = config.expert_parallel
    if expert == 1:
        return
    stage = gpus // config.pipeline_parallel
    if not model.experts:
        why = f"{model.name} has no experts; use 1"
    elif model.experts % expert:
        why = f"must divide the {model.experts} experts of {model.name}"
    elif stage % expert:
        why = f"must divide the {stage} training GPUs of a pipeline stage"
    else:
        return
    raise refusal(
        "trainer.expert_parallel",
        f"trainer.expert_parallel is {expert}, but {why}",
        Kind.DIVISIBILITY,
    )


def _shard_gpus(config: TrainerConfig, gpus: int) -> int:
    stage = gpus // (config.tensor_parallel * config.pipeline_parallel)
    group = config.shard_group or stage
    if stage % group:
        raise refusal(
            "trainer.shard_group",
            f"trainer.shard_group is {group}, but must divide the {stage} training GPUs that hold "
            "the same part of the model; 0 shards over all of them",
            Kind.DIVISIBILITY,
        )
    return group


GIB = 2**30
RESERVED_BYTES = 3 * GIB
"""CUDA context, communication buffers, chunks of the head, fragmentation."""

WEIGHT_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 2, 4, 12
"""Bytes per parameter: bf16, fp32, and fp32 three times (parameter, two moments)."""

_HIDDEN_BYTES, _MLP_BYTES = 34, 10
"""Bytes that one layer needs at once while it is repeated for its backward pass, per token: per
unit of hidden width (Korthikanti et al., arXiv:2205.05198, without the attention matrix) and of MLP
width, with gate and product."""
_KEPT_HIDDEN_BYTES, _KEPT_MLP_BYTES = 16, (4, 8)
"""Bytes that one layer keeps without recomputation: inputs of norms and products, queries, keys,
values, output and residual; of the MLP width, input and output of the activation, with a gate twice
as many. All published steps without recomputation fit so (`data/trainer_steps.csv`)."""
_WORKING_FACTOR = 1.3
"""Factor for the backward pass of a layer, which adds gradients of its activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMemory:
    """Bytes on one GPU."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    gathered: float = 0.0
    """Layers that a fully sharded pass has gathered: the current and the next one."""
    reserved: float = RESERVED_BYTES

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return self.state + self.activations + self.reserved

    @property
    def state(self) -> float:
        """Parameters, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer + self.gathered


def training_memory(
    model: ModelShape,
    config: TrainerConfig,
    *,
    gpus: int,
    micro_batch_tokens: float,
    fully_sharded: bool = False,
    gradient_bytes: int = GRADIENT_BYTES,
    reference_on_host: bool = False,
) -> TrainingMemory:
    """Memory of the fullest GPU, which is in the first stage.

    Tensor and sequence parallelism share activations as well. The first of p stages has p
    micro-batches in flight. A critic and a reference are models of the same size on the same
    GPUs; the reference is only read, and may take the policy's place instead of one of its own.

    Args:
        config: layout, recomputation, and whether there are a critic and a reference.
        micro_batch_tokens: tokens of the largest micro-batch, before they are shared.
        fully_sharded: data-parallel ranks also shard parameters and gradients.
        gradient_bytes: of an accumulated gradient.
        reference_on_host: the reference is in the host's memory.
    """
    groups = groups_of(config, model, gpus)
    dense, experts = groups.held_parameters(model)
    held, sharded, gathered = dense + experts, float(gpus), 0.0
    if fully_sharded:
        gathered = 2 * WEIGHT_BYTES * held * groups.pipeline / model.layers
        sharded = float(groups.shard_gpus * groups.tensor * groups.pipeline)
        held = model.parameters / sharded
    trained = 2 if config.critic else 1
    layer_bytes = _HIDDEN_BYTES * model.hidden + _MLP_BYTES * _mlp_width(model)
    kept: float = WEIGHT_BYTES * model.hidden  # what enters a layer
    if not config.activation_recompute:
        mlp_bytes = _KEPT_MLP_BYTES[model.gated] * _mlp_width(model)
        kept = _KEPT_HIDDEN_BYTES * model.hidden + mlp_bytes
    in_flight = model.layers  # of p micro-batches, each with the layers of one of p stages
    working = _WORKING_FACTOR * layer_bytes
    per_token = (in_flight * kept + working) / (config.tensor_parallel * groups.sequence)
    on_gpu = 0 if config.optimizer_offload else OPTIMIZER_BYTES
    read = config.reference_logprobs and not reference_on_host
    adapters, share = adapters_of(config), 1.0
    if adapters is not None:
        # The reference is the model without adapters.
        read, share = False, adapters.share(model)
    return TrainingMemory(
        parameters=(trained + read) * WEIGHT_BYTES * held,
        gradients=trained * gradient_bytes * held * share,
        optimizer=trained * on_gpu * model.parameters / sharded * share,
        activations=per_token * micro_batch_tokens,
        gathered=gathered,
    )


def check_training_memory(
    memory: TrainingMemory, model: ModelShape, gpu: GPU, *, activation_recompute: bool
) -> None:
    """Refuse a layout that does not fit in memory."""
    if memory.total <= gpu.memory_bytes:
        return
    state = memory.state
    if state + memory.reserved > gpu.memory_bytes:
        fix = "raise trainer.tensor_parallel or trainer.pipeline_parallel, or train on more GPUs"
        if model.experts:
            fix = f"raise trainer.expert_parallel, {fix[6:]}"
    elif not activation_recompute:
        fix = "set trainer.activation_recompute, or lower trainer.micro_batch_tokens"
    else:
        fix = "lower trainer.micro_batch_tokens or raise trainer.tensor_parallel"
    raise refusal(
        "trainer",
        f"trainer: training {model.name} takes {memory.total / GIB:.1f} GiB per GPU (state "
        f"{state / GIB:.1f}, activations {memory.activations / GIB:.1f}, reserved "
        f"{memory.reserved / GIB:.1f}), but {gpu.name} has {gpu.memory_bytes / GIB:.1f}; {fix}",
        Kind.MEMORY,
    )


def unchecked_memory(model: ModelShape, gpu: GPU, gpus: int) -> str:
    """A warning if no layout without offloading can hold the training state; else "".

    For training with a given step time, whose layout is not checked otherwise.
    """
    shares = training_memory(
        model, TrainerConfig(), gpus=gpus, micro_batch_tokens=0, fully_sharded=True
    )
    state = shares.state - shares.gathered
    if state + shares.reserved <= gpu.memory_bytes:
        return ""
    return (
        f"training: memory is not checked, because trainer.step_s is given; parameters, gradients "
        f"and optimizer of {model.name} take {state / GIB:.1f} GiB on "
        f"each of {gpus} GPU{'s' * (gpus > 1)}, but {gpu.name} has {gpu.memory_bytes / GIB:.1f}"
    )


def _mlp_width(model: ModelShape) -> float:
    """Width of the MLP that a token passes: the dense one, or the sum of its experts."""
    if not model.experts:
        return model.intermediate
    return model.active_experts * model.moe_intermediate + model.shared_intermediate
