"""Bytes of weights and caches: of engines by precision, and of low-rank adapters.

Bytes of an engine's weights and cache: as published, in bf16, or in fp8.

    auto           bf16, and 4.25 bits per number of experts that are published in MXFP4
    fp8 weights    1 byte per number of the layers, and an fp32 scale per block of 128 x 128;
                   the embedding and the head stay in bf16
    fp8 cache      1 byte per number of keys and values

Blocks of 128 x 128 are those of DeepSeek-V3's checkpoint and of Qwen3's in fp8
(`weight_block_size` of their config.json, AIConfigurator 0.12.0 model_configs, 2026-09), which also
leave the head in bf16 (`modules_to_not_convert`).

Low-rank adapters (LoRA, arXiv:2106.09685) of every matrix of the layers: what is left to train.

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
from typing import Final, Literal, NamedTuple

from areal_lab.config.problem import refusal
from simulator.catalogue.gpu import GPU
from simulator.catalogue.transformer import ModelShape
from simulator.config.schema import SimulationConfig, TrainerConfig, TrainerKind

Precision = Literal["bf16", "fp8"]
WeightPrecision = Literal["auto", "bf16", "fp8"]

FP8_WEIGHT_BYTES: Final = 1 + 4 / 128**2
"""Bytes per number of a layer's matrices, with the scale of its block."""
_BF16_BYTES: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNumbers:
    """Precision of what an engine holds."""

    weights: WeightPrecision = "bf16"
    cache: Precision = "bf16"

    def weight_bytes(self, model: ModelShape) -> float:
        """Memory of all weights."""
        if self.weights == "bf16":
            return model.weight_bytes()
        if self.weights == "auto":
            return model.checkpoint_bytes()
        tables = 1 if model.tied_embeddings else 2
        tables_held = tables * model.embedding_parameters
        return FP8_WEIGHT_BYTES * (model.parameters - tables_held) + _BF16_BYTES * tables_held

    def decode_weight_bytes(self, model: ModelShape, *, sequences: float) -> float:
        """Weights that a step of `sequences` tokens reads."""
        if self.weights == "bf16":
            return model.decode_weight_bytes(sequences=sequences)
        if self.weights == "auto":
            return model.decode_checkpoint_bytes(sequences=sequences)
        layers = model.decode_weight_bytes(1, sequences=sequences) - model.embedding_parameters
        return FP8_WEIGHT_BYTES * layers + _BF16_BYTES * model.embedding_parameters

    def cache_bytes_per_token(self, model: ModelShape) -> float:
        """Keys and values of one token in the layers that attend to the whole context."""
        return model.cache_bytes_per_token(self._cache_bytes)

    def window_bytes(self, model: ModelShape) -> float:
        """Keys and values of one sequence in layers with a window."""
        return model.window_bytes(self._cache_bytes)

    @property
    def _cache_bytes(self) -> int:
        return 1 if self.cache == "fp8" else _BF16_BYTES


BF16: Final = EngineNumbers()


def engine_numbers(config: SimulationConfig) -> EngineNumbers:
    """Precision of a config's engines."""
    rollout = config.rollout
    return EngineNumbers(weights=rollout.weight_precision, cache=rollout.kv_cache_precision)


def check_precision(config: SimulationConfig, gpu: GPU) -> None:
    """Refuse what the GPUs that generate cannot do, or what changes nothing."""
    rollout = config.rollout
    if rollout.weight_precision == "fp8" and not gpu.fp8_flops_per_s:
        raise refusal(
            "rollout.weight_precision",
            f"rollout.weight_precision is fp8, but {gpu.name} has no fp8 matrix units; use bf16, "
            "or a GPU with fp8_flops_per_s above 0 (H100, H200, B200, ...)",
        )
    if config.weights.quantize_before_sending and rollout.weight_precision != "fp8":
        raise refusal(
            "weights.quantize_before_sending",
            "weights.quantize_before_sending is true, but rollout.weight_precision is "
            f"{rollout.weight_precision}; set it to fp8, or leave the first out",
        )


_BYTES: Final = 2
FUSED_TRAFFIC: Final = 0.0
"""Times that inputs and outputs of the adapted matrices move again per pass, with fused adapters.

Nothing is left to fit: three steps of NeMo in fp8 on H100s (`data/lora_steps.csv`, 2024-07), 1.40
to 1.47 times as fast as those of all weights, are met within 5 % on average without it."""
EAGER_TRAFFIC: Final = 3.62
"""Traffic of adapters as separate modules.

Fitted to nine LoRA steps on H100s (the same table): seven of prime-rl (2026-02), most of them
slower than those of all weights, and two of NeMo AutoModel (2025-10). Mean error 10 %; a test
repeats it."""
TRAFFIC: Final[Mapping[TrainerKind, float]] = MappingProxyType(
    {
        **dict.fromkeys(("areal", "megatron"), FUSED_TRAFFIC),
        **dict.fromkeys(("fsdp2", "prime_rl", "torchtitan", "areal_lab"), EAGER_TRAFFIC),
    }
)
"""Traffic by trainer; only `megatron` and `prime_rl` were measured."""
LORA_ERROR: Final = 0.15
"""Least error of a trainer's speed with adapters: between systems and versions."""


class Widths(NamedTuple):
    """Inputs and outputs of the matrices of all layers, summed."""

    all: int
    """Parameters of every matrix."""
    used: int
    """Parameters of the matrices that a token passes."""


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
    """Bytes that adapters move per token and pass, in addition to the frozen matrices."""
    return times * _BYTES * adapted_widths(model).used


Sent = EngineNumbers | Adapters
"""Weights that travel to the engines: all weights in a precision, or adapters."""


def sent_weights(config: SimulationConfig) -> Sent:
    """Weights that a config's trainer sends to the engines."""
    adapters = adapters_of(config.trainer)
    if adapters is not None and not config.weights.merge_adapters:
        return adapters
    precision = config.rollout.weight_precision
    if precision == "fp8" and not config.weights.quantize_before_sending:
        return BF16
    return EngineNumbers(weights=precision)


def check_adapters(config: SimulationConfig) -> None:
    """Refuse settings that make no sense with adapters, or without."""
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
