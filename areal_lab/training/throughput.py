"""Work of a training step and how fast its device does it: FLOPs, MFU, tokens per second, memory.

    model --model_flops--> ModelFlops --tflop--> number of a span --total_flops--> FLOPs of a step
    FLOPs, tokens, seconds --StepMeter.metrics--> trainer_tflop_per_s, mfu, ...

FLOPs are those that the model needs, each pass once: MFU (model FLOPs utilization) of Chowdhery et
al. (PaLM, arXiv:2204.02311, appendix B), not HFU. What gradient checkpointing or the log-probs
compute a second time, padding, masked pairs that a kernel computes, and passes without effect do
not count. Images do not count either.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from areal_lab.config.gpus import peak_flops_per_s
from areal_lab.data.batch import PackedBatch
from areal_lab.data.prefix_tree import ForwardCost
from areal_lab.host.memory import peak_rss_bytes
from areal_lab.training.model import decoder_weights, forward_cost
from areal_lab.training.protocol import Span

TFLOP = 1e12
"""FLOPs per unit of the metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops:
    """FLOPs of the passes of a model over packed batches, of all processes that divide it.

    Backward takes twice the forward: once for the gradients of activations, once for those of
    weights. Frozen weights (LoRA) take the first one only.
    """

    cost: ForwardCost
    output_flops_per_prediction: float
    """2 for each weight of the output layer; 0 of a model of values."""
    trained_share: float
    """Share of the decoder's weights that are trained."""
    output_trained: bool

    def forward(self, packed: PackedBatch) -> float:
        """FLOPs of a pass without gradient. A tree computes each shared prefix once.

        Token `j` is attended to by the tokens from `j` to the end of its subtree: these pairs
        count, whatever a kernel computes.
        """
        tokens = len(packed.tokens)
        pairs = int(packed.subtree_end.sum()) - tokens * (tokens - 1) // 2
        return (
            tokens * self.cost.linear_flops_per_token
            + pairs * self.cost.attention_flops_per_pair
            + len(packed.targets) * self.output_flops_per_prediction
        )

    def training(self, packed: PackedBatch) -> float:
        """FLOPs of a forward and a backward pass: three times the forward if all is trained."""
        forward = self.forward(packed)
        linear = len(packed.tokens) * self.cost.linear_flops_per_token
        output = len(packed.targets) * self.output_flops_per_prediction
        frozen = linear * (1 - self.trained_share) + output * (not self.output_trained)
        return 3 * forward - frozen


def model_flops(model: PreTrainedModel) -> ModelFlops | None:
    """FLOPs of a model before it is sharded; None of a mixture of experts, whose tokens use a part
    of its weights.
    """
    config = model.config.get_text_config()
    if getattr(config, "num_experts_per_tok", None):
        return None
    weights = decoder_weights(model)
    output = model.get_output_embeddings()
    return ModelFlops(
        cost=forward_cost(model),
        output_flops_per_prediction=0.0 if output is None else 2.0 * output.weight.numel(),
        trained_share=sum(w.numel() for w in weights if w.requires_grad)
        / max(1, sum(w.numel() for w in weights)),
        output_trained=output is not None and output.weight.requires_grad,
    )


def tflop(
    flops: ModelFlops | None, passes: Iterable[PackedBatch], *, training: bool = False
) -> dict[str, float]:
    """Work of some passes as the number `tflop` of a span; empty if it is not known."""
    if flops is None:
        return {}
    work = flops.training if training else flops.forward
    return {"tflop": math.fsum(work(packed) for packed in passes) / TFLOP}


def total_flops(spans: Sequence[Span]) -> float | None:
    """FLOPs of the spans of a process; None if no span has any."""
    counted = [span.args["tflop"] for span in spans if "tflop" in span.args]
    return TFLOP * math.fsum(counted) if counted else None


class PeakMemory(NamedTuple):
    """Largest GPU memory of a process in a step, in bytes."""

    allocated: int
    """Of tensors."""
    reserved: int
    """Of the allocator, with free blocks. The context and its libraries come on top."""


@dataclass(frozen=True, slots=True)
class StepMeter:
    """Measures one step of a process; it waits for nothing. Create it when the step begins."""

    device: torch.device
    _start_s: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        if self.device.type != "cpu":
            _module(self.device).reset_peak_memory_stats(self.device)

    def peak_memory(self) -> PeakMemory | None:
        """Peak of GPU memory since the step began; None on a CPU."""
        if self.device.type == "cpu":
            return None
        module = _module(self.device)
        return PeakMemory(
            module.max_memory_allocated(self.device), module.max_memory_reserved(self.device)
        )

    def metrics(
        self,
        *,
        tokens: int,
        flops: float | None,
        peaks: Sequence[PeakMemory | None],
        processes: int,
    ) -> dict[str, float]:
        """Metrics that differ between equal runs, because they are measured.

        Args:
            tokens: packed tokens of all processes.
            flops: of the step, of all processes; None if they are not known.
            peaks: of each data rank.
            processes: of the trainer, each on one GPU.
        """
        seconds = time.perf_counter() - self._start_s
        each = 1 / (max(seconds, 1e-9) * processes)
        metrics = {
            "peak_rss_bytes": float(peak_rss_bytes(os.getpid())),
            "trainer_s": seconds,
            "trainer_tokens_per_s": tokens * each,
        }
        if flops is not None:
            metrics["trainer_tflop_per_s"] = flops * each / TFLOP
            if peak := self._peak_flops_per_s():
                metrics["mfu"] = flops * each / peak
        known = [one for one in peaks if one is not None]
        if known:
            metrics["gpu_peak_allocated_bytes"] = float(max(one.allocated for one in known))
            metrics["gpu_peak_reserved_bytes"] = float(max(one.reserved for one in known))
        return metrics

    def _peak_flops_per_s(self) -> float | None:
        """Peak of bf16 products, also for steps in float32; None of an unknown GPU and a CPU."""
        if self.device.type == "cpu":
            return None
        return peak_flops_per_s(_module(self.device).get_device_name(self.device))


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)
