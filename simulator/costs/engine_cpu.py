"""CPU time of inference engines per decode step, by engine and version.

    seconds = step + sequences x sequence       schedule, prepare inputs, sample, update requests
    a decode step takes the longer of it and the GPU's time if the engine works a step ahead
    (`overlap`), else their sum

Hosts differ as much as engines do: `areal-0.3` is SGLang 0.4.6 on the hosts of AReaL's paper, five
times as slow for one sequence as the same release on Qwen's. Measure it where it matters:
`rollout.engine_overhead_s`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from simulator.config.schema import EngineName

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
EAGER_ERROR: Final = 0.4
"""Mean absolute relative error of it on these three models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCPU:
    """CPU seconds of a decode step."""

    step_s: float
    sequence_s: float = 0.0
    """Per running sequence."""
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
    }
)
"""By `rollout.engine`."""
