"""Engines of a config: replicas with its costs, cache size and number of running sequences.

SimulationConfig, ModelShape, GPU --make_engines--> (number, seed) -> Replica
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Final

from areal_lab.control.events import EngineId
from simulator.catalogue.gpu import GPU
from simulator.catalogue.models import ModelShape
from simulator.config.schema import SimulationConfig
from simulator.costs.attention.hybrid import sequence_bytes
from simulator.costs.coefficients import KernelCoefficients
from simulator.costs.decode import DecodeCost, decode_cost
from simulator.costs.engine_cpu import EAGER_LAYER_S, ENGINES, EngineCPU
from simulator.costs.engine_memory import cache_tokens
from simulator.costs.measured_engine import MeasuredPrefill, measured_decode, measured_prefill
from simulator.costs.precision.numbers import engine_numbers
from simulator.costs.prefill import PrefillCost, prefill_cost
from simulator.costs.speculation.draft import speculation_of
from simulator.engine.clock import RecordSpan
from simulator.engine.replica import PrefillSeconds, Replica
from simulator.run.system import MakeEngine
from simulator.workload.faults import engine_slowdowns
from simulator.workload.lengths import lengths_from
from simulator.workload.streams import STRAGGLERS, stream

MOST_RUNNING: Final = 256
"""Default bound on the sequences that an engine decodes at the same time."""


def make_engines(
    config: SimulationConfig,
    model: ModelShape,
    gpu: GPU,
    engines: int,
    *,
    coefficients: KernelCoefficients | None = None,
) -> MakeEngine:
    """A function that makes the engines of a config. Engines of the same speed share their costs.

    Args:
        config: cache, running sequences and stragglers.
        coefficients: custom coefficients of decode steps; None uses the GPU's.
    """
    rollout = config.rollout
    held = engine_cache_tokens(config, model, gpu)
    running = running_sequences(config, model, gpu)

    @cache
    def slowdowns(seed: int) -> list[float]:
        drawn = engine_slowdowns(config.faults, engines, stream(seed, STRAGGLERS, 0))
        return list(map(float, drawn))

    @cache
    def costs(slowdown: float) -> tuple[DecodeCost, PrefillSeconds]:
        decode = engine_decode(config, model, gpu, slowdown=slowdown, coefficients=coefficients)
        return decode, engine_prefill(config, model, gpu, slowdown=slowdown)

    def make(engine: EngineId, seed: int, record: RecordSpan | None) -> Replica:
        decode, prefill = costs(slowdowns(seed)[engine])
        return Replica(
            decode=decode,
            prefill=prefill,
            max_running=running,
            cache_tokens=held,
            prefix_sharing=rollout.prefix_sharing,
            record_spans=record,
        )

    return make


def engine_decode(
    config: SimulationConfig,
    model: ModelShape,
    gpu: GPU,
    *,
    slowdown: float = 1.0,
    coefficients: KernelCoefficients | None = None,
) -> DecodeCost:
    """Decode steps of one engine of a config; see `decode_cost`."""
    rollout, engine = config.rollout, engine_cpu(config)
    return decode_cost(
        model,
        gpu,
        rollout.tensor_parallel,
        overhead_s=engine.step_s,
        overhead_sequence_s=engine.sequence_s,
        launch_s=0.0 if rollout.cuda_graphs else EAGER_LAYER_S * model.layers,
        overlap=engine.overlap,
        slowdown=slowdown,
        measured=measured_decode(config),
        coefficients=coefficients,
        numbers=engine_numbers(config),
        speculation=speculation_of(config),
    )


def engine_prefill(
    config: SimulationConfig, model: ModelShape, gpu: GPU, *, slowdown: float = 1.0
) -> PrefillCost | MeasuredPrefill:
    """Prefills of one engine of a config: as measured, or see `prefill_cost`."""
    measured = measured_prefill(config, slowdown)
    return measured or prefill_cost(
        model,
        gpu,
        config.rollout.tensor_parallel,
        slowdown=slowdown,
        numbers=engine_numbers(config),
    )


def engine_cpu(config: SimulationConfig) -> EngineCPU:
    """CPU time of a config's engine: as named, or as measured."""
    rollout = config.rollout
    engine = ENGINES[rollout.engine]
    if rollout.engine_overhead_s is not None:
        engine = replace(engine, step_s=rollout.engine_overhead_s, sequence_s=0.0)
    if rollout.engine_sequence_s is not None:
        engine = replace(engine, sequence_s=rollout.engine_sequence_s)
    if rollout.engine_overlap is not None:
        engine = replace(engine, overlap=rollout.engine_overlap)
    return engine


def running_sequences(config: SimulationConfig, model: ModelShape, gpu: GPU) -> int:
    """Sequences that one engine decodes at the same time: as configured, or as its cache holds.

    The cache is divided among sequences of mean length; when it is full, sequences are preempted.
    """
    rollout, workload = config.rollout, config.workload
    if rollout.max_running:
        return rollout.max_running
    numbers, split = engine_numbers(config), rollout.tensor_parallel
    held = cache_tokens(
        model,
        gpu,
        split,
        rollout.memory_utilization,
        numbers=numbers,
        speculation=speculation_of(config),
    )
    mean_tokens = workload.prompt_tokens + lengths_from(workload.answers).mean_tokens()
    mean_tokens += workload.tool_tokens * (workload.turns - 1)
    fixed = sequence_bytes(model, numbers, split) * model.cache_shards(split)
    mean_tokens += fixed / numbers.cache_bytes_per_token(model)
    return max(1, min(MOST_RUNNING, int(held / mean_tokens)))


def engine_cache_tokens(
    config: SimulationConfig, model: ModelShape, gpu: GPU, *, longest_tokens: int = 1
) -> int:
    """Capacity of one engine's KV cache, beside the windows and states of what it runs.

    Raises:
        ValueError: as `cache_tokens`.
    """
    rollout = config.rollout
    return cache_tokens(
        model,
        gpu,
        rollout.tensor_parallel,
        rollout.memory_utilization,
        longest_tokens=longest_tokens,
        numbers=engine_numbers(config),
        sequences=running_sequences(config, model, gpu),
        speculation=speculation_of(config),
    )
