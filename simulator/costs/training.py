"""Duration of a training step: passes, bubbles, waiting for ranks, gradients, optimizer.

    lengths -> minibatches -> ranks -> micro-batches        areal_lab.control.microbatch
            -> seconds of each on a pipeline stage          layers, or a given utilization
            -> 1F1B per rank, then the slowest rank         pipeline_schedule
            -> gradients reduced, optimizer step            communication, memory bandwidth

Reducing gradients and gathering parameters are counted in full for AReaL's trainer; for those that
overlap them with the backward pass of the last micro-batch, only what is longer than it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from areal_lab.config.problem import refusal
from simulator.catalogue.gpu import GPU
from simulator.catalogue.transformer import ModelShape
from simulator.config.schema import TrainerConfig
from simulator.costs.communication import point_to_point_s
from simulator.costs.host_copies import copy_rate
from simulator.costs.layer_work import exchanges, forward_work, gathered_s, gradients_s
from simulator.costs.micro_batching import (
    Cut,
    check_ranks,
    cut_evenly,
    cut_within_budget,
    measure,
    padded_alike,
)
from simulator.costs.trainers import AREAL, expert_imbalance, slowed_in_runs, speed_of
from simulator.costs.training_layout import (
    OPTIMIZER_BYTES,
    Groups,
    TrainingMemory,
    check_training_memory,
    groups_of,
    training_memory,
)
from simulator.costs.training_speed import BYTES_PER_NUMBER, TrainerSpeed, forward_flops
from simulator.costs.training_timing import (
    BUBBLE,
    CRITIC,
    FIXED,
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
    forward_only_s,
    one_forward_one_backward_s,
)
from simulator.costs.weight_bytes import TRAFFIC, Adapters, adapters_of, traffic_bytes

Values = NDArray[np.float64]

_OPTIMIZER_TRAFFIC_BYTES = 30
"""Bytes per parameter: fp32 parameter and two moments read and written, gradient read, bf16
written."""


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
    imbalance: float = 1.0
    """Tokens of the experts on the busiest GPU, relative to the mean, with expert parallelism."""
    recomputed: float | None = None
    """Forward passes that a backward pass repeats; None takes `activation_recompute`."""
    adapter_traffic: float = 0.0
    """Times that inputs and outputs of adapted matrices move again, with `lora_rank`."""
    groups: Groups = field(init=False)

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ValueError(f"gpus is {self.gpus}, but must be >= 1")
        object.__setattr__(self, "groups", groups_of(self.config, self.model, self.gpus))
        if self.config.dynamic_batching:
            # The sizes of fixed micro-batches are not known yet.
            self.check_memory(self.config.micro_batch_tokens)

    @property
    def data_parallel(self) -> int:
        """Ranks that train on different sequences."""
        return self.groups.data

    @property
    def again(self) -> float:
        """Forward passes that a backward pass repeats."""
        if self.recomputed is not None:
            return self.recomputed
        return 1 if self.config.activation_recompute else 0

    @property
    def passes(self) -> float:
        """Duration of a training pass (forward and backward), in forward passes."""
        return 3 + self.again

    def memory(self, micro_batch_tokens: float) -> TrainingMemory:
        """Memory of the fullest GPU with micro-batches of this size."""
        return training_memory(
            self.model,
            self.config,
            gpus=self.gpus,
            micro_batch_tokens=micro_batch_tokens,
            fully_sharded=self.fully_sharded,
            gradient_bytes=self._gradient_bytes,
            reference_on_host=self.speed.reference_on_host,
        )

    def check_memory(self, micro_batch_tokens: float) -> None:
        """Refuse micro-batches that do not fit."""
        check_training_memory(
            self.memory(micro_batch_tokens),
            self.model,
            self.gpu,
            activation_recompute=self.config.activation_recompute,
        )

    def step(self, lengths: Sizes, *, minibatches: int) -> TrainTiming:
        """One training step."""
        config = self.config
        sizes = np.asarray(lengths, np.int64)
        cut = self._cut(sizes, minibatches)
        forward_s, backward_s = self._stage_s(cut.tokens, cut.pairs, cut.present)
        hop_s = self._hop_s(cut.tokens)
        ranks = self.data_parallel
        total_s = one_forward_one_backward_s(
            forward_s,
            backward_s,
            cut.present,
            stages=config.pipeline_parallel,
            hop_s=hop_s,
        ).reshape(minibatches, ranks)
        busy_s = (forward_s + backward_s).sum(axis=1).reshape(minibatches, ranks)
        if config.pipeline_chunks > 1:
            # Interleaving divides the bubble by the chunks (arXiv:2104.04473, section 2.2.2).
            total_s = busy_s + (total_s - busy_s) / config.pipeline_chunks
        padding_s = 0.0
        if cut.tokens is not cut.own_tokens:
            # Without padding a micro-batch has the same launches, and fewer tokens and pairs.
            own_s = sum(self._stage_s(cut.own_tokens, cut.own_pairs, cut.present))
            padding_s = float((forward_s + backward_s - own_s).sum()) / ranks
        mean_busy_s = float(busy_s.mean(axis=1).sum())
        mean_total_s = float(total_s.mean(axis=1).sum())
        parts = {
            FORWARD_BACKWARD: mean_busy_s - padding_s,
            PADDING: padding_s,
            BUBBLE: mean_total_s - mean_busy_s,
            SLOWEST_RANK: float(total_s.max(axis=1).sum()) - mean_total_s,
            GRADIENTS: minibatches * self._exposed_gradients_s(backward_s, cut.present),
            OPTIMIZER: minibatches * self._optimizer_s(),
        }
        scoring_s = self._scoring_s(forward_s, hop_s, cut.present, minibatches)
        if config.critic:
            # A second model of this size: trained like the first, after a pass for its values.
            parts[CRITIC] = sum(parts.values()) + scoring_s
        if config.proximal_logprobs:
            parts[PROXIMAL] = scoring_s
        if config.reference_logprobs:
            parts[REFERENCE] = scoring_s + self._swap_s()
        parts[FIXED] = config.fixed_s
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
            flops=forward_passes * float(forward_flops(tokens, own_pairs, self.model))
            + self._adapter_flops(tokens),
        )

    @property
    def adapters(self) -> Adapters | None:
        """Trained adapters; None trains all weights."""
        return adapters_of(self.config)

    @property
    def _trained_share(self) -> float:
        return 1.0 if self.adapters is None else self.adapters.share(self.model)

    def _adapter_flops(self, tokens: float) -> float:
        """FLOPs of adapters, less those of the gradients that frozen matrices do not have."""
        if self.adapters is None:
            return 0.0
        frozen = self.model.linear_flops_per_token()
        return tokens * (3 * self.adapters.flops_per_token(self.model) - frozen)

    def _cut(self, sizes: NDArray[np.int64], minibatches: int) -> Cut:
        if self.config.dynamic_batching:
            stages = self.config.pipeline_parallel
            least = self.speed.pipeline_micro_batches * stages if stages > 1 else 1
            lanes = cut_within_budget(
                sizes,
                ranks=self.data_parallel,
                minibatches=minibatches,
                max_tokens=self.config.micro_batch_tokens,
                least=least,
                balance=self.config.balance,
            )
            cut = measure(lanes, sizes, padded=False)
            return padded_alike(cut) if self.speed.pads_pipelines and stages > 1 else cut
        lanes = cut_evenly(
            sizes,
            ranks=self.data_parallel,
            minibatches=minibatches,
            micro_batches=self.config.micro_batches,
            balance=self.config.balance,
        )
        return measure(lanes, sizes, padded=self.padded)

    def _stage_s(
        self, tokens: Values, pairs: Values, present: NDArray[np.bool_]
    ) -> tuple[Values, Values]:
        """Forward and backward seconds of each micro-batch on one stage of the pipeline.

        A backward pass includes what it repeats of the forward pass.
        """
        groups, config = self.groups, self.config
        if config.mfu is not None:
            flops = np.asarray(forward_flops(tokens, pairs, self.model))
            # Published utilizations do not count recomputed FLOPs, so a pass is that much faster.
            reached = config.mfu * self.passes / 3 * self.gpu.flops_per_s
            forward_s = flops * (config.time_factor / (reached * groups.cuts))
            return forward_s, (self.passes - 1) * forward_s
        work = forward_work(
            tokens,
            pairs,
            present,
            model=self.model,
            gpu=self.gpu,
            speed=self.speed,
            groups=groups,
            fp8=config.precision == "fp8",
            imbalance=self.imbalance if groups.expert > 1 else 1.0,
            adapter_bytes=traffic_bytes(self.model, self.adapter_traffic) if self.adapters else 0.0,
        )
        sent = exchanges(
            tokens,
            present,
            model=self.model,
            gpu=self.gpu,
            groups=groups,
            full_tokens=config.micro_batch_tokens,
            ulysses=config.sequence_parallel,
            dispatch=self.speed.dispatch,
        )
        share = self.speed.exchange_share
        exchanged_s = sent.tensor_s * share + sent.heads_s + sent.experts_s
        if self.speed.exchanges_like_flops:
            forward_s = work.seconds + exchanged_s
            backward_s = (self.passes - 1) * forward_s
        else:
            forward_s = work.seconds + exchanged_s
            backward_s = (self.passes - 1) * work.seconds + (1 + self.again) * exchanged_s
        if config.context_parallel > 1:
            # Attention of one block of keys hides the arrival of the next one.
            forward_s = forward_s + np.maximum(0, sent.ring_s - work.attention_s)
            later = (1 + self.again) * sent.ring_s
            again_s = np.maximum(0, later - (self.passes - 1) * work.attention_s)
            backward_s = backward_s + again_s
        if self.adapters is not None:
            # Frozen matrices have no gradients; the input's gradient passes through them.
            backward_s = backward_s - work.gradients_s
        factor = config.time_factor
        if self.fully_sharded:
            gather_s = gathered_s(groups, self.model, self.gpu)
            forward_s = np.where(present, np.maximum(factor * forward_s, gather_s), 0.0)
            waits = (self.passes - 1) * gather_s
            return forward_s, np.where(present, np.maximum(factor * backward_s, waits), 0.0)
        return factor * forward_s, factor * backward_s

    def _hop_s(self, tokens: Values) -> Values:
        if self.config.pipeline_parallel == 1:
            return np.zeros_like(tokens)
        across = self.gpus > self.gpu.node_gpus
        start_s = point_to_point_s(0, self.gpu, across_nodes=across)
        shared = self.config.tensor_parallel * self.groups.sequence
        token_bytes = self.model.hidden * BYTES_PER_NUMBER / shared
        full_s = point_to_point_s(token_bytes * 1e6, self.gpu, across_nodes=across)
        return np.asarray(start_s + tokens * (full_s - start_s) / 1e6)

    def _scoring_s(
        self, forward_s: Values, hop_s: Values, present: NDArray[np.bool_], minibatches: int
    ) -> float:
        """Seconds of one forward pass over the batch; ranks wait for each other at its end."""
        stages = self.config.pipeline_parallel
        lanes = forward_only_s(forward_s, present, stages=stages, hop_s=hop_s)
        return float(lanes.reshape(minibatches, self.data_parallel).sum(axis=0).max())

    def _swap_s(self) -> float:
        """Seconds to copy the policy to the host, the reference in, and the policy back.

        Once per call: a batch in parts (`schedule.require_batches`) is scored and swaps in each.
        """
        if not self.speed.reference_on_host or self.adapters is not None:
            return 0.0
        held = BYTES_PER_NUMBER * sum(self.groups.held_parameters(self.model))
        return 3 * held / self._host_bytes_per_s

    @property
    def _host_bytes_per_s(self) -> float:
        """Rate of copies with pinned memory, while all GPUs of a host copy."""
        return copy_rate("to host", self.gpu, pinned=True, gpus=self.gpus).bytes_per_s

    @property
    def _gradient_bytes(self) -> int:
        asked = self.config.gradient_precision
        return {"fp32": 4, "bf16": 2}.get(asked, self.speed.gradient_bytes)

    def _exposed_gradients_s(self, backward_s: Values, present: NDArray[np.bool_]) -> float:
        """Time of reducing gradients that the last micro-batch of a rank does not hide."""
        whole_s = gradients_s(
            self.groups,
            self.model,
            self.gpu,
            self._gradient_bytes,
            fully_sharded=self.fully_sharded,
            trained_share=self._trained_share,
        )
        if not self.speed.overlaps:
            return whole_s
        last_s = float(backward_s.sum()) / max(1, int(present.sum()))
        # The gradients of the first layer come last.
        return max(whole_s - last_s, whole_s / self.model.layers)

    def _optimizer_s(self) -> float:
        """Memory traffic of the optimizer states, plus the trainer's constant time per step."""
        sharded = self.gpus
        if self.fully_sharded:
            sharded = self.groups.shard_gpus * self.groups.tensor * self.groups.pipeline
        trained = self.model.parameters * self._trained_share
        traffic = _OPTIMIZER_TRAFFIC_BYTES * trained / sharded
        own_s = 0.0 if self.config.mfu is not None else self.speed.step_s
        seconds = traffic / self.gpu.memory_bytes_per_s + own_s
        if self.config.optimizer_offload:
            # In and out at the same time: fp32 parameter and two moments.
            state = OPTIMIZER_BYTES * trained / sharded
            seconds += state / self._host_bytes_per_s
        return seconds


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
    """
    if config.step_s is not None:
        groups_of(config, model, gpus)
        return MeasuredTraining(seconds=config.step_s, token_s=config.token_s, model=model)
    speed = slowed_in_runs(speed_of(config.kind, gpu), gpu, model)
    if config.shard_group and not speed.gathers:
        raise refusal(
            "trainer.shard_group",
            f"trainer.shard_group is {config.shard_group}, but trainer.kind {config.kind} does not "
            "shard parameters; set it to 0, or use fsdp2, prime_rl, torchtitan or areal_lab",
        )
    cost = TrainingCost(
        config=config,
        model=model,
        gpu=gpu,
        gpus=gpus,
        fully_sharded=speed.gathers,
        speed=speed,
        imbalance=expert_imbalance(config),
        adapter_traffic=TRAFFIC[config.kind],
    )
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
