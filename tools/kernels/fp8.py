"""Fit the fp8 coefficients of one GPU to its points, with all that fp8 does not change from bf16.

1  matrix products  ->  efficiency at the fp8 peak, sharpness of the knee
2  decode steps     ->  e_w, e_kv, e_L, e_B; weights and cache in fp8
3  prefills         ->  activations with quantized inputs, e_L
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from simulator.catalogue.gpu import find_gpu
from simulator.catalogue.models import find_model
from simulator.costs.coefficients import KernelCoefficients, fitted_coefficients, smooth_max
from simulator.costs.fp8_kernels import COEFFICIENTS, FP8Kernels
from simulator.costs.weight_bytes import EngineNumbers
from simulator.stats.least_squares import fit_positive
from tools.kernels.fit import mean_error, predict_prefills, predict_steps
from tools.kernels.points import DecodePoint, LinearPoint, PrefillPoint, read_points

MEASURED: Final = ("H100", "H200")
"""GPUs of the tables that have fp8 units."""
FP8: Final = EngineNumbers(weights="fp8", cache="fp8")
_DECODE = ("weight_reading", "cache_reading", "layer_s", "sequence_s")
_PREFILL = ("activation_traffic", "prefill_layer_s")


def fit_fp8(
    name: str, folder: Path | None = None, known: KernelCoefficients | None = None
) -> FP8Kernels:
    """Fp8 coefficients of one GPU.

    Args:
        name: name of the GPU in the points.
        folder: folder of the points; None uses the shipped ones.
        known: its bf16 coefficients; None uses the shipped ones.
    """
    known = known or fitted_coefficients()[name]
    products = [one for one in read_points(LinearPoint, folder, fp8=True) if one.gpu == name]
    efficiency, knee = _fit_products(products, known)
    start: dict[str, Any] = {one: getattr(known, one) for one in COEFFICIENTS}
    kernels = FP8Kernels(**start | {"matrix_efficiency": efficiency, "knee": knee})
    steps = [one for one in read_points(DecodePoint, folder, fp8=True) if one.gpu == name]
    steps = [one for one in steps if not one.held_out]
    decode = fit_positive(
        lambda values: predict_steps(
            steps, known, numbers=FP8, fp8=_with(kernels, _DECODE, values)
        ),
        [getattr(kernels, one) for one in _DECODE],
        [one.seconds for one in steps],
    )
    kernels = dataclasses.replace(_with(kernels, _DECODE, decode.values), decode_error=decode.error)
    prefills = [one for one in read_points(PrefillPoint, folder, fp8=True) if one.gpu == name]
    prefills = [one for one in prefills if not one.held_out]
    prefill = fit_positive(
        lambda values: predict_prefills(
            prefills, known, numbers=FP8, fp8=_with(kernels, _PREFILL, values)
        ),
        [getattr(kernels, one) for one in _PREFILL],
        [one.seconds for one in prefills],
    )
    return dataclasses.replace(
        _with(kernels, _PREFILL, prefill.values), prefill_error=prefill.error
    )


def held_out_fp8_errors(
    name: str, kernels: FP8Kernels, folder: Path | None = None
) -> tuple[float, float]:
    """Mean absolute relative error on models that the fit has not seen: decode, prefill."""
    known = fitted_coefficients()[name]
    steps = [one for one in read_points(DecodePoint, folder, fp8=True) if one.gpu == name]
    steps = [one for one in steps if one.held_out]
    prefills = [one for one in read_points(PrefillPoint, folder, fp8=True) if one.gpu == name]
    prefills = [one for one in prefills if one.held_out]
    return (
        mean_error(
            predict_steps(steps, known, numbers=FP8, fp8=kernels), [one.seconds for one in steps]
        ),
        mean_error(
            predict_prefills(prefills, known, numbers=FP8, fp8=kernels),
            [one.seconds for one in prefills],
        ),
    )


def fp8_table(fitted: dict[str, FP8Kernels], about: str) -> str:
    """The text of `data/fp8_coefficients.csv`."""
    lines = [f"# {line}" for line in about.splitlines()]
    lines += [
        "# matrix_efficiency is a share of the fp8 peak. Meanings:",
        "# simulator/costs/fp8_kernels.py.",
        "gpu,coefficient,value",
    ]
    lines += [
        f"{name},{one},{getattr(kernels, one):.5g}"
        for name, kernels in fitted.items()
        for one in COEFFICIENTS
    ]
    return "\n".join(lines) + "\n"


def _fit_products(points: Sequence[LinearPoint], known: KernelCoefficients) -> tuple[float, float]:
    """Efficiency at the fp8 peak and sharpness of the knee, from matrix products alone."""
    start: dict[str, Any] = {one: getattr(known, one) for one in COEFFICIENTS}

    def predict(values: Sequence[float]) -> list[float]:
        slack, efficiency, excess, layer_s = values
        kernels = FP8Kernels(**start | {"matrix_efficiency": min(1.0, efficiency)})
        predicted = []
        for point in points:
            model, gpu = find_model(point.model), find_gpu(point.gpu)
            read = FP8.decode_weight_bytes(model, sequences=point.tokens)
            reading_s = slack * read / point.tensor_parallel / gpu.memory_bytes_per_s
            computing_s = kernels.computing_s(
                model,
                gpu,
                known.matrix_efficiency,
                tokens=point.tokens / point.tensor_parallel,
                head_tokens=point.tokens / point.tensor_parallel,
            )
            predicted.append(
                layer_s * model.layers + smooth_max(reading_s, computing_s, 1 + excess)
            )
        return predicted

    found = fit_positive(predict, (1.3, 0.6, 1.5, 1e-5), [one.seconds for one in points])
    return found.values[1], 1 + found.values[2]


def _with(kernels: FP8Kernels, names: Sequence[str], values: Sequence[float]) -> FP8Kernels:
    changes: dict[str, Any] = dict(zip(names, values, strict=True))
    return dataclasses.replace(kernels, **changes)
