"""Measured times of engines: CPU per decode step, and whole decode steps and prefills.

CPU time of inference engines per decode step, by engine and version.

    seconds = step + sequences x sequence       schedule, prepare inputs, sample, update requests
    a decode step takes the longer of it and the GPU's time if the engine works a step ahead
    (`overlap`), else their sum

Hosts differ as much as engines do: `areal-0.3` is SGLang 0.4.6 on the hosts of AReaL's paper, five
times as slow for one sequence as the same release on Qwen's. Measure it where it matters:
`rollout.engine_overhead_s`.

Engines with measured times: seconds of steps and prefills instead of coefficients.

    decode step   smooth_max(step, sequence B, knee) + context_token C
    prefill       pass + token n + pair (query, key) pairs

with B sequences, C tokens of context over all of them, and n new tokens. They are only valid for
the measured model, GPUs and engine. `areal-lab calibrate` fits them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from simulator.catalogue.gpu import find_gpu
from simulator.catalogue.transformer import ModelShape
from simulator.config.schema import EngineName
from simulator.costs.coefficients import smooth_max
from simulator.stats.format import short_time

if TYPE_CHECKING:
    from simulator.config.schema import SimulationConfig


ENGINE_S = 1.5e-3
"""CPU time of an engine per decode step: schedule, launch, sample, detokenize. Seconds.

Qwen2.5's published speeds of one sequence (`data/published_speeds.csv`: A100, vLLM 0.6.3, whose CPU
and GPU took turns) have 1.6 ms a step over the kernels for the 1.5B model, 1.5 for the 3B, 1.0 for
the 7B. For SGLang 0.4.6, whose CPU works ahead, Qwen3-0.6B's 2.4 ms a step on an H20 is an upper
bound. It grows with the batch and with what else the host does: measure it.
"""

EAGER_LAYER_S: Final = 0.43e-3
"""Seconds to launch the kernels of one layer without CUDA graphs; within a factor of two.

0.26 ms for Llama 3 8B (SGLang pull request 1401, 2024-09: 8.23 ms a step with FlashInfer), 0.40 for
GPT-2 (DeepSpeed pull request 8352, 2026-09: vLLM 4.81 and SGLang 4.88 ms a step on an H200), 0.79
for Qwen2.5-Omni-7B (vllm-omni issue 7960, 2026-09: 22 ms a step); their geometric mean.
"""
EAGER_STATE_LAYER_S: Final = 1.37e-3
"""The same of a layer with a state (linear attention), whose kernels Python launches one by one.

One source: Qwen3.5-9B on 8 H100 (SkyRL, 2026) generates for 310 s up to a cap of 8,192 tokens, so a
step takes 37.8 ms: 24 layers with a state, 8 with attention and the engine's 1.5 ms."""
EAGER_PASS_S: Final = 8e-3
"""Seconds to launch one pass of a draft without CUDA graphs: its layer, the head, and what prepares
attention.

One source: the same run with three drafted tokens of which a step keeps 3.32 generates for 152.4 s,
2.0 times as fast, so a round takes 61.8 ms, 24 ms more than a step without drafts."""
EAGER_ERROR: Final = 0.4
"""Mean absolute relative error of it on these three models."""
SERVED_ON: Final[Mapping[str, float]] = MappingProxyType(dict.fromkeys(("GB200", "GB300"), 1.3))
"""Seconds of decode steps in training runs, relative to kernels and the engine's CPU, by GPU.

GB200: kernels were measured (AIConfigurator), yet runs of NeMo-RL generate 1.3 times as slowly, in
scores of rows that are not shown. Grace's cores, slower than those that the engines' CPU times were
measured on, may be the cause."""
SERVED_STATES: Final = 1.4
"""The same for models with states (linear attention) and CUDA graphs, in scores of rows that are
not shown; released rows of Qwen3.5-35B-A3B (verl, 2026) would have it at 1.9 to 2.1."""


