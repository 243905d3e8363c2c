"""Low-rank adapters (LoRA, arXiv:2106.09685) of every matrix of the layers: what is left to train.

    W x + B (A x)     W frozen, [out, in]; A [rank, in] and B [out, rank] trained

    backward          no gradients of frozen matrices: half of their backward FLOPs, and reading
                      inputs and gradients of outputs for them
    memory            frozen weights in bf16; gradients and optimizer state of A and B only
    exchanges         gradients of A and B only
    adapters          read and write the inputs and outputs of every matrix again, unless fused

Experts have adapters of their own; embedding, head, router and norms have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

from areal_lab.config.problem import refusal
from simulator.catalogue.transformer import ModelShape
from simulator.config.schema import SimulationConfig, TrainerConfig, TrainerKind
from simulator.costs.precision.numbers import BF16, EngineNumbers

_BYTES: Final = 2
FUSED_TRAFFIC: Final = 0.0
"""Times that inputs and outputs of the adapted matrices move again per pass, with fused adapters.

Nothing is left to fit: three steps of NeMo in fp8 on H100s (`data/lora_steps.csv`, 2024-07), 1.40
to 1.47 times as fast as those of all weights, are met within 5 % on average without it."""
EAGER_TRAFFIC: Final = 3.62
"""The same for adapters as modules of their own.

Fitted to nine LoRA steps on H100s (the same table): seven of prime-rl (2026-02), most of them
slower than those of all weights, and two of NeMo AutoModel (2025-10). Mean error 10 %; a test
repeats it."""
TRAFFIC: Final[Mapping[TrainerKind, float]] = MappingProxyType(
    {
        **dict.fromkeys(("areal", "megatron"), FUSED_TRAFFIC),
        **dict.fromkeys(("fsdp2", "prime_rl", "torchtitan"), EAGER_TRAFFIC),
    }
)
"""By trainer; only `megatron` and `prime_rl` were measured."""
LORA_ERROR: Final = 0.15
"""Least error of a trainer's speed with adapters: between systems and versions."""


class Widths(NamedTuple):
    """Inputs and outputs of the matrices of all layers, summed."""

    all: int
    """Of every matrix."""
    used: int
    """Of those that a token passes."""


def adapted_widths(model: ModelShape) -> Widths:
    """Inputs and outputs of a model's adapted matrices."""
    hidden, matrices = model.hidden, 3 if model.gated else 2
    attention = _attention_widths(model) * model.attention_layers
    if model.linear is not None:
        linear = model.linear
        mixed = 2 * linear.key_width + linear.value_width
        one = 3 * hidden + mixed + 2 * linear.value_width
        attention += linear.layers * one
    dense = matrices * (hidden + model.intermediate) * (model.layers - model.moe_layers)
    shared = 0
    if model.shared_intermediate:
        shared = matrices * (hidden + model.shared_intermediate) * model.moe_layers
    expert = matrices * (hidden + model.moe_intermediate) * model.moe_layers
    rest = attention + dense + shared
    return Widths(rest + expert * model.experts, rest + expert * model.active_experts)


def _attention_widths(model: ModelShape) -> int:
    """Of one layer."""
    hidden, latent = model.hidden, model.latent
    if latent is None:
        queries, cached = model.heads * model.head_dim, 2 * model.kv_heads * model.head_dim
        # Queries (with their gate), keys, values and output.
        gate = queries if model.gated_attention else 0
        return 4 * hidden + 2 * queries + gate + cached
    queries = model.heads * (model.head_dim + latent.rope_head_dim)
    asked = hidden + queries + 2 * latent.query_rank
    cached = hidden + 2 * latent.cached_rank + latent.rope_head_dim
    values = model.heads * (model.head_dim + latent.value_head_dim)
    return asked + cached + values + model.heads * latent.value_head_dim + hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Adapters of one rank, which also travel to the engines instead of all weights."""

    rank: int

    def parameters(self, model: ModelShape) -> int:
        """A and B of every adapted matrix."""
        return self.rank * adapted_widths(model).all

    def weight_bytes(self, model: ModelShape) -> float:
        """Bytes of the adapters in bf16."""
        return float(_BYTES * self.parameters(model))

    def share(self, model: ModelShape) -> float:
        """Trained parameters / all of them."""
        return self.parameters(model) / model.parameters

    def flops_per_token(self, model: ModelShape) -> float:
        """FLOPs of a forward pass through A and B."""
        return 2.0 * self.rank * adapted_widths(model).used


def adapters_of(config: TrainerConfig) -> Adapters | None:
    """The adapters of a trainer; None if it trains all weights."""
    return Adapters(rank=config.lora_rank) if config.lora_rank else None


def traffic_bytes(model: ModelShape, times: float) -> float:
    """Bytes that adapters move per token and pass, beside the frozen matrices."""
    return times * _BYTES * adapted_widths(model).used


Sent = EngineNumbers | Adapters
"""What travels to the engines: all weights in a precision, or adapters."""


def sent_weights(config: SimulationConfig) -> Sent:
    """What a config's trainer sends to the engines."""
    adapters = adapters_of(config.trainer)
    if adapters is not None and not config.weights.merge_adapters:
        return adapters
    precision = config.rollout.weight_precision
    if precision == "fp8" and not config.weights.quantize_before_sending:
        return BF16
    return EngineNumbers(weights=precision)


def check_adapters(config: SimulationConfig) -> None:
    """Refuse settings that make no sense with adapters, or without.

    Raises:
        ValueError: in one line.
    """
    trainer, weights = config.trainer, config.weights
    rank = trainer.lora_rank
    if not rank:
        if weights.merge_adapters:
            raise refusal(
                "weights.merge_adapters",
                "weights.merge_adapters is true, but there are no adapters; set trainer.lora_rank",
            )
        return
    for name, value, why in (
        ("critic", trainer.critic, "adapters of a critic are not modeled"),
        (
            "mfu",
            trainer.mfu,
            "a utilization counts a backward pass with all gradients; leave it "
            "out, or calibrate trainer.time_factor",
        ),
    ):
        if value:
            shown = "true" if value is True else value
            raise refusal(
                f"trainer.{name}",
                f"trainer.{name} is {shown}, but trainer.lora_rank is {rank}: {why}",
            )
    sleep = config.colocation.sleep
    if sleep == "discard" and config.cluster.switches and not weights.merge_adapters:
        raise refusal(
            "colocation.sleep",
            f"colocation.sleep is discard, but with trainer.lora_rank ({rank}) only adapters come "
            "back to an engine that dropped its weights; use to_host or none, or set "
            "weights.merge_adapters",
        )
    if weights.quantize_before_sending and not weights.merge_adapters:
        raise refusal(
            "weights.quantize_before_sending",
            "weights.quantize_before_sending is true, but only adapters travel, in bf16; leave it "
            "out, or set weights.merge_adapters",
        )
