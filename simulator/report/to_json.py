"""Report a simulation as one JSON object: results, provenance of its inputs, and warnings.

    Replicated --report--> JSON object --report.tables--> text
    two Replicated --comparison--> ratios, seed by seed

Every number is `{mean, low, high}`; the bounds are those of a 95 % interval over the seeds, and
null for a single seed. Shares are of a pool's time.

Step time, throughput, GPU-hours, dollars and their ratios were compared with measured runs: their
`low` and `high` contain the model's error, too (90 %, `simulator.report.measured_errors`), and the
interval over the seeds is `seeds_low`, `seeds_high`. So do mean and 95th percentile of the lag of
first tokens, where `simulator.report.lags` has an interval.

Provenance of a simulation's inputs, with their errors, and warnings.

Check that the warm-up is long enough for the lags to become stationary.

versions ahead      ____________ eta, or the limit of the engines
                   /
                 /
warm-up ..... |/....... averages ....... |     too early: averages underestimate lags
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np

from areal_lab.runlog.records import finite_json
from simulator.assembly.engines import engines_of
from simulator.assembly.unused import ignored_settings
from simulator.catalogue.gpu import GPU, find_gpu
from simulator.catalogue.models import ModelShape, find_model
from simulator.config.schema import SimulationConfig
from simulator.costs.controller import controller_cost
from simulator.costs.measured_engine import EAGER_ERROR, GIVEN
from simulator.costs.switch import switch_cost
from simulator.costs.trainers import SPEEDS, measured_on, trainer_error
from simulator.costs.training_layout import unchecked_memory
from simulator.costs.training_timing import outside_from
from simulator.costs.weight_sync import weight_update
from simulator.report.lags import lags_of
from simulator.report.measured_errors import (
    MeasuredErrors,
    change_of,
    change_record,
    gpus_of,
    kind_of,
    measured_errors,
    number_record,
    record_of,
    step_record,
    undecided,
)
from simulator.report.notes import LARGE_REST, rest_cause
from simulator.run.result import Replicated, SimulationResult
from simulator.stats.statistics import ModelError
from simulator.workload.lengths import TAILS, lengths_from
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
    return [
        *_engine_parts(config),
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


def _engine_parts(config: SimulationConfig) -> Iterator[Part]:
    rollout, engines = config.rollout, engines_of(config)
    decode, prefill = engines.decode(), engines.prefill()
    factor = "" if rollout.time_factor == 1 else f"{rollout.time_factor:.3g} times, {GIVEN}: "
    yield Part("decode", f"{factor}{decode.provenance}", decode.error)
    yield Part("prefill", f"{factor}{prefill.provenance}", prefill.error)
    if rollout.decode_step_s is None:
        if rollout.engine_overhead_s is None:
            engine = engines.cpu
            taken = f"{1e3 * engine.step_s:.1f} ms per decode step"
            if engine.sequence_s:
                taken += f" and {1e6 * engine.sequence_s:.0f} us per sequence"
            yield Part("engine CPU", f"{taken}: {engine.source}", engine.error)
        else:
            yield Part("engine CPU", f"rollout.engine_overhead_s, {GIVEN}", 0.0)
        if engines.cpu.layer_s:
            launches = (
                f"{1e3 * engines.cpu.layer_s:.2f} ms for each of {engines.model.layers} layers"
            )
            yield Part("kernel launches", f"{launches}: {engines.cpu.source}", engines.cpu.error)
        elif not rollout.cuda_graphs:
            launches = (
                f"{1e3 * engines.launch_layer_s:.2f} ms for each of {engines.model.layers} layers: "
                "steps without CUDA graphs of three models (2024-09 to 2026-09), of layers with "
                "states one (2026), within a factor of two"
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
    outside = outside_from(
        config.outside, colocated=config.cluster.colocated, trainer=config.trainer
    )
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


_CLEARLY: Final = 3.0
"""Standard errors by which the lag of the second half of the steps must exceed the first's."""
_WORTH: Final = 0.1
"""Relative growth of the lag from which there is a warning."""
_LEAST_STEPS: Final = 4
"""Fewest steps of which two halves can be compared."""


def _rest_warnings(config: SimulationConfig, step_s: float) -> Iterator[str]:
    """One line if `colocation.other_s` is too large a share of the step."""
    other_s = config.colocation.other_s if config.cluster.switches else 0.0
    if config.weights.switch_s is None and other_s > LARGE_REST * step_s:
        yield f"colocation.other_s is {other_s:g} s{rest_cause(other_s / step_s)}"


def warmup_warnings(config: SimulationConfig, results: Sequence[SimulationResult]) -> Iterator[str]:
    """One line if the warm-up has too few steps.

    No warning for whole runs, nor without a staleness bound, where lags never become stationary.
    """
    workload, eta = config.workload, config.schedule.versions_ahead
    if workload.whole_run or math.isinf(eta):
        return
    if growth := _growth(results):
        if workload.answers.drift_per_step == 0:
            first, second = growth
            yield (
                f"lags still grow after the {workload.warmup_steps} steps of warm-up (first token: "
                f"{first:.2f} versions in the first half of the averaged steps, {second:.2f} in "
                "the second), so averages are too small; raise workload.warmup_steps and "
                "workload.steps"
            )
    elif workload.warmup_steps < eta + 1:
        yield (
            f"workload.warmup_steps is {workload.warmup_steps}, but should be >= "
            f"{math.ceil(eta) + 1}, because it takes that many steps to run {eta:g} versions "
            f"ahead; otherwise lags may be too small; raise warmup_steps and steps"
        )


