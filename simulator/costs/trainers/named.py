"""Trainers by name (`trainer.kind`): coefficients, structure, source and error.

    areal        Megatron-Core 0.11 in AReaL                     slower by one factor; the default
    megatron     Megatron-Core as NeMo-RL runs it                distributed optimizer, overlapped
                 (BENCHMARKED: mixtures as NVIDIA's recipes tune them; not for RL)
    fsdp2        PyTorch's FSDP, not compiled, as verl runs it   gathers parameters for each pass
    prime_rl     FSDP2, compiled, FlashAttention-3               the same; a fixed time per step
    torchtitan   FSDP2, compiled                                 the same

`published.fits` repeats the fits to published steps of pre-training (`data/trainer_steps.csv`), and
errors are those of steps left out of the fit. What a trainer of reinforcement learning adds to such
a step (loading, statistics, uneven experts) is not in them, except for `areal` and `prime_rl`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from simulator.catalogue.gpu import GPU
from simulator.catalogue.transformer import ModelShape
from simulator.config.schema import TrainerConfig, TrainerKind
from simulator.costs.lora.adapters import LORA_ERROR
from simulator.costs.trainer_speeds import (
    AREAL,
    ELSEWHERE,
    FITTED_ON,
    MATRIX_EFFICIENCY,
    PRIME_RL,
    SpeedError,
    speed_error,
)
from simulator.costs.training_speed import TrainerSpeed

_ATTENTION: Final = PRIME_RL.attention_efficiency
"""FlashAttention-3, forward and backward; assumed for the kernel of Transformer Engine too."""
_FLASH_2_ATTENTION: Final = 0.35
"""FlashAttention-2 on an H100: 35 % of the peak, as the abstract of FlashAttention-3 has it
(arXiv:2407.08608)."""
BLACKWELL_EFFICIENCY: Final = 0.5875
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
    expert_layer_s=0.0008963,
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

SPEEDS: Final[Mapping[TrainerKind, TrainerSpeed]] = MappingProxyType(
    {
        "areal": AREAL,
        "megatron": MEGATRON,
        "fsdp2": FSDP2,
        "prime_rl": PRIME_RL,
        "torchtitan": TORCHTITAN,
    }
)
_MEASURED_ON: Final[Mapping[TrainerKind, tuple[str, ...]]] = MappingProxyType(
    {
        "areal": FITTED_ON,
        "megatron": (*FITTED_ON, "GB200"),
        "fsdp2": FITTED_ON,
        "prime_rl": FITTED_ON,
        "torchtitan": (*FITTED_ON, "A100-80"),
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


def measured_on(kind: TrainerKind, gpu: GPU) -> bool:
    """Whether the trainer was measured on this type of GPU, or one like it."""
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
    if not measured_on(config.kind, gpu):
        error = math.hypot(error, ELSEWHERE)
        source += f"; fitted on other GPUs, ±{ELSEWHERE:.0%}"
    return SpeedError(error, error, source)


def expert_imbalance(config: TrainerConfig) -> float:
    """The imbalance of experts that is set, or the assumed one."""
    return ROUTED_IMBALANCE if config.expert_imbalance is None else config.expert_imbalance
