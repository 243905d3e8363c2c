"""Peak FLOP/s of dense fp8 matrix products, by GPU; those without fp8 units have none.

All of these units multiply fp8 twice as fast as bf16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from simulator.catalogue.entries import aiconfigurator
from simulator.catalogue.gpu import GPU

_NONE: Final = "no fp8 matrix units before Ada and Hopper: NVIDIA A100 data sheet (2021)"
_NVIDIA: Final = (
    f"{aiconfigurator('b200_sxm')}, likewise h100_sxm, h100_pcie, h200_sxm, b300_sxm, gb200, "
    "gb300 and l40s: twice the bf16 peak, within 1.3 %"
)
_AMD: Final = "unverified: AMD Instinct data sheets (2023 to 2025): twice the bf16 peak"

_FACTORS: Final[Mapping[str, tuple[float, str]]] = MappingProxyType(
    {
        **dict.fromkeys(("A100-40", "A100-80"), (0.0, _NONE)),
        **dict.fromkeys(
            (
                *("H100", "H100-PCIe", "H200", "B200", "GB200", "B300", "GB300", "L40S"),
                *("H800", "H20"),
            ),
            (2.0, _NVIDIA),
        ),
        **dict.fromkeys(("MI300X", "MI325X", "MI355X"), (2.0, _AMD)),
        **dict.fromkeys(
            ("RTX-4090", "RTX-5090"),
            (2.0, "unverified: NVIDIA Ada and Blackwell white papers (2022, 2025), fp32 sums"),
        ),
        "TPU-v6e": (0.0, "no fp8 units: Google Cloud TPU documentation of v6e (2025)"),
        "TPU7x": (2.0, "Google's pod of 9,216: 42.5 EFLOP/s of fp8 (2025-11)"),
        "Ascend-910B": (0.0, "unverified: no fp8 units before the Ascend 950 (2025)"),
    }
)
"""Fp8 peak / bf16 peak, and the source."""


def with_fp8_peak(gpu: GPU) -> GPU:
    """A GPU of the catalogue with its fp8 peak and the source of it."""
    factor, source = _FACTORS[gpu.name]
    return dataclasses.replace(
        gpu,
        fp8_flops_per_s=factor * gpu.flops_per_s,
        sources={**gpu.sources, "fp8_flops_per_s": source},
    )
