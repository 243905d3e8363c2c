"""Provenance of a simulation's inputs, with their errors, and warnings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, NamedTuple

from simulator.assembly.engines import engine_cpu, engine_decode, engine_prefill
from simulator.assembly.unused import ignored_settings
from simulator.catalogue.find_gpu import find_gpu
from simulator.catalogue.gpu import GPU
from simulator.catalogue.models import ModelShape, find_model
from simulator.config.schema import SimulationConfig
from simulator.costs.colocation.switch import switch_cost
from simulator.costs.controller.ways import controller_cost
from simulator.costs.engine_cpu import EAGER_ERROR, EAGER_LAYER_S
from simulator.costs.measured_engine import GIVEN
from simulator.costs.outside import outside_from
from simulator.costs.trainers.named import SPEEDS, measured_on, trainer_error
from simulator.costs.training_memory import unchecked_memory
from simulator.costs.weight_sync import weight_update
from simulator.workload.lengths import lengths_from
from simulator.workload.tails import TAILS
from simulator.workload.trace_lengths import TraceLengths

UNCERTAIN: Final = 0.15
"""Mean relative error from which a part gets a warning."""
_UNVERIFIED: Final = "unverified"


class Part(NamedTuple):
    """One part of the cost model."""

    name: str
    source: str
    error: float | None
    """Mean absolute relative error of its fit; 0 if measured or given, None if unknown."""


def cost_parts(config: SimulationConfig) -> list[Part]:
    """Sources and errors of a config's times; the config must be valid."""
    model, gpu = find_model(config.model), find_gpu(config.cluster.gpu)
    rollout_gpu = find_gpu(config.cluster.generating_gpu)
    return [
        *_engine_parts(config, model, rollout_gpu),
        _training_part(config, model, gpu),
        *_weights_parts(config, model, gpu),
        *_outside_parts(config),
        *_controller_parts(config),
        _lengths_part(config),
    ]


def warnings(config: SimulationConfig, *, prices: bool = True) -> list[str]:
    """Warnings: uncertain parts, unverified numbers, missing prices, settings without effect."""
    found = [
        *ignored_settings(config),
        *(
            f"{part.name}: {part.source}"
            for part in cost_parts(config)
            if part.error is not None and part.error >= UNCERTAIN
        ),
    ]
    model = find_model(config.model)
    found.extend(f"{model.name}: {caveat}" for caveat in model.caveats)
    if model.mxfp4_experts and config.rollout.weight_precision == "auto":
        found.append(
            f"{model.name}: engines hold its experts in MXFP4, whose kernels were not measured: "
            "bytes count as read, and products as computed, as fast as in bf16"
        )
    gpus = {find_gpu(name).name: find_gpu(name) for name in _gpu_names(config)}
    for gpu in gpus.values():
        found.extend(_unverified_numbers(gpu))
        if prices and config.cluster.price_per_gpu_h is None:
            found.extend(price_warnings(gpu, "set cluster.price_per_gpu_h"))
    if config.trainer.step_s is not None and (line := _memory_warning(config)):
        found.append(line)
    if config.workload.turns > 1 and not config.rollout.turn_prefix_cache:
        found.append(
            "turns: every turn reads the whole context again; rollout.turn_prefix_cache=true keeps "
            "it, as vLLM and SGLang do while there is room"
        )
    if config.seeds < 3:
        found.append(
            f"{config.seeds} seed{'s' * (config.seeds > 1)}: "
            + ("no confidence intervals" if config.seeds == 1 else "wide confidence intervals")
            + "; use 3 or more"
        )
    return found


def _memory_warning(config: SimulationConfig) -> str:
    gpu = find_gpu(config.cluster.gpu)
    return unchecked_memory(find_model(config.model), gpu, config.cluster.training_gpus)


def _gpu_names(config: SimulationConfig) -> tuple[str, ...]:
    return tuple(name for name in (config.cluster.gpu, config.cluster.rollout_gpu) if name)


def _unverified_numbers(gpu: GPU) -> Iterator[str]:
    names = [name for name, source in gpu.sources.items() if source.lower().startswith(_UNVERIFIED)]
    if names:
        yield f"{gpu.name}: not checked in a primary source: {', '.join(names)}"


def price_warnings(gpu: GPU, fix: str) -> Iterator[str]:
    """A line if the price of a GPU is missing or unverified; `fix` says how to set it."""
    if gpu.price.typical is None:
        yield f"{gpu.name}: no published price; {fix}"
    elif gpu.price.source.lower().startswith(_UNVERIFIED):
        yield f"{gpu.name}: its price is {gpu.price.source}; {fix} to replace it"


