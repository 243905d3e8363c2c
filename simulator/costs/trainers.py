"""Speeds of known trainers: coefficients fitted to published measurements, and the default.

    PRIME_RL   12 optimizer steps of its benchmark (0.6B, 4B, 30B-A3B on H100 and H200)   2.3 % off
    AREAL      the same with one factor, fitted to the dynamic row of the paper's Figure 6a  4.6 %

The default is AREAL, the slower one. Neither was measured on other GPUs, which get the efficiencies
of an H100 with an error of about +-30 %; there, set `trainer.mfu` or `trainer.step_s`. A trainer
that is not one of the named ones (`trainers.named`) may differ from AREAL as much as these two
differ from each other, by a factor of 1.42.

Trainers by name (`trainer.kind`): coefficients, structure, source and error.

    areal        Megatron-Core 0.11 in AReaL                     slower by one factor; the default
    megatron     Megatron-Core as NeMo-RL runs it                distributed optimizer, overlapped
                 (BENCHMARKED: mixtures as NVIDIA's recipes tune them; not for RL)
    fsdp2        PyTorch's FSDP, not compiled, as verl runs it   gathers parameters for each pass
    prime_rl     FSDP2, compiled, FlashAttention-3               the same; a fixed time per step
    torchtitan   FSDP2, compiled                                 the same
    areal_lab    this library's own, FSDP2 and eager             the same; reckoned, not measured

`published.fits` repeats the fits to published steps of pre-training (`data/trainer_steps.csv`), and
errors are those of steps left out of the fit. What a trainer of reinforcement learning adds to such
a step (loading, statistics, uneven experts) is not in them, except for `areal` and `prime_rl`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.catalogue.gpu import GPU, find_gpu
from simulator.catalogue.models import find_model
from simulator.catalogue.transformer import ModelShape
from simulator.config.schema import TrainerConfig, TrainerKind
from simulator.costs.training_speed import (
    BYTES_PER_NUMBER,
    PRIME_RL_POINTS,
    PublishedPoint,
    TrainerSpeed,
    fit_columns,
)
from simulator.costs.weight_bytes import LORA_ERROR

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


_ATTENTION: Final = PRIME_RL.attention_efficiency
"""FlashAttention-3, forward and backward; assumed for the kernel of Transformer Engine too."""
_FLASH_2_ATTENTION: Final = 0.35
"""FlashAttention-2 on an H100: 35 % of the peak, as the abstract of FlashAttention-3 has it
(arXiv:2407.08608)."""
BLACKWELL_EFFICIENCY: Final = 0.5907
"""Share of the peak that products reach in training on a GB200; fitted with the mixtures
(`published.fits.fit_mixtures`), and taken for the B200."""
H20_EFFICIENCY: Final = 0.91
H20_ATTENTION: Final = 0.76
"""Shares of the peak that an H20 reaches, which has few compute units for its bandwidth and power.

Large products: DeepGEMM in fp8 with at least 4,096 rows reaches 0.83 to 0.95 for most shapes;
assumed for bf16. FlashAttention-3 in bf16: forward 0.89 at 8,192 tokens, times 0.85 for both
directions, as on the H100. Source: alibaba/InferSim, bench_data (2025).
"""
_ON_OTHER_GPUS: Final[Mapping[str, Mapping[str, float]]] = MappingProxyType(
    {
        "GB200": {"matrix_efficiency": BLACKWELL_EFFICIENCY},
        "B200": {"matrix_efficiency": BLACKWELL_EFFICIENCY},
        "H20": {"matrix_efficiency": H20_EFFICIENCY, "attention_efficiency": H20_ATTENTION},
    }
)
"""Efficiencies other than those of an H100."""
ROUTED_IMBALANCE: Final = 1.5
"""Tokens of the busiest GPU's experts, relative to the mean, with a router that nothing balances.

Balancing the experts of DeepSeek-V3 over 32 GPUs made prefill 1.49 times as fast (LMSYS,
"Deploying DeepSeek with PD disaggregation and large-scale expert parallelism", 2025-05-05). Higher
for a router at the start of training: 2.3 to 2.4 on 8 GPUs, which four published pairs of steps
with forced and with free routing imply (`published.routing`, 2025).
"""

MEGATRON = TrainerSpeed(
    name="Megatron-Core",
    matrix_efficiency=MATRIX_EFFICIENCY,
    attention_efficiency=_ATTENTION,
    hidden_traffic=89.95,
    layer_s=0.0,
    expert_traffic=0.0,
    expert_layer_s=0.003162,
    step_s=0.0,
    fp8_speedup=1.765,
    overlaps=True,
    pads_pipelines=True,
    experts="grouped",
    gradient_bytes=2,
    reference_on_host=True,
    error=0.064,
    mixture_error=0.076,
    provenance=(
        "Megatron-Core: hidden traffic fitted to 8 steps of NVIDIA's benchmark recipes on H100 (8B "
        "to 405B, 2024-11 to 2025-03), experts to 3 steps of mixtures on H800 and B200 that "
        "nothing was tuned for (2025-08), products from kernel tables"
    ),
)
"""`expert_layer_s` is 3.5 times that of `BENCHMARKED`: the host launches some hundred kernels for a
layer with experts and waits for the numbers of tokens in between, whatever the tokens.

