"""Speed of fp8 kernels: products at a share of the fp8 peak, reading at that of the bandwidth.

A product in fp8 reads half of the bytes, but at a smaller share of the bandwidth, and reaches a
smaller share of a peak that is twice as high. Its input is quantized first, by one more kernel.
Fitted to the kernel tables that the bf16 coefficients come from (`data/fp8_coefficients.csv`);
`python -m tools.kernels` repeats it. GPUs that were not measured take the mean change from their
bf16 coefficients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Final

from simulator.catalogue.gpu import GPU
from simulator.catalogue.transformer import ModelShape
from simulator.costs.coefficients import (
    DATA,
    RELATIVES,
    KernelCoefficients,
    fitted_coefficients,
    kernel_coefficients,
    read_table,
)
from simulator.costs.weight_bytes import EngineNumbers

NOT_MEASURED: Final = 0.3
"""Least error on GPUs whose fp8 kernels were not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FP8Kernels:
    """Coefficients of the kernels of one GPU in fp8; see `KernelCoefficients`."""

    weight_reading: float
    cache_reading: float
    layer_s: float
    """Includes the kernels that quantize the inputs of products."""
    sequence_s: float
    matrix_efficiency: float
    """Share of the fp8 peak."""
    knee: float
    activation_traffic: float
    prefill_layer_s: float
    decode_error: float
    prefill_error: float
    provenance: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.matrix_efficiency <= 1 or self.knee < 1:
            raise ValueError(
                f"matrix_efficiency is {self.matrix_efficiency} and knee {self.knee}, but must be "
                "in (0, 1] and >= 1"
            )

    def computing_s(
        self,
        model: ModelShape,
        gpu: GPU,
        head_efficiency: float,
        *,
        tokens: float,
        head_tokens: float,
    ) -> float:
        """Seconds of all products on one GPU: layers in fp8, the head in bf16.

        Args:
            head_efficiency: share of the bf16 peak.
            tokens: rows of the layers' products.
            head_tokens: rows of the head.
        """
        head = 2.0 * model.embedding_parameters
        layers = model.linear_flops_per_token() - head
        layers_s = layers * tokens / (gpu.fp8_flops_per_s * self.matrix_efficiency)
        return layers_s + head * head_tokens / (gpu.flops_per_s * head_efficiency)

    def of_weights(self, known: KernelCoefficients) -> KernelCoefficients:
        """The coefficients of a step whose weights are in fp8; `known` are those of bf16.

        The efficiency of products stays that of bf16, for the head: `computing_s` knows the other.
        """
        return dataclasses.replace(
            known,
            weight_reading=self.weight_reading,
            layer_s=self.layer_s,
            sequence_s=self.sequence_s,
            knee=self.knee,
            activation_traffic=self.activation_traffic,
            prefill_layer_s=self.prefill_layer_s,
            decode_error=max(known.decode_error, self.decode_error),
            prefill_error=max(known.prefill_error, self.prefill_error),
            provenance=f"fp8 weights: {self.provenance}",
        )

    def of_cache(self, known: KernelCoefficients) -> KernelCoefficients:
        """The coefficients of a step whose cache is in fp8."""
        return dataclasses.replace(
            known,
            cache_reading=self.cache_reading,
            decode_error=max(known.decode_error, self.decode_error),
        )


COEFFICIENTS: Final = tuple(
    one.name for one in dataclasses.fields(FP8Kernels) if one.name != "provenance"
)
FITTED: Final = (
    "fitted to fp8 kernels measured by NVIDIA (AIConfigurator 0.12.0, 2026-09: SGLang 0.5.14, "
    "per-token scales), summed over a model's layers with a kernel that quantizes the input of "
    "each product"
)


@cache
def fitted_fp8(path: Path | None = None) -> Mapping[str, FP8Kernels]:
    """Coefficients of the measured GPUs.

    Args:
        path: a table in the format of `data/fp8_coefficients.csv`; None reads that file.
    """
    by_gpu: dict[str, dict[str, float]] = {}
    for row in read_table(path or DATA / "fp8_coefficients.csv"):
        by_gpu.setdefault(row["gpu"], {})[row["coefficient"]] = float(row["value"])
    return MappingProxyType(
        {gpu: FP8Kernels(**values, provenance=FITTED) for gpu, values in by_gpu.items()}
    )


@cache
def fp8_kernels(gpu: GPU) -> FP8Kernels:
    """Coefficients of a GPU: fitted, of a related GPU, or its bf16 ones with the mean change."""
    fitted = fitted_fp8()
    name = RELATIVES[gpu.name][0] if gpu.name in RELATIVES else gpu.name
    if name in fitted:
        return fitted[name]
    known = kernel_coefficients(gpu)
    changed = {one: _changed(one, getattr(known, one)) for one in COEFFICIENTS[:-2]}
    changed["matrix_efficiency"] = min(1.0, changed["matrix_efficiency"])
    changed["knee"] = max(1.0, changed["knee"])
    return FP8Kernels(
        **changed,
        decode_error=max(known.decode_error, NOT_MEASURED),
        prefill_error=max(known.prefill_error, NOT_MEASURED),
        provenance=(
            f"not measured on the {gpu.name}: its bf16 coefficients with the change that "
            f"{' and '.join(fitted)} have; +-{max(known.decode_error, NOT_MEASURED):.0%}"
        ),
    )


def _changed(name: str, in_bf16: float) -> float:
    """A coefficient in fp8: seconds of kernels are added, shares multiplied, as where measured."""
    known = fitted_coefficients()
    pairs = [(getattr(one, name), getattr(known[gpu], name)) for gpu, one in fitted_fp8().items()]
    if name.endswith("_s"):
        return in_bf16 + float(sum(fp8 - bf16 for fp8, bf16 in pairs)) / len(pairs)
    return in_bf16 * float(sum(fp8 / bf16 for fp8, bf16 in pairs)) / len(pairs)


def precise_coefficients(
    gpu: GPU,
    numbers: EngineNumbers,
    coefficients: KernelCoefficients | None = None,
    fp8: FP8Kernels | None = None,
) -> tuple[KernelCoefficients, FP8Kernels | None]:
    """Coefficients of an engine, and those of products in fp8 if its weights are.

    Args:
        coefficients: of bf16; None uses the GPU's.
        fp8: custom ones; None uses the GPU's.
    """
    known = coefficients or kernel_coefficients(gpu)
    if "fp8" not in (numbers.weights, numbers.cache):
        return known, None
    kernels = fp8 or fp8_kernels(gpu)
    if numbers.weights == "fp8":
        known = kernels.of_weights(known)
    if numbers.cache == "fp8":
        known = kernels.of_cache(known)
    return known, kernels if numbers.weights == "fp8" else None
