"""Memory of an engine: the weights, and the tokens of keys and values that fit next to them.

    memory of a GPU * utilization = weights / tensor_parallel + cache
    the rest                      = activations, CUDA graphs, communication buffers

The utilization is SGLang's `mem_fraction_static`; vLLM's `gpu_memory_utilization` counts
activations as well, so set a few percent less here.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from areal_lab.config.problem import Kind, refusal
from simulator.catalogue.gpu import GPU, GPUS
from simulator.catalogue.transformer import ModelShape
from simulator.costs.coefficients import sequence_bytes
from simulator.costs.speculation import Speculation
from simulator.costs.weight_bytes import BF16, EngineNumbers

_MOST_GPUS = 72
"""Largest engine that is recommended: a rack."""


def cache_tokens(
    model: ModelShape,
    gpu: GPU,
    tensor_parallel: int = 1,
    utilization: float = 0.85,
    *,
    longest_tokens: int = 1,
    numbers: EngineNumbers = BF16,
    sequences: int = 0,
    speculation: Speculation | None = None,
) -> int:
    """Capacity of an engine's KV cache in tokens, over all its sequences.

    Args:
        model: its shape.
        utilization: share of each GPU's memory for weights and cache.
        longest_tokens: prompt plus response of the longest sequence, which must fit.
        numbers: precision of weights and cache.
        sequences: that run at the same time, each with windows and states beside the cache.
        speculation: whose draft has weights and a cache too; None without.
    """
    if not 0 < utilization <= 1:
        raise ValueError(
            f"memory_utilization is {utilization}, but must be in (0, 1]: a share of a GPU's memory"
        )
    if longest_tokens < 1:
        raise ValueError(f"longest_tokens is {longest_tokens}, but must be >= 1")
    check_tensor_parallel(model, gpu, tensor_parallel)
    held = _Held(model, numbers, sequences, speculation)
    tokens = _tokens(held, gpu, tensor_parallel, utilization)
    if tokens >= longest_tokens:
        return tokens
    gib = 2**30
    room = gpu.memory_bytes * utilization / gib
    weights = held.weight_bytes / tensor_parallel / gib
    if weights > room:
        problem = (
            f"{model.name} does not fit on {gpu.name} with tensor_parallel={tensor_parallel}: its "
            f"weights take {weights:.1f} GiB of the {room:.1f} GiB per GPU that "
            f"memory_utilization={utilization:g} allows"
        )
    else:
        problem = (
            f"a sequence of {longest_tokens} tokens does not fit in memory: {model.name} on "
            f"{gpu.name} with tensor_parallel={tensor_parallel} and "
            f"memory_utilization={utilization:g} has room for {max(0, tokens)} tokens next to its "
            "weights"
        )
    if sequences and sequence_bytes(model, numbers, tensor_parallel):
        problem += f", and windows and states of {sequences} sequences"
    fix = _fix(held, gpu, tensor_parallel, utilization, longest_tokens)
    raise refusal("rollout", f"rollout: {problem}; {fix}", Kind.MEMORY)


def check_tensor_parallel(model: ModelShape, gpu: GPU, tensor_parallel: int) -> None:
    """Refuse a split that no engine supports."""
    if _splits(model, tensor_parallel):
        return
    possible = [one for one in range(1, gpu.node_gpus + 1) if _splits(model, one)]
    cached = f" and {model.kv_heads} key-value heads" if model.kv_heads != model.heads else ""
    raise refusal(
        "rollout.tensor_parallel",
        f"rollout.tensor_parallel is {tensor_parallel}, but must divide the {model.heads} "
        f"heads{cached} of {model.name} evenly; within a node of {gpu.name}: "
        f"{', '.join(map(str, possible))}",
        Kind.DIVISIBILITY,
    )


def _splits(model: ModelShape, gpus: int) -> bool:
    if gpus < 1 or model.heads % gpus:
        return False
    if model.linear is not None and model.linear.key_heads % gpus:
        return False
    # Key-value heads are replicated evenly if there are fewer of them than GPUs.
    return model.kv_heads % gpus == 0 or gpus % model.kv_heads == 0


class _Held(NamedTuple):
    model: ModelShape
    numbers: EngineNumbers
    sequences: int
    speculation: Speculation | None

    @property
    def weight_bytes(self) -> float:
        """Bytes of the model and its draft."""
        weights = self.numbers.weight_bytes(self.model)
        if self.speculation is None:
            return weights
        return weights + self.speculation.weight_bytes(self.model, self.numbers)


def _tokens(held: _Held, gpu: GPU, tensor_parallel: int, utilization: float) -> int:
    """Tokens that fit; negative if the weights alone do not."""
    room = gpu.memory_bytes * utilization - held.weight_bytes / tensor_parallel
    room -= held.sequences * sequence_bytes(held.model, held.numbers, tensor_parallel)
    return math.floor(room / _token_bytes(held, tensor_parallel))


def _token_bytes(held: _Held, tensor_parallel: int) -> float:
    """Cache of a token on one GPU, with the draft's."""
    model, numbers, _, speculation = held
    per_token = numbers.cache_bytes_per_token(model) / model.cache_shards(tensor_parallel)
    return per_token if speculation is None else per_token * speculation.more_cache(model)


def _most_sequences(
    held: _Held, gpu: GPU, tensor_parallel: int, utilization: float, longest: int
) -> int:
    """Sequences, fewer than held, beside whose windows and states the longest one fits; 0 if none.

    With the weights alone too large, or without windows and states, their number is not the cause.
    """
    one = sequence_bytes(held.model, held.numbers, tensor_parallel)
    if not held.sequences or not one:
        return 0
    alone = held._replace(sequences=0)
    free = _tokens(alone, gpu, tensor_parallel, utilization) - longest
    per_token = _token_bytes(held, tensor_parallel)
    return max(0, min(held.sequences - 1, math.floor(free * per_token / one)))


def _fix(held: _Held, gpu: GPU, tensor_parallel: int, utilization: float, longest: int) -> str:
    model = held.model
    if fewer := _most_sequences(held, gpu, tensor_parallel, utilization, longest):
        return f"use max_running={fewer}: windows and states of fewer sequences leave room"
    for split in range(tensor_parallel + 1, gpu.node_gpus + 1):
        if _splits(model, split) and _tokens(held, gpu, split, utilization) >= longest:
            return f"use tensor_parallel={split}"
    if _tokens(held, gpu, tensor_parallel, 0.9) >= longest:
        return "use memory_utilization=0.9"
    larger = sorted(
        (other for other in GPUS.values() if other.memory_bytes > gpu.memory_bytes),
        key=lambda other: other.memory_bytes,
    )
    for split in range(tensor_parallel, _MOST_GPUS + 1):
        for other in (one for one in larger if split <= one.node_gpus):
            if _splits(model, split) and _tokens(held, other, split, utilization) >= longest:
                return (
                    f"no split within a node helps; use {other.name} with tensor_parallel={split}"
                )
    return "no GPU of the catalogue fits it within a node; use a smaller model or shorter responses"