NeMo-RL pads packed micro-batches to the longest of the batch if there are pipeline stages
(`_get_pack_sequence_parameters_for_megatron` of nemo_rl/models/megatron/data.py, read 2026-11). It
does not overlap tensor-parallel messages, sends tokens by NCCL's all-to-all, and swaps
the reference in (`use_reference_model` of its policy workers, read 2026-11)."""
BENCHMARKED = dataclasses.replace(
    MEGATRON,
    dispatch="ranks",
    expert_layer_s=0.0008919,
    mixture_error=0.128,
    provenance=(
        "Megatron-Core as NVIDIA's recipes for mixtures tune it: DeepEP or HybridEP, CUDA graphs, "
        "fused permutations, balanced experts; fitted to 9 steps on H100 and GB200 (2025-07 to "
        "2026-07)"
    ),
)
FSDP2 = TrainerSpeed(
    name="FSDP2",
    matrix_efficiency=MATRIX_EFFICIENCY,
    attention_efficiency=_FLASH_2_ATTENTION,
    hidden_traffic=143.3,
    layer_s=0.0,
    expert_traffic=BENCHMARKED.expert_traffic,
    expert_layer_s=BENCHMARKED.expert_layer_s,
    step_s=0.0,
    fp8_speedup=MEGATRON.fp8_speedup,
    gathers=True,
    overlaps=True,
    experts="grouped",
    error=0.099,
    mixture_error=0.35,
    provenance=(
        "eager FSDP: hidden traffic fitted to 20 steps on H100 (llm-foundry 2023, 760M to 70B; "
        "torchtitan without compilation, 2024-12), attention of FlashAttention-2; verl itself was "
        "not measured"
    ),
)
"""Mixtures take the experts of `BENCHMARKED`; the only published step of FSDP2 (NeMo AutoModel,
2025-10, with its own kernels) takes a quarter less: predicted / measured is 1.35."""
STREAMED_CALL_S: Final = 6.9
"""Seconds of a call of verl's trainer, of which a batch in parts has several.

Of three runs that differ in the parts of a batch alone, 181.1, 128.1 and 95.1 s of update in 16, 8
and 4 parts (verl, Qwen2.5-Math-7B on 64 + 64 H20, 2026): the slope of their line, beside the
simulated passes, is 6.7 to 8 s. One family of one system; its causes (batches sent between
processes, metrics, state moved in and out) were not told apart."""
STREAMED_TIME: Final = 0.56
"""Passes of verl's streamed trainer (`schedule.require_batches`), relative to those of its
synchronous and one-step trainers on the same samples.

