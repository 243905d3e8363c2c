"""Duration of a prefill: of prompts, or of contexts that an interruption discarded.

n      new tokens of the pass, over all its sequences
pairs  (query, key) pairs of attention: n (n + 1) / 2 for one new sequence of n tokens

pass = smooth_max(reading the weights, 2 P n / (F e_c)) + activations + all-reduces + e_L layers
all  = passes of at most `chunk_tokens` + attention FLOPs of the pairs / (F e_attention)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from simulator.catalogue.gpu import GPU
from simulator.catalogue.transformer import ModelShape
from simulator.costs.coefficients import KernelCoefficients, plain, smooth_max, states_s
from simulator.costs.communication import engine_all_reduce_s
from simulator.costs.engine_memory import check_tensor_parallel
from simulator.costs.fp8_kernels import FP8Kernels, precise_coefficients
from simulator.costs.weight_bytes import BF16, EngineNumbers

CHUNK_TOKENS = 8192
"""Largest number of tokens per pass: `chunked_prefill_size` of SGLang on GPUs of 80 GB."""


def causal_pairs(new_tokens: int, cached_tokens: int = 0) -> int:
    """Attention pairs of one sequence: a new token attends to all earlier tokens and itself."""
    return new_tokens * cached_tokens + new_tokens * (new_tokens + 1) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCost:
    """Prefill of one engine: a model on the GPUs of one tensor-parallel group."""

    model: ModelShape
    gpu: GPU
    tensor_parallel: int
    coefficients: KernelCoefficients
    slowdown: float = 1.0
    chunk_tokens: int = CHUNK_TOKENS
    numbers: EngineNumbers = BF16
    """Precision of weights and cache; attention itself is computed in bf16."""
    fp8: FP8Kernels | None = None
    """Speed of products in fp8; None if weights are in bf16."""
    pair_s: float = field(init=False)
    """Seconds per pair of attention, in the layers that attend to the whole context."""
    _pass_s: dict[int, float] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        if not math.isfinite(self.slowdown) or self.slowdown <= 0:
            raise ValueError(f"slowdown is {self.slowdown}, but must be a number > 0")
        if self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens is {self.chunk_tokens}, but must be >= 1")
        check_tensor_parallel(self.model, self.gpu, self.tensor_parallel)
        rate = self.gpu.flops_per_s * self.coefficients.attention_efficiency * self.tensor_parallel
        pair_s = self.model.attention_flops(1) / rate
        object.__setattr__(self, "pair_s", pair_s * self.slowdown)

    @property
    def provenance(self) -> str:
        """Source of the numbers, for reports."""
        return self.coefficients.provenance

    @property
    def error(self) -> float:
        """Mean absolute relative error on the points used for the fit.

        At least 0.3 for mixtures of experts, latent attention, windows and states, whose kernels
        were not measured.
        """
        known = self.coefficients.prefill_error
        return known if plain(self.model) else max(known, 0.3)

    def seconds(self, new_tokens: int, pairs: float) -> float:
        """Seconds of a prefill, divided into chunks if it is long.

        Args:
            new_tokens: sum over all sequences; 0 takes no time.
            pairs: attention pairs, summed over all sequences (`causal_pairs`).
        """
        if new_tokens <= 0:
            return 0.0
        chunks, rest = divmod(new_tokens, self.chunk_tokens)
        linear_s = self.pass_s(rest) if rest else 0.0
        if chunks:
            linear_s += chunks * self.pass_s(self.chunk_tokens)
        return linear_s + self.pair_s * pairs + self._others_s(new_tokens, pairs)

    def _others_s(self, new_tokens: int, pairs: float) -> float:
        """Seconds of layers with a window or a state; 0 without them."""
        model, seconds = self.model, 0.0
        if model.window is not None:
            in_window = min(pairs, model.window.tokens * new_tokens)
            seconds += self.pair_s * in_window * model.window_flops() / model.attention_flops(1)
        if model.linear is not None:
            peak = self.gpu.flops_per_s * self.tensor_parallel
            seconds += self.slowdown * float(states_s(model, new_tokens, peak))
        return seconds

    def pass_s(self, tokens: int) -> float:
        """Seconds of one forward pass, without its attention pairs."""
        try:
            return self._pass_s[tokens]
        except KeyError:
            # At most one entry per length of a chunk.
            return self._pass_s.setdefault(tokens, self._one_pass_s(tokens))

    def _one_pass_s(self, tokens: int) -> float:
        model, gpu, split, at = self.model, self.gpu, self.tensor_parallel, self.coefficients
        weights = self.numbers.decode_weight_bytes(model, sequences=tokens) / split
        reading_s = at.weight_reading * weights / gpu.memory_bytes_per_s
        # Of each sequence only the last token goes through the head.
        if self.fp8 is None:
            flops = (model.linear_flops_per_token() - 2.0 * model.embedding_parameters) / split
            computing_s = flops * tokens / (gpu.flops_per_s * at.matrix_efficiency)
        else:
            computing_s = self.fp8.computing_s(
                model, gpu, at.matrix_efficiency, tokens=tokens / split, head_tokens=0
            )
        moved = at.activation_traffic * activation_bytes(model, split) * tokens
        message = tokens * model.hidden * 2
        seconds = (
            smooth_max(reading_s, computing_s, at.knee)
            + moved / gpu.memory_bytes_per_s
            + at.prefill_layer_s * model.layers
            + (2 * model.layers + 1) * engine_all_reduce_s(message, split, gpu, links=at.links)
        )
        return seconds * self.slowdown


def prefill_cost(
    model: ModelShape,
    gpu: GPU,
    tensor_parallel: int = 1,
    *,
    slowdown: float = 1.0,
    chunk_tokens: int = CHUNK_TOKENS,
    coefficients: KernelCoefficients | None = None,
    numbers: EngineNumbers = BF16,
    fp8: FP8Kernels | None = None,
) -> PrefillCost:
    """Prefill of a model on a GPU.

    Args:
        slowdown: factor on all times, for stragglers.
        chunk_tokens: largest number of tokens per pass.
        coefficients: custom coefficients of bf16; None uses the GPU's.
        numbers: precision of weights and cache.
        fp8: custom coefficients of fp8; None uses the GPU's.
    """
    known, kernels = precise_coefficients(gpu, numbers, coefficients, fp8)
    return PrefillCost(
        model=model,
        gpu=gpu,
        tensor_parallel=tensor_parallel,
        coefficients=known,
        slowdown=slowdown,
        chunk_tokens=chunk_tokens,
        numbers=numbers,
        fp8=kernels,
    )


def activation_bytes(model: ModelShape, tensor_parallel: int) -> float:
    """Activations that norms and the MLP's gate read and write for one token, in 16 bits.

    Two norms with their residual move 4 hidden widths each, the gate 3 widths of the MLP.
    """
    dense_layers = model.layers - model.moe_layers
    mixture = model.active_experts * model.moe_intermediate + model.shared_intermediate
    inner = dense_layers * model.intermediate + model.moe_layers * mixture
    return 2.0 * (8 * model.layers * model.hidden + 3 * inner / tensor_parallel)