def served_factor(config: SimulationConfig, model: ModelShape) -> float:
    """Factor on decode steps of a run; 1 where they, or a factor on them, were measured."""
    rollout = config.rollout
    if rollout.decode_step_s is not None or rollout.time_factor != 1:
        return 1.0
    factor = SERVED_ON.get(find_gpu(config.cluster.generating_gpu).name, 1.0)
    if model.linear is not None and rollout.cuda_graphs:
        factor *= SERVED_STATES
    return factor


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCPU:
    """CPU seconds of a decode step."""

    step_s: float
    sequence_s: float = 0.0
    """Seconds per running sequence."""
    layer_s: float = 0.0
    """Seconds per layer of the model to launch its kernels, for an engine without CUDA graphs."""
    overlap: bool
    """The CPU prepares the next step while the GPU computes."""
    error: float | None
    """Relative error, of the engine on other hosts; None if unknown."""
    source: str


ENGINES: Final[Mapping[EngineName, EngineCPU]] = MappingProxyType(
    {
        "default": EngineCPU(
            step_s=ENGINE_S,
            overlap=True,
            error=None,
            source="difference between published speeds of one sequence and kernel times",
        ),
        "vllm-0.6": EngineCPU(
            step_s=1.37e-3,
            sequence_s=43e-6,
            overlap=False,
            error=0.5,
            source=(
                "vLLM 0.6, V0 engine: one sequence from Qwen2.5's published speeds (2024-11); per "
                "sequence at most, from 1.7 times the step of V1 at 256 sequences of Llama 3.1 8B "
                "(vLLM blog, 2025-01-27)"
            ),
        ),
        "vllm-0.8": EngineCPU(
            step_s=1.33e-3,
            sequence_s=4e-6,
            overlap=False,
            error=0.5,
            source=(
                "vLLM 0.8 to 0.13, V1 engine: 2.73 ms a step of Llama 3.2 1B less its kernels "
                "(vLLM pull request 17866, 2025-05-08); per sequence BLIS (inference-sim, 2026)"
            ),
        ),
        "vllm-0.14": EngineCPU(
            step_s=1.33e-3,
            sequence_s=4e-6,
            overlap=True,
            error=0.5,
            source=(
                "vLLM 0.14 and later, V1 engine with asynchronous scheduling by default "
                "(2026-01): CPU time as of 0.8, hidden behind the GPU's"
            ),
        ),
        "sglang-0.4": EngineCPU(
            step_s=2.41e-3,
            sequence_s=7e-6,
            overlap=True,
            error=0.5,
            source=(
                "SGLang 0.4.6: at most 2.41 ms for one sequence (Qwen3-0.6B on an H20, 2025-05); "
                "per sequence AReaL's batched generation"
            ),
        ),
        "sglang-0.5": EngineCPU(
            step_s=2.41e-3,
            sequence_s=7e-6,
            overlap=True,
            error=0.5,
            source="SGLang 0.5: no number of its own; those of 0.4.6, an upper bound",
        ),
        "areal-0.3": EngineCPU(
            step_s=12.2e-3,
            sequence_s=7.1e-6,
            overlap=True,
            error=0.17,
            source=(
                "SGLang 0.4.6 as AReaL ran it: the batched-generation curve of its article "
                "(2025-06), 8,192 responses on 64 and 128 GPUs at 623,000 and 646,000 tokens/s; "
                "its Table 1 implies 14.25 ms"
            ),
        ),
        "embedded": EngineCPU(
            step_s=0.5e-3,
            sequence_s=9e-6,
            layer_s=0.3e-3,
            overlap=False,
            error=0.5,
            source=(
                "reckoned from operation counts, not measured on a GPU: 43 operations a layer and "
                "47 besides at 7 us each, and the scheduler's Python, 0.16 ms a step and 9 us a "
                "sequence on a CPU core (2026-11); rows of equal length"
            ),
        ),
    }
)
"""Engines by `rollout.engine`."""


