"""Speed of a trainer: FLOPs, memory traffic and kernel launches of one pass.

    seconds of a pass = slowdown x (  matrix FLOPs / (matrix_efficiency x peak)
                                    + attention FLOPs / (attention_efficiency x peak)
                                    + hidden_traffic x tokens x layers x hidden bytes / bandwidth
                                    + layer_s x layers                                          )

A training step makes four passes with activation recompute (forward, forward again, and a backward
pass that counts twice), three without. Utilization is not an input: it follows from the tokens of a
micro-batch (which share launches), the width of the model (traffic grows with it, FLOPs with its
square) and the lengths (attention), and is low if any of them is small.

FLOPs are those of the model: 2 per parameter and token (without the input embedding), plus causal
attention (half of the square). Many trainers count differently; see `areal_counted_flops`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from simulator.catalogue.gpu import GPU
from simulator.catalogue.transformer import ModelShape
from simulator.costs.coefficients import attention_flops, pair_flops, reached_share, states_s

Values = NDArray[np.float64]
ExpertCosts: TypeAlias = Literal["layer", "grouped"]
Dispatch: TypeAlias = Literal["copies", "ranks"]

BYTES_PER_NUMBER = 2
"""bf16 and fp16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpeed:
    """Coefficients of one trainer."""

    name: str
    matrix_efficiency: float
    """Share of peak FLOP/s that large matrix products reach."""
    attention_efficiency: float
    """Share of peak FLOP/s of causal attention, forward and backward together."""
    hidden_traffic: float
    """Reads or writes of a hidden vector per token, layer and pass: norms, activations, residuals,
    the MLP's intermediate values, and the head's share."""
    layer_s: float
    """Seconds per layer and pass, for any number of tokens: launches, gathering of sharded
    weights."""
    expert_traffic: float
    """Like `hidden_traffic`, for every expert that a token of a mixture uses."""
    expert_layer_s: float
    """Like `layer_s`, in addition, for a layer with experts."""
    step_s: float
    """Seconds per optimizer step, for any number of tokens: statistics, logging."""
    slowdown: float = 1.0
    """Factor on all times, relative to the trainer that the other coefficients were fitted to."""
    fp8_speedup: float = 1.0
    """Time of a layer's matrix products in bf16 / that in fp8, conversions included."""
    gathers: bool = False
    """Parameters are sharded and gathered for every pass (FSDP), during the previous pass."""
    overlaps: bool = False
    """Gradients are reduced, and parameters gathered, while the last micro-batch computes."""
    exchange_share: float = 1.0
    """Share of the exchanges inside layers (tensor, context parallelism) that no work hides."""
    exchanges_like_flops: bool = False
    """Count exchanges inside layers like FLOPs, twice in a backward pass. They are as many as in
    the forward pass; but AReaL's factor was fitted with the double count."""
    head_is_shared: bool = False
    """Divide the head among pipeline stages like the layers. It is all in the last stage, which
    the others wait for; but AReaL's factor was fitted without."""
    pads_pipelines: bool = False
    """With pipeline stages, pad micro-batches to the longest of the batch: stages exchange tensors
    of one shape."""
    pipeline_micro_batches: int = 1
    """Fewest micro-batches per pipeline stage."""
    experts: ExpertCosts = "layer"
    """`layer`: `expert_layer_s` is the time to gather or read the experts of a layer, which their
    shards divide. `grouped`: grouped products read the experts that a GPU holds; `expert_layer_s`
    is the time of launches."""
    dispatch: Dispatch = "copies"
    """A token is sent to each of its experts (`copies`: NCCL's all-to-all), or once to each GPU
    that holds some of them (`ranks`: DeepEP, HybridEP)."""
    gradient_bytes: int = 4
    """Bytes of an accumulated gradient."""
    reference_on_host: bool = False
    """A reference model is kept in the host's memory, and changes places with the policy for its
    pass."""
    error: float
    """Mean absolute relative error of the seconds, on the points used for the fit."""
    mixture_error: float | None = None
    """Error for mixtures of experts; None if it is equal."""
    provenance: str

    def __post_init__(self) -> None:
        for name in ("matrix_efficiency", "attention_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, but must be in (0, 1]: a share of the peak"
                )
        for name in ("hidden_traffic", "layer_s", "expert_traffic", "expert_layer_s", "step_s"):
            if not 0 <= getattr(self, name) < np.inf:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be >= 0")
        if not 1 <= self.fp8_speedup <= 2 or not 0 <= self.exchange_share <= 1:
            raise ValueError(
                f"fp8_speedup is {self.fp8_speedup} and exchange_share {self.exchange_share}, but "
                "must be in [1, 2] and in [0, 1]"
            )
        if not 0 < self.slowdown < np.inf:
            raise ValueError(f"slowdown is {self.slowdown}, but must be > 0; 1 means none")


