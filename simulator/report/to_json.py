"""Report a simulation as one JSON object: results, provenance and warnings.

    Replicated --report--> JSON object --report.tables--> text
    two Replicated --comparison--> ratios, seed by seed

Every number is `{mean, low, high}`; the bounds are those of a 95 % interval over the seeds, and
null for a single seed. Shares are of a pool's time.

Step time, throughput, GPU-hours, dollars and their ratios were compared with measured runs: their
`low` and `high` contain the model's error, too (90 %, `simulator.report.measured_errors`), and the
interval over the seeds is `seeds_low`, `seeds_high`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from areal_lab.runlog.records import finite_json
from simulator.config.schema import SimulationConfig
from simulator.report.error_lines import change_record, number_record, step_record, undecided
from simulator.report.measured_errors import (
    MeasuredErrors,
    change_of,
    gpus_of,
    kind_of,
    measured_errors,
)
from simulator.report.provenance import cost_parts, warnings
from simulator.report.warmup import warmup_warnings
from simulator.run.result import Replicated, SimulationResult
from simulator.stats.model_error import ModelError

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
    return {
        **told,
        **_headline(results.results, known.error),
        "cost": {**told["cost"], **_costs(results.results, known.error)},
        "model_error": step_record(kind_of(config), gpus_of(config), errors),
        "sources": [part._asdict() for part in cost_parts(config)],
        "warnings": [*warnings(config), *warmup_warnings(config, results.results)],
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
    """GPU-hours, and dollars where a price is known."""
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