GIVEN = "given by the user"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDecode:
    """Measured decode steps."""

    step_s: float
    """Seconds per step, for any batch: reading weights, launching kernels, the engine's CPU."""
    sequence_s: float = 0.0
    """Seconds per sequence of the step."""
    context_token_s: float = 0.0
    """Seconds per token of context."""
    knee: float = 1.0
    """p of `smooth_max` between the first two; 1 gives their sum."""
    error: float = 0.0
    """Mean absolute relative error on steps that the fit has not seen; 0 if unknown."""
    source: str = GIVEN

    def __post_init__(self) -> None:
        _check(self, "measured decode")
        if self.step_s == 0:
            raise ValueError("step_s of a measured decode step is 0, but must be a number > 0")
        if self.knee < 1:
            raise ValueError(f"knee of a measured decode step is {self.knee}, but must be >= 1")

    def base_s(self, sequences: float) -> float:
        """Seconds of a step without reading context."""
        return smooth_max(self.step_s, self.sequence_s * sequences, self.knee)

    @property
    def provenance(self) -> str:
        """Source of the numbers, for reports."""
        if self.sequence_s == self.context_token_s == 0:
            return f"a measured step of {self.step_s:g} s, {self.source}"
        return (
            f"measured: {short_time(self.step_s)} per step, {short_time(self.sequence_s)} per "
            f"sequence, {short_time(self.context_token_s)} per token of context; "
            f"{self.source}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPrefill:
    """Measured prefills: of prompts, and of contexts that an interruption discarded."""

    pass_s: float
    """Seconds per prefill, for any number of tokens."""
    token_s: float = 0.0
    """Seconds per new token."""
    pair_s: float = 0.0
    """Seconds per (query, key) pair of attention."""
    slowdown: float = 1.0
    """Factor on all times of this engine, for stragglers."""
    error: float = 0.0
    """See `MeasuredDecode.error`."""
    source: str = GIVEN

    def __post_init__(self) -> None:
        _check(self, "measured prefill")

    def seconds(self, new_tokens: int, pairs: float) -> float:
        """Seconds of a prefill; 0 without tokens."""
        if new_tokens <= 0:
            return 0.0
        read_s = self.pass_s + self.token_s * new_tokens + self.pair_s * pairs
        return self.slowdown * read_s

    @property
    def provenance(self) -> str:
        """Source of the numbers, for reports."""
        return (
            f"measured: {short_time(self.pass_s)} per prefill, {short_time(self.token_s)} per "
            f"token, {short_time(self.pair_s)} per pair of attention; {self.source}"
        )


def measured_decode(config: SimulationConfig) -> MeasuredDecode | None:
    """The decode steps given in a config; None if the cost model computes them."""
    rollout, calibration = config.rollout, config.calibration
    if rollout.decode_step_s is None:
        return None
    return MeasuredDecode(
        step_s=rollout.decode_step_s,
        sequence_s=rollout.decode_sequence_s,
        context_token_s=rollout.decode_context_token_s,
        knee=rollout.decode_knee,
        error=calibration.decode_error,
        source=calibration.source or GIVEN,
    )


def measured_prefill(config: SimulationConfig, slowdown: float = 1.0) -> MeasuredPrefill | None:
    """The prefills given in a config; None if the cost model computes them."""
    rollout, calibration = config.rollout, config.calibration
    if rollout.prefill_pass_s is None:
        return None
    return MeasuredPrefill(
        pass_s=rollout.prefill_pass_s,
        token_s=rollout.prefill_token_s,
        pair_s=rollout.prefill_pair_s,
        slowdown=slowdown,
        error=calibration.prefill_error,
        source=calibration.source or GIVEN,
    )


def _check(record: MeasuredDecode | MeasuredPrefill, what: str) -> None:
    for one in fields(record):
        value = getattr(record, one.name)
        if isinstance(value, int | float) and (
            value < 0 or math.isnan(value) or (math.isinf(value) and one.name != "knee")
        ):
            raise ValueError(f"{one.name} of a {what} is {value}, but must be a number >= 0")