def _engine_parts(config: SimulationConfig, model: ModelShape, gpu: GPU) -> Iterator[Part]:
    rollout = config.rollout
    decode = engine_decode(config, model, gpu)
    yield Part("decode", decode.provenance, decode.error)
    prefill = engine_prefill(config, model, gpu)
    yield Part("prefill", prefill.provenance, prefill.error)
    if rollout.decode_step_s is None:
        if rollout.engine_overhead_s is None:
            engine = engine_cpu(config)
            taken = f"{1e3 * engine.step_s:.1f} ms per decode step"
            if engine.sequence_s:
                taken += f" and {1e6 * engine.sequence_s:.0f} us per sequence"
            yield Part("engine CPU", f"{taken}: {engine.source}", engine.error)
        else:
            yield Part("engine CPU", f"rollout.engine_overhead_s, {GIVEN}", 0.0)
        if not rollout.cuda_graphs:
            launches = (
                f"{1e3 * EAGER_LAYER_S:.2f} ms for each of {model.layers} layers: steps without "
                "CUDA graphs of three models (2024-09 to 2026-09), within a factor of two"
            )
            yield Part("kernel launches", launches, EAGER_ERROR)


def _training_part(config: SimulationConfig, model: ModelShape, gpu: GPU) -> Part:
    trainer = config.trainer
    if trainer.step_s is not None:
        return _measured_training(config)
    if trainer.mfu is not None:
        return Part("training", f"a utilization of {trainer.mfu:g}, {GIVEN}", None)
    source = SPEEDS[trainer.kind].provenance
    if trainer.lora_rank:
        source = (
            f"adapters of rank {trainer.lora_rank}: steps of NeMo (2024-07), AutoModel (2025-10) "
            f"and prime-rl (2026-02); {source}"
        )
    if trainer.time_factor != 1 or trainer.fixed_s:
        source = (
            f"{trainer.kind} times {trainer.time_factor:.3g} and {trainer.fixed_s:.3g} s per step; "
            f"{config.calibration.source or GIVEN}; {source}"
        )
        return Part("training", source, config.calibration.training_error or None)
    error = trainer_error(trainer, gpu, model).error
    if measured_on(trainer.kind, gpu):
        return Part("training", source, error)
    source = (
        f"not measured on {gpu.name}, about ±{error:.0%}; set trainer.mfu or trainer.step_s to "
        f"replace it: {source}"
    )
    return Part("training", source, error)


def _measured_training(config: SimulationConfig) -> Part:
    trainer, calibration = config.trainer, config.calibration
    if not trainer.token_s:
        return Part("training", f"a step of {trainer.step_s:g} s, {GIVEN}", 0.0)
    source = (
        f"measured: {trainer.step_s:.3g} s per step, {1e3 * trainer.token_s:.3g} ms per token; "
        f"{calibration.source or GIVEN}"
    )
    return Part("training", source, calibration.training_error)


def _weights_parts(config: SimulationConfig, model: ModelShape, gpu: GPU) -> Iterator[Part]:
    if config.cluster.switches:
        switch = switch_cost(config, model, gpu)
        yield Part("switching", switch.provenance, switch.error)
    if config.cluster.sends_weights:
        sync = weight_update(config, model, gpu)
        yield Part("weight update", sync.provenance, sync.error)


def _outside_parts(config: SimulationConfig) -> Iterator[Part]:
    outside = outside_from(config.outside, colocated=config.cluster.colocated)
    if outside is not None:
        yield Part("data, logs", outside.provenance, outside.error)


def _controller_parts(config: SimulationConfig) -> Iterator[Part]:
    controller = controller_cost(config)
    if controller is not None:
        yield Part("controller", controller.provenance, controller.error)


def _lengths_part(config: SimulationConfig) -> Part:
    answers = config.workload.answers
    lengths = lengths_from(answers)
    text = (
        f"{lengths.mean_tokens():,.0f} tokens on average, {lengths.capped_share():.1%} cut off at "
        f"{answers.max_tokens:,}"
    )
    if answers.kind == "recorded":
        return Part("lengths", f"from {answers.trace}, prompt by prompt: {text}", 0.0)
    if isinstance(lengths, TraceLengths):
        scaled = "" if math.isclose(lengths.scale, 1) else f" times {lengths.scale:.3g}"
        return Part("lengths", f"{answers.trace}{scaled}: {text}", None)
    if answers.kind == "lognormal" and answers.truncated_share is None and answers.tail:
        text += f"; spread of {TAILS[answers.tail].source}"
    return Part("lengths", f"{answers.kind}: {text}", None)
