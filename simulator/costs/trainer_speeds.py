"""Speeds of known trainers: coefficients fitted to published measurements, and the default.

    PRIME_RL   12 optimizer steps of its benchmark (0.6B, 4B, 30B-A3B on H100 and H200)   2.3 % off
    AREAL      the same with one factor, fitted to the dynamic row of the paper's Figure 6a  4.6 %

The default is AREAL, the slower one. Neither was measured on other GPUs, which get the efficiencies
of an H100 with an error of about +-30 %; there, set `trainer.mfu` or `trainer.step_s`. A trainer
that is not one of the named ones (`trainers.named`) may differ from AREAL as much as these two
differ from each other, by a factor of 1.42.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.catalogue.find_gpu import find_gpu
from simulator.catalogue.gpu import GPU
from simulator.catalogue.models import find_model
from simulator.catalogue.transformer import ModelShape
from simulator.costs.training_speed import (
    PRIME_RL_POINTS,
    PublishedPoint,
    TrainerSpeed,
    fit_columns,
)

Values = NDArray[np.float64]

MATRIX_EFFICIENCY = 0.77
"""Large bf16 products on an H100: 0.76 at 4,096 rows (Llama-2-7B's up-projection, Vidur,
microsoft/vidur 7d47513, 2024), 0.78 to 0.80 above (AIConfigurator 0.12.0, 2026-09). Not fitted:
models of two widths cannot separate products from traffic."""

PRIME_RL = TrainerSpeed(
    name="prime-rl",
    matrix_efficiency=MATRIX_EFFICIENCY,
    attention_efficiency=0.470,
    hidden_traffic=118.7,
    layer_s=1.164e-3,
    expert_traffic=19.88,
    expert_layer_s=5.459e-3,
    step_s=0.726,
    gathers=True,
    error=0.023,
    provenance=(
        "least squares of the relative error on 12 optimizer steps of prime-rl's benchmark "
        "(2026-01-15): FSDP2, compiled, FlashAttention-3, activations recomputed; "
        "matrix_efficiency from kernel tables"
    ),
)
"""Six coefficients from twelve points; a fit without one point predicts it to 5 %."""

AREAL = TrainerSpeed(
    name="AReaL",
    matrix_efficiency=MATRIX_EFFICIENCY,
    attention_efficiency=PRIME_RL.attention_efficiency,
    hidden_traffic=PRIME_RL.hidden_traffic,
    layer_s=PRIME_RL.layer_s,
    expert_traffic=PRIME_RL.expert_traffic,
    expert_layer_s=PRIME_RL.expert_layer_s,
    step_s=0.0,
    slowdown=1.42,
    exchanges_like_flops=True,
    head_is_shared=True,
    pipeline_micro_batches=2,
    error=0.046,
    mixture_error=0.3,
    provenance=(
        "prime-rl's coefficients times 1.42, fitted to the three dynamic bars of AReaL's Figure 6a "
        "(arXiv:2505.24298: 427.4, 454.7, 387.7 TFLOP/s as its trainer counts them) with the "
        "batch and lengths of Table 1, without pipeline bubbles; the factor includes everything "
        "else that such a step does"
    ),
)
"""Megatron-Core 0.11 in AReaL's trainer, 2025. No mixture was measured with it: the error is the
difference between the two trainers."""

FITTED_ON: Final = ("H100", "H800", "H200")
"""GPUs on which training was measured, and one that differs from them only in its links."""
ELSEWHERE: Final = 0.3
"""Assumed relative error of training speed on other GPUs."""
OTHER_TRAINERS: Final = 1 - 1 / AREAL.slowdown
"""Assumed difference of another trainer to the default: that of the two known ones."""


class SpeedError(NamedTuple):
    """Error of the default trainer's speed on a type of GPU."""

    error: float
    """Mean relative error for the trainer that it was fitted to."""
    span: float
    """Relative difference of another trainer's speed, in either direction."""
    source: str
    """Explanation of the span."""


def speed_error(gpu: GPU) -> SpeedError:
    """Error of training at the default speed."""
    source = f"two known trainers differ by a factor of {AREAL.slowdown:g}"
    if gpu.name in FITTED_ON:
        return SpeedError(AREAL.error, OTHER_TRAINERS, source)
    span = math.hypot(OTHER_TRAINERS, ELSEWHERE)
    return SpeedError(ELSEWHERE, span, f"{source}; fitted on other GPUs, ±{ELSEWHERE:.0%}")


FIGURE_6A = {
    # model: GPUs, pipeline stages, tensor parallel, TFLOP/s dynamic (token budget 32,768), and
    # standard (32 micro-batches). The layouts are those of the scaling runs (appendix).
    "R1-Distill-Qwen-1.5B": (8, 2, 1, 427.4, 404.4),
    "R1-Distill-Qwen-7B": (16, 4, 1, 454.7, 303.1),
    "R1-Distill-Qwen-32B": (64, 8, 2, 387.7, 283.0),
}
"""AReaL (arXiv:2505.24298), Figure 6a, per training GPU."""


def areal_counted_flops(lengths: Sequence[int] | NDArray[np.int64], model: ModelShape) -> float:
    """FLOPs of a training pass as AReaL's trainer counts them, about twice those of the model.

    $$ 4 (2 L (4 T h^2 + 2 h \\sum s^2 + 3 T h f) + 4 T V h) $$

    It counts four passes (including recomputation), attention without the causal half, keys as wide
    as queries, and the embedding in addition to the head. So the bars of Figure 6a are utilizations
    of 22 to 27 %, not 39 to 46 %.
    Source: `realhf/base/monitor.py` and `realhf/system/flops_counter.py` of AReaL v0.3 (2025-05).
    """
    sizes = np.asarray(lengths, np.float64)
    tokens, squares = float(sizes.sum()), float((sizes**2).sum())
    hidden, width = model.hidden, model.intermediate
    per_layer = 4 * tokens * hidden**2 + 2 * squares * hidden + 3 * tokens * hidden * width
    return 4 * (2 * model.layers * per_layer + 4 * tokens * model.vocabulary * hidden)


def fit_prime_rl(points: Sequence[PublishedPoint] = PRIME_RL_POINTS) -> tuple[Values, Values]:
    """The coefficients that fit the points best, and the relative error of each point.

    Returns:
        Inverse attention efficiency, hidden traffic, layer seconds, expert traffic, expert layer
        seconds, step seconds, all >= 0; and predicted / measured - 1.
    """
    columns = np.array(
        [fit_columns(p, find_model(p.model), find_gpu(p.gpu)) / p.seconds for p in points]
    )
    known = columns[:, 0] / MATRIX_EFFICIENCY
    free = columns[:, 1:]
    best, least = np.zeros(free.shape[1]), np.inf
    # Few enough coefficients to try every subset of nonzero ones.
    for count in range(1, free.shape[1] + 1):
        for chosen in itertools.combinations(range(free.shape[1]), count):
            some = np.linalg.lstsq(free[:, chosen], 1 - known, rcond=None)[0]
            squares = float(((free[:, chosen] @ some + known - 1) ** 2).sum())
            if (some >= 0).all() and squares < least:
                best, least = np.zeros(free.shape[1]), squares
                best[list(chosen)] = some
    return best, free @ best + known - 1
