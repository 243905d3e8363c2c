"""Duration of a training step: passes, bubbles, waiting for ranks, gradients, optimizer.

    lengths -> minibatches -> ranks -> micro-batches        areal_lab.control.microbatch
            -> seconds of each on a pipeline stage          training_speed, or a given utilization
            -> 1F1B per rank, then the slowest rank         pipeline_schedule
            -> gradients reduced, optimizer step            communication, memory bandwidth

Layout: tensor parallel innermost, then data parallel, then pipeline stages, the order of
Megatron-LM. Reducing gradients and gathering parameters are counted in full, not overlapped with
the backward pass (Megatron can overlap them, but no measured share is published).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from areal_lab.config.problem import Kind, refusal
from simulator.catalogue.gpu import GPU
from simulator.catalogue.transformer import ModelShape
from simulator.config.schema import TrainerConfig
from simulator.costs.communication import (
    all_gather_s,
    all_reduce_s,
    point_to_point_s,
)
from simulator.costs.micro_batching import Cut, check_ranks, cut_evenly, cut_within_budget, measure
from simulator.costs.pipeline_schedule import forward_only_s, one_forward_one_backward_s
from simulator.costs.trainer_speeds import AREAL
from simulator.costs.training_memory import (
    GRADIENT_BYTES,
    check_training_memory,
    training_memory,
)
from simulator.costs.training_speed import BYTES_PER_NUMBER, TrainerSpeed, forward_flops, pass_s
from simulator.costs.training_timing import (
    BUBBLE,
    CRITIC,
    FORWARD_BACKWARD,
    GRADIENTS,
    OPTIMIZER,
    PADDING,
    PROXIMAL,
    REFERENCE,
    SLOWEST_RANK,
    MeasuredTraining,
    Sizes,
    Training,
    TrainTiming,
)

Values = NDArray[np.float64]

_OPTIMIZER_TRAFFIC_BYTES = 30
"""Per parameter: fp32 parameter and two moments read and written, gradient read, bf16 written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCost:
    """Training cost of a model on GPUs, with their parallel layout."""

    config: TrainerConfig = field(default_factory=TrainerConfig)
    """Layout, batching and passes. A given utilization (`mfu`) is that inside a micro-batch;
    bubbles, waiting and other parts are added."""
    model: ModelShape
    gpu: GPU
    gpus: int
    padded: bool = False
    """Pad sequences to the longest of their micro-batch; only without dynamic batching."""
    fully_sharded: bool = False
    """Parameters are sharded over data parallelism and gathered for every pass (FSDP), during the
    previous pass; a pass waits for them if that takes longer."""
    speed: TrainerSpeed = field(default=AREAL)

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ValueError(f"gpus is {self.gpus}, but must be >= 1")
        _check_layout(self.model, self.gpus, self.config)
        if self.config.dynamic_batching:
            # The sizes of fixed micro-batches are not known yet.
            self.check_memory(self.config.micro_batch_tokens)

    @property
    def data_parallel(self) -> int:
        """Ranks that train on different sequences."""
        return self.gpus // (self.config.tensor_parallel * self.config.pipeline_parallel)

    @property
    def passes(self) -> int:
        """Duration of a training pass (forward and backward), in forward passes."""
        return 4 if self.config.activation_recompute else 3

    def check_memory(self, micro_batch_tokens: float) -> None:
        """Refuse micro-batches that do not fit.

        Raises:
            ValueError: one line, with the bound and a fix.
        """
        memory = training_memory(
            self.model,
            self.config,
            gpus=self.gpus,
            micro_batch_tokens=micro_batch_tokens,
            fully_sharded=self.fully_sharded,
        )
        check_training_memory(
            memory, self.model, self.gpu, activation_recompute=self.config.activation_recompute
        )

    def step(self, lengths: Sizes, *, minibatches: int) -> TrainTiming:
        """One training step.

        Args:
            lengths: tokens of prompt and response of each sequence, in batch order.
            minibatches: optimizer steps that the batch is cut into, in batch order.

        Raises:
            ValueError: a sequence exceeds the budget of a micro-batch, or a minibatch has fewer
                sequences than there are data-parallel ranks.
        """
        config = self.config
        sizes = np.asarray(lengths, np.int64)
        cut = self._cut(sizes, minibatches)
        forward_s = self._stage_forward_s(cut.tokens, cut.pairs, cut.present)
        hop_s = self._hop_s(cut.tokens)
        ranks = self.data_parallel
        total_s = one_forward_one_backward_s(
            forward_s,
            (self.passes - 1) * forward_s,
            cut.present,
            stages=config.pipeline_parallel,
            hop_s=hop_s,
        ).reshape(minibatches, ranks)
        busy_s = self.passes * forward_s.sum(axis=1).reshape(minibatches, ranks)
        padding_s = 0.0
        if self.padded:
            # Without padding a micro-batch has the same launches, and fewer tokens and pairs.
            own_s = self._stage_forward_s(cut.own_tokens, cut.own_pairs, cut.present)
            padding_s = self.passes * float((forward_s - own_s).sum()) / ranks
        mean_busy_s = float(busy_s.mean(axis=1).sum())
        mean_total_s = float(total_s.mean(axis=1).sum())
        parts = {
            FORWARD_BACKWARD: mean_busy_s - padding_s,
            PADDING: padding_s,
            BUBBLE: mean_total_s - mean_busy_s,
            SLOWEST_RANK: float(total_s.max(axis=1).sum()) - mean_total_s,
            GRADIENTS: minibatches * self._gradients_s(),
            OPTIMIZER: minibatches * self._optimizer_s(),
        }
        scoring_s = self._scoring_s(forward_s, hop_s, cut.present, minibatches)
        if config.critic:
            # A second model of this size: trained like the first, after a pass for its values.
            parts[CRITIC] = sum(parts.values()) + scoring_s
        if config.proximal_logprobs:
            parts[PROXIMAL] = scoring_s
        if config.reference_logprobs:
            parts[REFERENCE] = scoring_s
        parts = {name: seconds for name, seconds in parts.items() if seconds > 0}
        scored = config.proximal_logprobs + config.reference_logprobs
        forward_passes = 3 + scored + 4 * config.critic
        tokens = int(sizes.sum())
        own_pairs = float(cut.own_pairs.sum())
        return TrainTiming(
            seconds=sum(parts.values()),
            parts=parts,
            micro_batches=int(cut.present.sum()),
            tokens=tokens,
            flops=forward_passes * float(forward_flops(tokens, own_pairs, self.model)),
        )

    def _cut(self, sizes: NDArray[np.int64], minibatches: int) -> Cut:
        if self.config.dynamic_batching:
            # AReaL's trainer keeps a pipeline of p stages busy with 2 p micro-batches.
            least = 2 * self.config.pipeline_parallel if self.config.pipeline_parallel > 1 else 1
            lanes = cut_within_budget(
                sizes,
                ranks=self.data_parallel,
                minibatches=minibatches,
                max_tokens=self.config.micro_batch_tokens,
                least=least,
            )
            return measure(lanes, sizes, padded=False)
        lanes = cut_evenly(
            sizes,
            ranks=self.data_parallel,
            minibatches=minibatches,
            micro_batches=self.config.micro_batches,
        )
        return measure(lanes, sizes, padded=self.padded)

    def _stage_forward_s(self, tokens: Values, pairs: Values, present: NDArray[np.bool_]) -> Values:
        """Forward seconds of each micro-batch on one stage of the pipeline."""
        model_parallel = self.config.tensor_parallel * self.config.pipeline_parallel
        if self.config.mfu is not None:
            flops = np.asarray(forward_flops(tokens, pairs, self.model))
            # Published utilizations do not count recomputed FLOPs, so a pass is that much faster.
            reached = self.config.mfu * self.passes / 3 * self.gpu.flops_per_s
            return np.asarray(flops / (reached * model_parallel))
        shared_s, launches_s = pass_s(tokens, pairs, self.model, self.gpu, self.speed)
        stage_s = np.asarray(
            shared_s / model_parallel
            + present * (launches_s / self.config.pipeline_parallel)
            + self._tensor_parallel_s(tokens, present) / self.config.pipeline_parallel
        )
        if not self.fully_sharded:
            return stage_s
        gather_s = self._over_ranks_s(all_gather_s, BYTES_PER_NUMBER)
        return np.where(present, np.maximum(stage_s, gather_s), 0.0)

    def _tensor_parallel_s(self, tokens: Values, present: NDArray[np.bool_]) -> Values:
        """Two all-reduces per layer and pass, of the hidden vectors of a micro-batch."""
        if self.config.tensor_parallel == 1:
            return np.zeros_like(tokens)
        # Nearly linear in the bytes: a line through an empty and a full micro-batch.
        full_bytes = self.config.micro_batch_tokens * self.model.hidden * BYTES_PER_NUMBER
        start_s = all_reduce_s(0, self.config.tensor_parallel, self.gpu)
        full_s = all_reduce_s(full_bytes, self.config.tensor_parallel, self.gpu)
        per_token_s = (full_s - start_s) / self.config.micro_batch_tokens
        return np.asarray(2 * self.model.layers * (present * start_s + tokens * per_token_s))

    def _hop_s(self, tokens: Values) -> Values:
        """Seconds to send a micro-batch's hidden vectors to the next stage."""
        if self.config.pipeline_parallel == 1:
            return np.zeros_like(tokens)
        across = self.gpus > self.gpu.node_gpus
        start_s = point_to_point_s(0, self.gpu, across_nodes=across)
        token_bytes = self.model.hidden * BYTES_PER_NUMBER / self.config.tensor_parallel
        full_s = point_to_point_s(token_bytes * 1e6, self.gpu, across_nodes=across)
        return np.asarray(start_s + tokens * (full_s - start_s) / 1e6)

    def _scoring_s(
        self, forward_s: Values, hop_s: Values, present: NDArray[np.bool_], minibatches: int
    ) -> float:
        """Seconds of one forward pass over the batch; ranks wait for each other at its end."""
        stages = self.config.pipeline_parallel
        lanes = forward_only_s(forward_s, present, stages=stages, hop_s=hop_s)
        return float(lanes.reshape(minibatches, self.data_parallel).sum(axis=0).max())

    def _gradients_s(self) -> float:
        """Reduce-scatter of fp32 gradients, all-gather of bf16 parameters (distributed optimizer).

        If fully sharded, the next pass gathers instead.
        """
        scatter_s = self._over_ranks_s(all_gather_s, GRADIENT_BYTES)
        if self.fully_sharded:
            return scatter_s
        return scatter_s + self._over_ranks_s(all_gather_s, BYTES_PER_NUMBER)

    def _over_ranks_s(self, collective: Callable[..., float], parameter_bytes: int) -> float:
        """One collective of the data-parallel ranks over a stage's parameters or gradients."""
        ranks = self.data_parallel
        if ranks == 1:
            return 0.0
        held = self.model.parameters / (self.config.tensor_parallel * self.config.pipeline_parallel)
        per_node = min(ranks, max(1, self.gpu.node_gpus // self.config.tensor_parallel))
        return collective(parameter_bytes * held, ranks, self.gpu, gpus_per_node=per_node)

    def _optimizer_s(self) -> float:
        """Memory traffic of the optimizer states, plus the trainer's constant time per step."""
        traffic = _OPTIMIZER_TRAFFIC_BYTES * self.model.parameters / self.gpus
        own_s = 0.0 if self.config.mfu is not None else self.speed.step_s
        return traffic / self.gpu.memory_bytes_per_s + own_s


def training_cost(
    config: TrainerConfig,
    model: ModelShape,
    gpu: GPU,
    gpus: int,
    *,
    longest_tokens: int = 0,
    fewest_sequences: int | None = None,
) -> Training:
    """Training cost for a config.

    Args:
        config: layout, batching and overrides. For a measured step, only the layout is checked
            (it must divide the GPUs and the model), not memory.
        gpu: type of the training GPUs.
        gpus: number of training GPUs; the whole cluster when colocated.
        longest_tokens: longest allowed prompt plus response; 0 skips the check.
        fewest_sequences: sequences of the smallest minibatch; None skips the check.

    Raises:
        ValueError: the layout does not divide the GPUs or the model, does not fit in memory, the
            longest sequence does not fit in a micro-batch, or a minibatch has fewer sequences than
            there are data-parallel ranks.
    """
    if config.step_s is not None:
        _check_layout(model, gpus, config)
        return MeasuredTraining(seconds=config.step_s, token_s=config.token_s, model=model)
    cost = TrainingCost(config=config, model=model, gpu=gpu, gpus=gpus)
    if config.dynamic_batching and longest_tokens > config.micro_batch_tokens:
        raise refusal(
            "trainer.micro_batch_tokens",
            f"trainer.micro_batch_tokens is {config.micro_batch_tokens}, but prompt and response "
            f"may have {longest_tokens} tokens; raise it to at least that, or lower "
            "workload.answers.max_tokens",
        )
    if not config.dynamic_batching:
        cost.check_memory(longest_tokens)
    if fewest_sequences is not None:
        check_ranks(fewest_sequences, cost.data_parallel)
    return cost


def _check_layout(model: ModelShape, gpus: int, config: TrainerConfig) -> None:
    """Refuse a layout that does not divide the GPUs, the heads or the layers."""
    tensor_parallel, pipeline_parallel = config.tensor_parallel, config.pipeline_parallel
    model_parallel = tensor_parallel * pipeline_parallel
    if gpus % model_parallel:
        raise refusal(
            "trainer",
            f"trainer: {gpus} training GPUs cannot be divided into replicas of {model_parallel} "
            f"(tensor_parallel {tensor_parallel} x pipeline_parallel {pipeline_parallel}); use a "
            f"multiple of {model_parallel}",
            Kind.DIVISIBILITY,
        )
    if model.heads % tensor_parallel:
        raise refusal(
            "trainer.tensor_parallel",
            f"trainer.tensor_parallel is {tensor_parallel}, but must divide the {model.heads} "
            f"heads of {model.name}",
            Kind.DIVISIBILITY,
        )
    if pipeline_parallel > model.layers:
        raise refusal(
            "trainer.pipeline_parallel",
            f"trainer.pipeline_parallel is {pipeline_parallel}, but {model.name} has only "
            f"{model.layers} layers",
            Kind.DIVISIBILITY,
        )
