"""Groups of GPUs of a training layout, and what each GPU holds.

    gpus = pipeline x data x sequence (context x ulysses) x tensor
    gpus = pipeline x copies of the experts x expert             (a second view of the same GPUs)

Order: tensor parallel innermost, then sequence, then data parallel, then pipeline stages, as in
Megatron-LM. Expert parallelism lies across tensor, sequence and data parallelism, and then does not
cut an expert's matrices (`expert_tensor_parallel_size` 1, as in Megatron's recipes for mixtures);
without it tensor parallelism cuts them.
"""

from __future__ import annotations

from dataclasses import dataclass

from areal_lab.config.problem import Kind, refusal
from simulator.catalogue.transformer import ModelShape
from simulator.config.schema import TrainerConfig


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
    """The groups of a layout.

    Raises:
        ValueError: the layout does not divide the GPUs, the heads, the layers or the experts.
    """
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
    """GPUs that shard the parameters of a stage."""
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