The synchronous trainer took 2.0 times the GPU-seconds of the streamed one on the same samples,
twice (verl, 128 and 16 H20). Without their calls, and beside what the simulated layouts explain,
1.57 and 2.03: the inverse of the geometric mean. The one-step trainer, which is not streamed, took
1.1. What differs is not stated; a trainer that keeps its state on its GPUs, apart from engines, is
the likely part. Within a factor of 1.15."""
TORCHTITAN = dataclasses.replace(
    FSDP2,
    name="torchtitan",
    attention_efficiency=_ATTENTION,
    hidden_traffic=163.2,
    error=0.026,
    provenance=(
        "compiled FSDP2: hidden traffic fitted to 7 steps of torchtitan on H100 and A100 (8B to "
        "70B, 2024 to 2025-09)"
    ),
)

RECKONED: Final = "reckoned from operation counts, not measured"
_LAYER_BYTES: Final = 1.09e6
"""Bytes that operations other than products read and write, for a token in a layer of the 1.5B
model, forward and backward: 162 launches, counted on tensors without values (2026-11)."""
_LOGIT_BYTES: Final = 64
"""The same for a logit: 36 forward and 28 backward."""
_COUNTED_HIDDEN, _COUNTED_LAYERS, _COUNTED_VOCABULARY = 1536, 28, 151936
AREAL_LAB = dataclasses.replace(
    FSDP2,
    name="areal_lab",
    hidden_traffic=round(
        (_LAYER_BYTES + _LOGIT_BYTES * _COUNTED_VOCABULARY / _COUNTED_LAYERS)
        / (3 * BYTES_PER_NUMBER * _COUNTED_HIDDEN),
        1,
    ),
    fp8_speedup=1.0,
    error=0.4,
    mixture_error=None,
    provenance=(
        f"{RECKONED}: 1.09 MB per token and layer of a 1.5B model and 64 bytes per logit, forward "
        "and backward (eager, float32 residual stream, 2026-11), as three passes; products from "
        "kernel tables, attention of FlashAttention-2; a day on a GPU replaces it "
        "(calibrate --gpu-day)"
    ),
)
"""This library's trainer on one GPU. Its 162 launches a layer take less than the layer's work where
a micro-batch has thousands of tokens, so there is no time per layer. Whoever trains with
`actor.compile`, or in bf16, has less traffic."""

SPEEDS: Final[Mapping[TrainerKind, TrainerSpeed]] = MappingProxyType(
    {
        "areal": AREAL,
        "megatron": MEGATRON,
        "fsdp2": FSDP2,
        "prime_rl": PRIME_RL,
        "torchtitan": TORCHTITAN,
        "areal_lab": AREAL_LAB,
    }
)
_MEASURED_ON: Final[Mapping[TrainerKind, tuple[str, ...]]] = MappingProxyType(
    {
        "areal": FITTED_ON,
        "megatron": (*FITTED_ON, "GB200"),
        "fsdp2": FITTED_ON,
        "prime_rl": FITTED_ON,
        "torchtitan": (*FITTED_ON, "A100-80"),
        "areal_lab": (),
    }
)
"""GPUs on which each was measured, and those that differ from them only in memory or links."""


def speed_of(kind: TrainerKind, gpu: GPU) -> TrainerSpeed:
    """The speed of a named trainer on a type of GPU."""
    speed = SPEEDS[kind]
    if kind == "areal" or gpu.name not in _ON_OTHER_GPUS:
        return speed
    changed: dict[str, Any] = dict(_ON_OTHER_GPUS[gpu.name])
    return dataclasses.replace(speed, **changed)


DENSE_IN_RUNS: Final[Mapping[str, float]] = MappingProxyType(dict.fromkeys(("GB200", "GB300"), 1.3))
"""Passes of dense models in training runs, relative to NVIDIA's recipes for pre-training, by GPU: a
factor of 1.2 to 1.45 corrects two runs of NeMo-RL on GB200, in scores of rows that are not shown.
Mixtures do not need it in the released row whose training is nearly all of the step."""


def slowed_in_runs(speed: TrainerSpeed, gpu: GPU, model: ModelShape) -> TrainerSpeed:
    """The speed of a trainer in a run of reinforcement learning."""
    factor = 1.0 if model.experts else DENSE_IN_RUNS.get(gpu.name, 1.0)
    return dataclasses.replace(speed, slowdown=factor * speed.slowdown) if factor != 1 else speed


def measured_on(kind: TrainerKind, gpu: GPU) -> bool:
    """Return whether the trainer was measured on this type of GPU, or one like it."""
    return gpu.name in _MEASURED_ON[kind]


def trainer_error(config: TrainerConfig, gpu: GPU, model: ModelShape) -> SpeedError:
    """Error of a named trainer's speed; of the default, also how much others may differ."""
    if config.lora_rank:
        known = trainer_error(config.model_copy(update={"lora_rank": 0}), gpu, model)
        said = f"{known.source}; at least {LORA_ERROR:.0%} with adapters"
        error, span = max(LORA_ERROR, known.error), max(LORA_ERROR, known.span)
        return SpeedError(error, span, said)
    if config.kind == "areal":
        return speed_error(gpu)
    speed = SPEEDS[config.kind]
    error, source = speed.error, f"steps that the fit of {speed.name} left out"
    if model.experts and speed.mixture_error is not None:
        error, source = speed.mixture_error, f"mixtures that the fit of {speed.name} left out"
    if not _MEASURED_ON[config.kind]:
        return SpeedError(error, error, speed.provenance)
    if not measured_on(config.kind, gpu):
        error = math.hypot(error, ELSEWHERE)
        source += f"; fitted on other GPUs, ±{ELSEWHERE:.0%}"
    return SpeedError(error, error, source)


def expert_imbalance(config: TrainerConfig) -> float:
    """The imbalance of experts that is set, or the assumed one."""
    return ROUTED_IMBALANCE if config.expert_imbalance is None else config.expert_imbalance
