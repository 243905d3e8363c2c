"""Coefficients of every GPU: fitted, taken from a related GPU, or typical and uncertain.

H100, H200, A100-80              fitted to kernels measured on them
H800, H100-PCIe, A100-40         of a related GPU, with their own bandwidths
H20                              weight reading fitted to published speeds of one sequence
all others, and custom GPUs      data sheet with typical efficiencies: +-30 to 50 %
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from simulator.catalogue.gpu import GPU
from simulator.costs.coefficients import KernelCoefficients, LinkCoefficients, fitted_coefficients

RELATIVES: Mapping[str, tuple[str, float, str]] = MappingProxyType(
    {
        "H800": ("H100", 0.0, "the same chip and memory; its slower NVLink was not measured"),
        "H100-PCIe": ("H100", 0.15, "fewer units, slower memory, no NVLink"),
        "A100-40": ("A100-80", 0.1, "slower memory"),
    }
)
"""By GPU: the related GPU, the least error, and why its coefficients apply."""

UNCERTAINTY: Mapping[str, float] = MappingProxyType(
    {
        **dict.fromkeys(("B200", "GB200", "B300", "GB300"), 0.3),
        **dict.fromkeys(("L40S", "RTX-4090", "RTX-5090"), 0.4),
    }
)
"""Error of the typical coefficients; 0.5 for all others, which run different kernels.

A serving simulator fitted to the H100 alone (BLIS, inference-sim, 2026) missed an unseen A100 by
16 % and an unseen L40S by 13 % end to end; the errors here are larger.
"""

MATRIX_EFFICIENCY = 0.75
"""Share of the peak that large matrix products reach. Published best shapes: 794 of 989 TFLOP/s on
the H100 (fitted here: 0.751), 1,745 of 2,250 on the B200, 1,822 of 2,500 on the GB200, and 1,769 of
2,250 on the B300 (S. Bekman, ml-engineering, as quoted on 2026-08-17)."""

MATRIX_EFFICIENCIES: Mapping[str, tuple[float, str]] = MappingProxyType(
    {
        "MI300X": (
            0.5,
            "708 of 1,307 TFLOP/s for the best shape (AMD, 2025-02), 45 % of the peak in "
            "arXiv:2510.27583 (2025-10)",
        ),
        "MI325X": (
            0.55,
            "831 of 1,307 TFLOP/s for the best shape, 616 for those of DeepSeek-V3 (AMD, "
            "2026-10-06)",
        ),
        "MI355X": (
            0.55,
            "as the MI325X; unverified: 1,610 of 2,517 TFLOP/s for the best shape (HipKittens, "
            "2025)",
        ),
        "TPU-v6e": (MATRIX_EFFICIENCY, "689 of 918 TFLOP/s (yangwhale/gpu-tpu-pedia, 2026-02-09)"),
        "TPU7x": (
            MATRIX_EFFICIENCY,
            "1,517 of 2,307 TFLOP/s with the host's time, above 90 % without it "
            "(yangwhale/gpu-tpu-pedia, 2026-02-10)",
        ),
    }
)
"""By accelerator with published matrix products: their share of the peak, and the source.

AMD's chips lower their clock under load: their peak is that of a clock that they do not keep. The
share is between the best shape and the shapes of a model."""

ATTENTION_SHARE = 0.55 / 0.75
"""Speed of attention in prefill, as a fraction of that of large matrix products."""

H20_WEIGHT_READING = 2.72
H20_LAYER_S = 60e-6
"""Least squares on Qwen3's five published speeds of a single sequence
(`data/published_speeds.csv`): step = e_w * weights / bandwidth + e_L * layers, mean error 3.2 %; a
test repeats the fit."""


def reached_share(gpu: GPU) -> float:
    """Speed of large matrix products, as a share of the peak, relative to that of most GPUs."""
    efficiency, _ = MATRIX_EFFICIENCIES.get(gpu.name, (MATRIX_EFFICIENCY, ""))
    return efficiency / MATRIX_EFFICIENCY


@cache
def kernel_coefficients(gpu: GPU) -> KernelCoefficients:
    """Coefficients of a GPU: fitted, of a related GPU, or typical with a large error."""
    fitted = fitted_coefficients()
    if gpu.name in fitted:
        return fitted[gpu.name]
    if gpu.name in RELATIVES:
        relative, least_error, why = RELATIVES[gpu.name]
        known = fitted[relative]
        return dataclasses.replace(
            known,
            decode_error=max(known.decode_error, least_error),
            prefill_error=max(known.prefill_error, least_error),
            provenance=f"like the {relative} ({why}): {known.provenance}",
            fitted=False,
        )
    typical = _typical(gpu.name, UNCERTAINTY.get(gpu.name, 0.5))
    if gpu.name != "H20":
        return typical
    return dataclasses.replace(
        typical,
        weight_reading=H20_WEIGHT_READING,
        layer_s=H20_LAYER_S,
        decode_error=0.3,
        prefill_error=0.3,
        provenance=(
            "weight reading fitted to Qwen3's published speeds on one H20 (SGLang 0.4.6.post1, one "
            "sequence, 2025-05), a third of the peak bandwidth because it has few compute units; "
            "everything else, and larger batches, from the data sheet with typical efficiencies: "
            "+-30 %"
        ),
    )


def _typical(name: str, error: float) -> KernelCoefficients:
    """Rounded coefficients of A100, H100 and H200, for a GPU without measurements."""
    efficiency, measured = MATRIX_EFFICIENCIES.get(name, (MATRIX_EFFICIENCY, ""))
    known = f"matrix products: {measured}; nothing else was measured" if measured else ""
    return KernelCoefficients(
        weight_reading=1.25,
        cache_reading=1.4,
        layer_s=45e-6,
        sequence_s=2e-6,
        matrix_efficiency=efficiency,
        knee=2.4,
        attention_efficiency=ATTENTION_SHARE * efficiency,
        activation_traffic=1.6,
        prefill_layer_s=45e-6,
        links=LinkCoefficients(
            latency_s=4e-6,
            hop_s=0.15e-6,
            one_shot_efficiency=0.6,
            ring_latency_s=6e-6,
            ring_hop_s=0.6e-6,
            ring_efficiency=0.7,
            error=error,
            nccl_latency_s=7e-6,
            nccl_hop_s=0.9e-6,
            nccl_ramp_s=30e-6,
            nccl_ramp_bytes=5e6,
            nccl_efficiency=0.7,
            nccl_error=error,
        ),
        decode_error=error,
        prefill_error=error,
        provenance=(
            f"data sheet of the {name} with efficiencies typical of A100, H100 and H200; "
            f"{known or 'no measurements'}: +-{error:.0%}"
        ),
        fitted=False,
    )