def _growth(results: Sequence[SimulationResult]) -> tuple[float, float] | None:
    """Lag of first tokens in each half of the averaged steps, if the second is clearly larger."""
    lags = np.mean([one.columns["head_lag"][one.warmup_steps :] for one in results], axis=0)
    if len(lags) < _LEAST_STEPS:
        return None
    halves = np.array_split(lags, 2)
    first, second = (float(half.mean()) for half in halves)
    error = math.sqrt(sum(float(half.var()) / len(half) for half in halves))
    grows = second - first > max(_CLEARLY * error, _WORTH * second)
    return (first, second) if grows else None


COMPARED: Final[Mapping[str, Callable[[SimulationResult], float]]] = MappingProxyType(
    {
        "step_s": lambda result: result.step_s,
        "tokens_per_s": lambda result: result.tokens_per_s,
        "tokens_per_s_per_gpu": lambda result: result.tokens_per_s / result.gpus,
    }
)
"""Numbers by which any two simulations are compared."""
_BY_COST: Final[Mapping[str, Callable[[SimulationResult], float]]] = MappingProxyType(
    {
        "gpu_hours_per_step": lambda result: result.cost.gpu_hours,
        "dollars_per_step": lambda result: result.cost.dollars or 0.0,
    }
)
"""Further numbers, compared if known."""
_PRICES: Final = (("low", "low"), ("typical", "dollars"), ("high", "high"))
"""Names of prices, with the attributes of a cost."""


def report(
    results: Replicated, config: SimulationConfig, errors: MeasuredErrors | None = None
) -> dict[str, Any]:
    """The object that `areal-lab simulate --json` prints.

    Args:
        errors: of measured runs; None takes the packaged ones.
    """
    errors = errors or measured_errors()
    told = _known_bounds(results.to_json())
    known = errors.step(kind_of(config))
    told["lag"]["head"].update(_lags(results.results, config, known.error))
    return {
        **told,
        **_headline(results.results, known.error),
        "cost": {**told["cost"], **_costs(results.results, known.error)},
        "model_error": step_record(kind_of(config), gpus_of(config), errors),
        "sources": [part._asdict() for part in cost_parts(config)],
        "warnings": [
            *warnings(config),
            *_rest_warnings(config, results.step_s.mean),
            *warmup_warnings(config, results.results),
        ],
        "config": finite_json(config.model_dump()),
    }


def comparison(
    first: Replicated,
    second: Replicated,
    configs: tuple[SimulationConfig, SimulationConfig],
    errors: MeasuredErrors | None = None,
) -> dict[str, Any]:
    """Second over first, seed by seed; null if unknown.

    `undecided` says whether the interval of the speed contains 1, and `undecided_by` why: `seeds`
    if that over the seeds does, or else `model`.

    Args:
        configs: of the first and the second.
        errors: of measured runs; None takes the packaged ones.
    """
    errors = errors or measured_errors()
    what, known = change_of(*configs, errors)
    told: dict[str, Any] = {
        name: number_record(second.ratios(first, value), known.error)
        for name, value in COMPARED.items()
    }
    for name, value in _BY_COST.items():
        priced = all(value(one) > 0 for both in (first, second) for one in both.results)
        told[name] = number_record(second.ratios(first, value), known.error) if priced else None
    energy = all(one.energy.kwh > 0 for both in (first, second) for one in both.results)
    told["kwh_per_step"] = (
        _bounds(second.ratio(first, lambda result: result.energy.kwh).to_json()) if energy else None
    )
    speed = told["tokens_per_s"]
    told["undecided"] = undecided(speed["low"], speed["high"])
    told["undecided_by"] = None
    if told["undecided"]:
        by_seeds = undecided(speed["seeds_low"], speed["seeds_high"])
        told["undecided_by"] = "seeds" if by_seeds else "model"
    return {**told, "model_error": change_record(what, known)}


def _headline(results: Sequence[SimulationResult], error: ModelError) -> dict[str, Any]:
    return {
        name: number_record([value(result) for result in results], error)
        for name, value in COMPARED.items()
    }


def _costs(results: Sequence[SimulationResult], error: ModelError) -> dict[str, Any]:
    gpu_hours = [result.cost.gpu_hours for result in results]
    found: dict[str, Any] = {"gpu_hours_per_step": number_record(gpu_hours, error)}
    if all(result.cost.dollars is not None for result in results):
        for name, costs in (
            ("dollars_per_step", [result.cost for result in results]),
            ("dollars_per_million_tokens", [one.cost_per_million_tokens for one in results]),
        ):
            found[name] = {
                price: number_record([getattr(cost, of) for cost in costs], error)
                for price, of in _PRICES
            }
    return found


def _lags(
    results: Sequence[SimulationResult], config: SimulationConfig, error: ModelError
) -> dict[str, Any]:
    idle = [{name: pool.idle for name, pool in one.pools.items()} for one in results]
    found = lags_of(config, idle, [one.staleness() for one in results], error)
    return {name: record_of(*lag) for name, lag in (found or {}).items()}


def _known_bounds(value: Any) -> Any:
    """`value` with null for the infinite bounds of a single seed."""
    if isinstance(value, Mapping):
        if value.keys() == {"mean", "low", "high"}:
            return _bounds(value)
        return {name: _known_bounds(inner) for name, inner in value.items()}
    return value


def _bounds(value: Mapping[str, Any]) -> dict[str, Any]:
    known = isinstance(value["low"], int | float) and math.isfinite(value["low"])
    return dict(value) if known else {**value, "low": None, "high": None}
