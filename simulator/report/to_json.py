"""Report a simulation as one JSON object: results, provenance and warnings.

    Replicated --report--> JSON object --report.tables--> text
    two Replicated --comparison--> ratios, seed by seed

Every number is `{mean, low, high}`; the bounds are those of a 95 % interval over the seeds, and
null for a single seed. Shares are of a pool's time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from areal_lab.runlog.records import finite_json
from simulator.config.schema import SimulationConfig
from simulator.report.provenance import cost_parts, warnings
from simulator.report.warmup import warmup_warnings
from simulator.run.result import Replicated, SimulationResult

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
        "kwh_per_step": lambda result: result.energy.kwh,
    }
)
"""Further numbers, compared if known."""


def report(results: Replicated, config: SimulationConfig) -> dict[str, Any]:
    """The object that `areal-lab simulate --json` prints."""
    told = _known_bounds(results.to_json())
    return {
        **told,
        "tokens_per_s_per_gpu": _divided(told["tokens_per_s"], told["gpus"]),
        "sources": [part._asdict() for part in cost_parts(config)],
        "warnings": [*warnings(config), *warmup_warnings(config, results.results)],
        "config": finite_json(config.model_dump()),
    }


def comparison(first: Replicated, second: Replicated) -> dict[str, Any]:
    """Second over first, seed by seed; null bounds for one seed, null if unknown."""
    ratios = {name: second.ratio(first, value) for name, value in COMPARED.items()}
    told: dict[str, Any] = {name: _bounds(ratio.to_json()) for name, ratio in ratios.items()}
    for name, value in _BY_COST.items():
        known = all(value(one) > 0 for both in (first, second) for one in both.results)
        told[name] = _bounds(second.ratio(first, value).to_json()) if known else None
    return told


def _divided(value: Mapping[str, Any], by: float) -> dict[str, Any]:
    return {name: None if number is None else number / by for name, number in value.items()}


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