def forward_flops(
    tokens: float | Values, pairs: float | Values, model: ModelShape
) -> float | Values:
    """FLOPs of a forward pass; a backward pass has twice as many.

    Args:
        pairs: (token, attended token) pairs, including itself: s (s + 1) / 2 for a sequence of s.
    """
    return model.linear_flops_per_token() * tokens + attention_flops(model, tokens, pairs)


def pass_s(
    tokens: float | Values, pairs: float | Values, model: ModelShape, gpu: GPU, speed: TrainerSpeed
) -> tuple[float | Values, float]:
    """Seconds of a forward pass through the whole model on one GPU, in two parts.

    Returns:
        The part that tensor and pipeline parallelism both divide; and the part that only pipeline
        parallelism divides, because each GPU launches the kernels of all its layers.
    """
    traffic = model.layers * speed.hidden_traffic
    traffic += model.moe_layers * model.active_experts * speed.expert_traffic
    peak = gpu.flops_per_s * reached_share(gpu)
    shared = (
        model.linear_flops_per_token() * tokens / (speed.matrix_efficiency * peak)
        + pair_flops(model, tokens, pairs) / (speed.attention_efficiency * peak)
        + traffic * model.hidden * BYTES_PER_NUMBER * tokens / gpu.memory_bytes_per_s
    )
    if model.linear is not None:
        shared = shared + states_s(model, tokens, peak)
    launches = model.layers * speed.layer_s + model.moe_layers * speed.expert_layer_s
    return speed.slowdown * shared, speed.slowdown * launches


# --- published measurements ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPoint:
    """One optimizer step of a trainer's own benchmark: `micro_batches` of one sequence each."""

    name: str
    model: str
    gpu: str
    sequence_tokens: int
    micro_batches: int
    """Micro-batches per GPU; all with activation recompute."""
    seconds: float
    statistics: bool
    """True if the step computes RL statistics (`TrainerSpeed.step_s`)."""


_PRIME_RL = (
    ("Qwen3-0.6B", "H100", 8_192, 0.62251, False),
    ("Qwen3-0.6B", "H100", 16_384, 1.28193, False),
    ("Qwen3-0.6B", "H100", 16_384, 1.99233, True),
    ("Qwen3-0.6B", "H100", 65_536, 12.17555, True),
    ("Qwen3-4B", "H100", 16_384, 4.68767, True),
    ("Qwen3-4B", "H100", 65_536, 30.28633, True),
    ("Qwen3-4B", "H200", 16_384, 4.41544, True),
    ("Qwen3-4B", "H200", 65_536, 29.88920, True),
    ("Qwen3-30B-A3B", "H100", 16_384, 8.17390, True),
    ("Qwen3-30B-A3B", "H200", 16_384, 7.40125, True),
    ("Qwen3-30B-A3B", "H200", 65_536, 42.89129, True),
    ("Qwen3-30B-A3B", "H200", 16_384, 7.17317, False),
)
PRIME_RL_POINTS = tuple(
    PublishedPoint(
        name=f"{model}, {gpu}, {tokens // 1024}k, {'RL' if statistics else 'SFT'}",
        model=model,
        gpu=gpu,
        sequence_tokens=tokens,
        micro_batches=2,
        seconds=seconds,
        statistics=statistics,
    )
    for model, gpu, tokens, seconds, statistics in _PRIME_RL
)
"""Mean `step_time` of prime-rl's benchmark files, full fine-tuning with recompute and
FlashAttention-3 (`benchmarks/baselines/`, 2026-01-15, Apache-2.0), 8 GPUs, 0.6B on one.

The utilization on that page is lower, 2.9 to 35 %: it divides by the time from one step to the
next, which is 0.75 s (0.6B), 5.4 to 5.9 s (4B) and 35 s (30B) longer for any number of tokens. This
is proportional to the parameters (1.4 to 1.8 GB/s of weights): most likely their export, which
`weight_sync` accounts for. It also counts attention as 12 x layers x hidden x length.
"""


def fit_columns(point: PublishedPoint, model: ModelShape, gpu: GPU) -> Values:
    """Seconds of a point per unit of each coefficient (for efficiencies: of their inverse)."""
    tokens = point.sequence_tokens
    unit = 4.0 * point.micro_batches
    hidden_s = model.hidden * BYTES_PER_NUMBER * tokens / gpu.memory_bytes_per_s
    attention = model.attention_flops(1) * tokens * (tokens + 1) / 2
    return np.array(
        [
            unit * model.linear_flops_per_token() * tokens / gpu.flops_per_s,
            unit * attention / gpu.flops_per_s,
            unit * model.layers * hidden_s,
            unit * model.layers,
            unit * model.moe_layers * model.active_experts * hidden_s,
            unit * model.moe_layers,
            float(point.statistics),
        ]
    )
