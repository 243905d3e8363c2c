"""Engines of a config: replicas with its costs, cache size and number of running sequences.

SimulationConfig --engines_of--> Engines: (number, seed, callback) -> Replica
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from areal_lab.control.events import EngineId
from simulator.catalogue.gpu import GPU, find_gpu
from simulator.catalogue.models import ModelShape, find_model
from simulator.config.schema import SimulationConfig
from simulator.costs.coefficients import KernelCoefficients, sequence_bytes
from simulator.costs.decode import DecodeCost, decode_cost
from simulator.costs.engine_memory import cache_tokens
from simulator.costs.measured_engine import (
    EAGER_LAYER_S,
    EAGER_PASS_S,
    EAGER_STATE_LAYER_S,
    ENGINES,
    EngineCPU,
    MeasuredPrefill,
    measured_decode,
    measured_prefill,
    served_factor,
)
from simulator.costs.prefill import PrefillCost, prefill_cost
from simulator.costs.speculation import Speculation, speculation_of
from simulator.costs.weight_bytes import EngineNumbers, engine_numbers
from simulator.engine.clock import RecordSpan
from simulator.engine.replica import Replica, ReplicaSettings
from simulator.workload.lengths import Lengths, lengths_from
from simulator.workload.randomness import STRAGGLERS, engine_slowdowns, stream

MOST_RUNNING: Final = 256
"""Default bound on the sequences that an engine decodes at the same time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Engines:
    """Makes the engines of a config. Its parts are computed once; a wrong one raises ConfigError.

    Engines of the same speed share their costs.
    """

    config: SimulationConfig
    model: ModelShape
    gpu: GPU
    lengths: Lengths
    coefficients: KernelCoefficients | None = None
    """Custom coefficients of decode steps; None uses the GPU's."""

    def __call__(self, engine: EngineId, seed: int, record: RecordSpan | None) -> Replica:
        """Engine number `engine` of a seed."""
        return Replica(**self.settings(engine, seed)._asdict(), record_spans=record)

    def settings(self, engine: EngineId, seed: int) -> ReplicaSettings:
        """Costs and sizes of engine number `engine` of a seed."""
        decode, prefill = self._costs(self._slowdowns(seed)[engine])
        return ReplicaSettings(
            decode=decode,
            prefill=prefill,
            max_running=self.running,
            cache_tokens=self.cache_tokens,
            prefix_sharing=self.config.rollout.prefix_sharing,
        )

    @property
    def count(self) -> int:
        """Engines at first."""
        return self.config.cluster.generating_gpus // self.config.rollout.tensor_parallel

    @property
    def most(self) -> int:
        """Engines at any time."""
        return max(self.count, self.config.scaling.max_engines)

    @cached_property
    def cpu(self) -> EngineCPU:
        """CPU time: as named, or as measured."""
        rollout = self.config.rollout
        engine = ENGINES[rollout.engine]
        if rollout.engine_overhead_s is not None:
            engine = replace(engine, step_s=rollout.engine_overhead_s, sequence_s=0.0, layer_s=0.0)
        if rollout.engine_sequence_s is not None:
            engine = replace(engine, sequence_s=rollout.engine_sequence_s)
        if rollout.engine_overlap is not None:
            engine = replace(engine, overlap=rollout.engine_overlap)
        return engine

    @property
    def launch_layer_s(self) -> float:
        """Seconds to launch the kernels of a layer, the mean of all; 0 with CUDA graphs."""
        if self.cpu.layer_s:
            return self.cpu.layer_s
        if self.config.rollout.cuda_graphs:
            return 0.0
        share = self.model.linear.layers / self.model.layers if self.model.linear else 0.0
        return (1 - share) * EAGER_LAYER_S + share * EAGER_STATE_LAYER_S

    @property
    def launch_s(self) -> float:
        """Seconds to launch the kernels of a step, its drafts included; 0 with CUDA graphs."""
        layers_s = self.launch_layer_s * self.model.layers
        if self.speculation is None or self.config.rollout.cuda_graphs:
            return layers_s
        return layers_s + self.speculation.passes * EAGER_PASS_S

    @cached_property
    def numbers(self) -> EngineNumbers:
        """Precision of weights and cache."""
        return engine_numbers(self.config)

    @cached_property
    def speculation(self) -> Speculation | None:
        """Drafted tokens; None without."""
        return speculation_of(self.config)

    @cached_property
    def running(self) -> int:
        """Sequences that one engine decodes at the same time: as configured, or as its cache holds.

        The cache is divided among sequences of mean length; when it is full, sequences are
        preempted.
        """
        rollout, workload = self.config.rollout, self.config.workload
        if rollout.max_running:
            return rollout.max_running
        split, numbers = rollout.tensor_parallel, self.numbers
        held = self._held_tokens()
        mean_tokens = workload.prompt_tokens + self.lengths.mean_tokens()
        mean_tokens += workload.tool_tokens * (workload.turns - 1)
        fixed = sequence_bytes(self.model, numbers, split) * self.model.cache_shards(split)
        mean_tokens += fixed / numbers.cache_bytes_per_token(self.model)
        return max(1, min(MOST_RUNNING, int(held / mean_tokens)))

    @property
    def prompts_in_flight(self) -> int:
        """Most prompts in flight: as configured, or what all engines run, at least a batch."""
        workload = self.config.workload
        if most := self.config.schedule.max_concurrent_prompts:
            return most
        room = self.most * self.running // workload.samples_per_prompt
        return max(workload.prompts_per_batch, room)

    @property
    def weight_bytes(self) -> float:
        """Weights of the model and its draft on one GPU."""
        weights = self.numbers.weight_bytes(self.model)
        if self.speculation is not None:
            weights += self.speculation.weight_bytes(self.model, self.numbers)
        return weights / self.config.rollout.tensor_parallel

    @cached_property
    def cache_tokens(self) -> int:
        """Capacity of one engine's KV cache, without the windows and states of what it runs."""
        return self._held_tokens(sequences=self.running)

    def check_longest(self, longest_tokens: int) -> None:
        """Refuse engines whose cache cannot hold the longest sequence."""
        self._held_tokens(longest_tokens=longest_tokens, sequences=self.running)

    def decode(self, slowdown: float = 1.0) -> DecodeCost:
        """Decode steps of one engine; see `decode_cost`."""
        rollout = self.config.rollout
        return decode_cost(
            self.model,
            self.gpu,
            rollout.tensor_parallel,
            overhead_s=self.cpu.step_s,
            overhead_sequence_s=self.cpu.sequence_s,
            launch_s=self.launch_s,
            overlap=self.cpu.overlap,
            slowdown=slowdown * rollout.time_factor * served_factor(self.config, self.model),
            measured=measured_decode(self.config),
            coefficients=self.coefficients,
            numbers=self.numbers,
            speculation=self.speculation,
        )

    def prefill(self, slowdown: float = 1.0) -> PrefillCost | MeasuredPrefill:
        """Prefills of one engine: as measured, or see `prefill_cost`."""
        slowdown *= self.config.rollout.time_factor
        return measured_prefill(self.config, slowdown) or prefill_cost(
            self.model,
            self.gpu,
            self.config.rollout.tensor_parallel,
            slowdown=slowdown,
            numbers=self.numbers,
        )

    def _held_tokens(self, *, longest_tokens: int = 1, sequences: int = 0) -> int:
        rollout = self.config.rollout
        return cache_tokens(
            self.model,
            self.gpu,
            rollout.tensor_parallel,
            rollout.memory_utilization,
            longest_tokens=longest_tokens,
            numbers=self.numbers,
            sequences=sequences,
            speculation=self.speculation,
        )

    def _slowdowns(self, seed: int) -> list[float]:
        if seed not in self._by_seed:
            generator = stream(seed, STRAGGLERS, 0)
            drawn = engine_slowdowns(self.config.faults, self.most, generator)
            self._by_seed[seed] = list(map(float, drawn))
        return self._by_seed[seed]

    def _costs(self, slowdown: float) -> tuple[DecodeCost, PrefillCost | MeasuredPrefill]:
        if slowdown not in self._by_slowdown:
            self._by_slowdown[slowdown] = self.decode(slowdown), self.prefill(slowdown)
        return self._by_slowdown[slowdown]

    @cached_property
    def _by_seed(self) -> dict[int, list[float]]:
        return {}

    @cached_property
    def _by_slowdown(
        self,
    ) -> dict[float, tuple[DecodeCost, PrefillCost | MeasuredPrefill]]:
        return {}


def engines_of(config: SimulationConfig) -> Engines:
    """The engines of a config that is known to be valid."""
    return Engines(
        config=config,
        model=find_model(config.model),
        gpu=find_gpu(config.cluster.generating_gpu),
        lengths=lengths_from(config.workload.answers),
    )
