"""Seconds in which an engine falls asleep and wakes up.

    to_host    weights are copied to pinned memory and back: vLLM's sleep level 1
    discard    memory is only unmapped and mapped again; a refit brings the weights: vLLM's level 2,
               SGLang's release_memory_occupation
    none       the engine keeps its memory, and training fits beside it

The cache is discarded in both ways, and the process, its CUDA context and graphs are kept.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from simulator.catalogue.gpu import GPU
from simulator.catalogue.transformer import ModelShape
from simulator.config.schema import Sleep
from simulator.costs.colocation.host_copies import copy_rate
from simulator.costs.colocation.published import relative_fit, rows_of
from simulator.costs.precision.numbers import BF16, EngineNumbers


class SleepStart(NamedTuple):
    """What a change takes besides the copy of the weights."""

    seconds: float
    error: float
    """Of the wake-ups of engines on one A100, with the copies."""


@cache
def sleep_start() -> SleepStart:
    """Seconds to map the memory and to answer, from engines that wake alone on their host."""
    rows = [row for row in rows_of("engine wake") if row.copying == 1]
    seconds, error = relative_fit(
        [[1.0] * len(rows), [row.bytes for row in rows]], [row.seconds for row in rows]
    )
    return SleepStart(float(seconds[0]), error)


def sleep_or_wake_s(
    sleep: Sleep,
    model: ModelShape,
    gpu: GPU,
    *,
    tensor_parallel: int,
    gpus: int,
    numbers: EngineNumbers = BF16,
) -> float:
    """Seconds until all engines sleep, or until all are awake: both take the same.

    Args:
        sleep: what becomes of the weights.
        model: model of the engines.
        gpu: GPU of the engines.
        tensor_parallel: GPUs of one engine, which share its weights.
        gpus: GPUs of the cluster.
        numbers: precision of the weights.
    """
    if sleep == "none":
        return 0.0
    start_s = sleep_start().seconds
    if sleep == "discard":
        return start_s
    held = numbers.weight_bytes(model) / tensor_parallel
    return start_s + held / copy_rate("to host", gpu, pinned=True, gpus=gpus).bytes_per_s
