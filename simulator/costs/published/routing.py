"""How uneven experts are when nothing balances them: from steps with forced and with free routing.

TFLOP/s forced / TFLOP/s free = seconds with imbalance / seconds without     solved for it
"""

from __future__ import annotations

import dataclasses
from typing import Final

from simulator.config.schema import TrainerConfig
from simulator.costs.published.steps import gpu_of, shapes
from simulator.costs.trainers.named import BENCHMARKED
from simulator.costs.training import TrainingCost

PAIRS: Final = (
    # tokens, context parallel, TFLOP/s with forced balance, and without
    (16_384, 1, 295, 237),
    (32_768, 2, 335, 277),
    (65_536, 4, 368, 320),
    (131_072, 8, 389, 357),
)
"""Qwen3-235B on 256 H100: TP 4, PP 8 in 4 chunks, EP 8, 256 sequences, MoE layers and norms
recomputed (yanring/Megatron-MoE-ModelZoo, best_practice/Qwen3/readme.md, long context, 2025)."""
_AGAIN: Final = 0.5
"""Of a forward pass, recomputed: what mixtures are of these models, about half."""


def implied_imbalance(tokens: int, context: int, forced: float, free: float) -> float:
    """Tokens of the busiest GPU's experts, relative to the mean, that explain one pair."""

    def seconds(imbalance: float) -> float:
        cost = TrainingCost(
            config=TrainerConfig(
                tensor_parallel=4,
                pipeline_parallel=8,
                pipeline_chunks=4,
                context_parallel=context,
                expert_parallel=8,
                micro_batch_tokens=tokens,
                proximal_logprobs=False,
            ),
            model=shapes()["Qwen3-235B-A22B"],
            gpu=dataclasses.replace(gpu_of("H100"), memory_bytes=1e12),
            gpus=256,
            speed=BENCHMARKED,
            imbalance=imbalance,
            recomputed=_AGAIN,
        )
        return cost.step([tokens] * 256, minibatches=1).seconds

    wanted = forced / free * seconds(1.0)
    low, high = 1.0, 10.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(middle) < wanted else (low, middle)
    return low
