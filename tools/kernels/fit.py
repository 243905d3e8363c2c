"""Fit the coefficients of one GPU to its points, in four stages that build on each other.

    1  matrix products of 1 to 8,192 rows  ->  efficiency at the peak, sharpness of the knee
    2  messages                            ->  latencies and rates of the links
    3  decode steps                        ->  e_w, e_kv, e_L, e_B
    4  prefills                            ->  attention's efficiency, activations, e_L

Predictions come from the simulator's cost functions, so the fit optimizes what the simulator uses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from simulator.catalogue.gpu import find_gpu
from simulator.catalogue.models import find_model
from simulator.costs.coefficients import (
    KERNEL_TABLES,
    KernelCoefficients,
    LinkCoefficients,
    smooth_max,
)
from simulator.costs.communication import (
    all_gather_s,
    all_reduce_s,
    engine_all_reduce_s,
)
from simulator.costs.decode import decode_cost
from simulator.costs.fp8_kernels import FP8Kernels
from simulator.costs.prefill import causal_pairs, prefill_cost
from simulator.costs.weight_bytes import BF16, EngineNumbers
from simulator.stats.least_squares import Fit, fit_positive
from tools.kernels.points import (
    DecodePoint,
    LinearPoint,
    MessagePoint,
    PrefillPoint,
    read_points,
)

COLLECTIVES: Mapping[str, Callable[..., float]] = {
    "engine_all_reduce": engine_all_reduce_s,
    "all_reduce": all_reduce_s,
    "all_gather": all_gather_s,
    "reduce_scatter": all_gather_s,
}
"""The function that predicts a point, by its operation."""

_START = KernelCoefficients(
    weight_reading=1.2,
    cache_reading=1.2,
    layer_s=4e-5,
    sequence_s=3e-6,
    matrix_efficiency=0.75,
    knee=2.5,
    attention_efficiency=0.5,
    activation_traffic=1.5,
    prefill_layer_s=4e-5,
    links=LinkCoefficients(
        latency_s=3e-6,
        hop_s=2e-7,
        one_shot_efficiency=0.6,
        ring_latency_s=6e-6,
        ring_hop_s=5e-7,
        ring_efficiency=0.7,
        error=0.0,
        nccl_latency_s=6e-6,
        nccl_hop_s=1e-6,
        nccl_ramp_s=2e-5,
        nccl_ramp_bytes=8e6,
        nccl_efficiency=0.8,
        nccl_error=0.0,
    ),
    decode_error=0.0,
    prefill_error=0.0,
    provenance=KERNEL_TABLES,
)
_ENGINE = (
    *("latency_s", "hop_s", "one_shot_efficiency"),
    *("ring_latency_s", "ring_hop_s", "ring_efficiency"),
)
_NCCL = (*("nccl_latency_s", "nccl_hop_s", "nccl_ramp_s", "nccl_ramp_bytes", "nccl_efficiency"),)
_DECODE = ("weight_reading", "cache_reading", "layer_s", "sequence_s")
_PREFILL = ("attention_efficiency", "activation_traffic", "prefill_layer_s")


def fit_gpu(name: str, folder: Path | None = None) -> KernelCoefficients:
    """Coefficients of one GPU.

    Args:
        name: name of the GPU in the points.
        folder: folder of the points; None uses the shipped ones.
    """
    efficiency, knee = fit_products([p for p in read_points(LinearPoint, folder) if p.gpu == name])
    known = dataclasses.replace(
        _START,
        matrix_efficiency=efficiency,
        knee=knee,
        links=fit_links([p for p in read_points(MessagePoint, folder) if p.gpu == name]),
    )
    steps = [p for p in read_points(DecodePoint, folder) if p.gpu == name and not p.held_out]
    decode = fit_positive(
        lambda values: predict_steps(steps, _with(known, _DECODE, values)),
        [getattr(_START, one) for one in _DECODE],
        [point.seconds for point in steps],
    )
    known = dataclasses.replace(_with(known, _DECODE, decode.values), decode_error=decode.error)
    prefills = [p for p in read_points(PrefillPoint, folder) if p.gpu == name and not p.held_out]
    prefill = fit_positive(
        lambda values: predict_prefills(prefills, _with(known, _PREFILL, values)),
        [getattr(_START, one) for one in _PREFILL],
        [point.seconds for point in prefills],
    )
    return dataclasses.replace(_with(known, _PREFILL, prefill.values), prefill_error=prefill.error)


def fit_products(points: Sequence[LinearPoint]) -> tuple[float, float]:
    """Efficiency at the peak and sharpness of the knee, from matrix products alone."""
    models = [find_model(point.model) for point in points]

    def predict(values: Sequence[float]) -> list[float]:
        slack, efficiency, excess, layer_s = values
        predicted = []
        for point, model in zip(points, models, strict=True):
            gpu, split = find_gpu(point.gpu), point.tensor_parallel
            reading_s = slack * model.decode_weight_bytes() / split / gpu.memory_bytes_per_s
            flops = model.linear_flops_per_token() * point.tokens / split
            computing_s = flops / (gpu.flops_per_s * efficiency)
            predicted.append(
                layer_s * model.layers + smooth_max(reading_s, computing_s, 1 + excess)
            )
        return predicted

    found = fit_positive(predict, (1.2, 0.75, 1.5, 1e-5), [point.seconds for point in points])
    return found.values[1], 1 + found.values[2]


def fit_links(points: Sequence[MessagePoint]) -> LinkCoefficients:
    """Latencies and rates of the links of a node."""
    engine = [point for point in points if point.operation == "engine_all_reduce"]
    nccl = [point for point in points if point.operation != "engine_all_reduce"]
    own, others = _fit_messages(engine, _ENGINE), _fit_messages(nccl, _NCCL)
    return dataclasses.replace(
        _START.links,
        **dict(zip(_ENGINE, own.values, strict=True)),
        error=own.error,
        **dict(zip(_NCCL, others.values, strict=True)),
        nccl_error=others.error,
    )


def predict_steps(
    points: Iterable[DecodePoint],
    known: KernelCoefficients,
    *,
    numbers: EngineNumbers = BF16,
    fp8: FP8Kernels | None = None,
) -> list[float]:
    """GPU seconds of decode steps, by the cost model."""
    return [
        decode_cost(
            find_model(point.model),
            find_gpu(point.gpu),
            point.tensor_parallel,
            coefficients=known,
            numbers=numbers,
            fp8=fp8,
        ).gpu_s(point.sequences, point.sequences * point.context_tokens)
        for point in points
    ]


def predict_prefills(
    points: Iterable[PrefillPoint],
    known: KernelCoefficients,
    *,
    numbers: EngineNumbers = BF16,
    fp8: FP8Kernels | None = None,
) -> list[float]:
    """Seconds of prefills by the cost model, each in one pass."""
    predicted = []
    for point in points:
        tokens = point.sequences * point.length_tokens
        cost = prefill_cost(
            find_model(point.model),
            find_gpu(point.gpu),
            point.tensor_parallel,
            chunk_tokens=tokens,
            coefficients=known,
            numbers=numbers,
            fp8=fp8,
        )
        pairs = point.sequences * causal_pairs(point.length_tokens)
        predicted.append(cost.seconds(tokens, pairs))
    return predicted


def held_out_errors(
    name: str, known: KernelCoefficients, folder: Path | None = None
) -> tuple[float, float]:
    """Mean absolute relative error on models that the fit has not seen: decode, prefill."""
    steps = [p for p in read_points(DecodePoint, folder) if p.gpu == name and p.held_out]
    prefills = [p for p in read_points(PrefillPoint, folder) if p.gpu == name and p.held_out]
    return (
        mean_error(predict_steps(steps, known), [point.seconds for point in steps]),
        mean_error(predict_prefills(prefills, known), [point.seconds for point in prefills]),
    )


def mean_error(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Mean absolute relative error."""
    return float(np.abs(np.asarray(predicted) / np.asarray(measured) - 1).mean())


def _fit_messages(points: Sequence[MessagePoint], names: Sequence[str]) -> Fit:
    def predict(values: Sequence[float]) -> list[float]:
        links = dataclasses.replace(_START.links, **dict(zip(names, values, strict=True)))
        return [
            COLLECTIVES[point.operation](
                point.size_bytes, point.gpus, find_gpu(point.gpu), links=links
            )
            for point in points
        ]

    start = [getattr(_START.links, one) for one in names]
    return fit_positive(predict, start, [point.seconds for point in points])


def _with(
    known: KernelCoefficients, names: Sequence[str], values: Sequence[float]
) -> KernelCoefficients:
    changes: dict[str, Any] = dict(zip(names, values, strict=True))
    return dataclasses.replace(known, **changes)
