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
    {"B200": 0.3, "GB200": 0.3, "L40S": 0.4, "RTX-4090": 0.4, "RTX-5090": 0.4}
)
"""Error of the typical coefficients; 0.5 for all others, which run different kernels.

A serving simulator fitted to the H100 alone (BLIS, inference-sim, 2026) missed an unseen A100 by
16 % and an unseen L40S by 13 % end to end; the errors here are larger.
"""

H20_WEIGHT_READING = 2.72
H20_LAYER_S = 60e-6
"""Least squares on Qwen3's five published speeds of a single sequence
(`data/published_speeds.csv`): step = e_w * weights / bandwidth + e_L * layers, mean error 3.2 %; a
test repeats the fit."""


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
    return KernelCoefficients(
        weight_reading=1.25,
        cache_reading=1.4,
        layer_s=45e-6,
        sequence_s=2e-6,
        matrix_efficiency=0.75,
        knee=2.4,
        attention_efficiency=0.55,
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
            f"data sheet of the {name} with efficiencies typical of A100, H100 and H200; no "
            f"measurements: +-{error:.0%}"
        ),
        fitted=False,
    )
