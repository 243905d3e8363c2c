"""Bytes of an engine's weights and cache: as published, in bf16, or in fp8.

    auto           bf16, and 4.25 bits per number of experts that are published in MXFP4
    fp8 weights    1 byte per number of the layers, and an fp32 scale per block of 128 x 128;
                   the embedding and the head stay in bf16
    fp8 cache      1 byte per number of keys and values

Blocks of 128 x 128 are those of DeepSeek-V3's checkpoint and of Qwen3's in fp8
(`weight_block_size` of their config.json, AIConfigurator 0.12.0 model_configs, 2026-09), which also
leave the head in bf16 (`modules_to_not_convert`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from areal_lab.config.problem import refusal
from simulator.catalogue.gpu import GPU
from simulator.catalogue.transformer import ModelShape
from simulator.config.schema import SimulationConfig

Precision = Literal["bf16", "fp8"]
WeightPrecision = Literal["auto", "bf16", "fp8"]

FP8_WEIGHT_BYTES: Final = 1 + 4 / 128**2
"""Per number of a layer's matrices, with the scale of its block."""
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
    """Refuse what the GPUs that generate cannot do, or what changes nothing.

    Raises:
        ValueError: in one line: fp8 weights on a GPU without fp8 units, or weights that are
            quantized before they are sent to an engine that does not hold fp8.
    """
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
