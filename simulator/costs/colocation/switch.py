"""The switch of colocated or hybrid GPUs from generation to training and back, as a sum of terms.

Each term has a setting with which a measurement replaces it; `weights.switch_s` replaces the sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from simulator.catalogue.gpu import GPU
from simulator.catalogue.transformer import ModelShape
from simulator.config.schema import SimulationConfig
from simulator.costs.colocation.engine_sleep import sleep_or_wake_s, sleep_start
from simulator.costs.colocation.host_copies import PINNED_ERROR, copy_rate
from simulator.costs.colocation.refit import refit_s, refit_speed
from simulator.costs.colocation.trainer_state import move_s
from simulator.costs.lora.adapters import sent_weights
from simulator.costs.precision.numbers import engine_numbers

SLEEP: Final = "engine falls asleep"
RELOAD: Final = "reload trainer state"
OFFLOAD: Final = "offload trainer state"
WAKE: Final = "engine wakes up"
REFIT: Final = "refit weights"
GRAPHS: Final = "capture CUDA graphs"
OTHER: Final = "other work between phases"
TO_TRAINING: Final = (SLEEP, RELOAD)
"""In order."""
TO_GENERATION: Final = (OFFLOAD, WAKE, REFIT, GRAPHS, OTHER)
"""In order."""
_SETTINGS: Final[Mapping[str, str]] = MappingProxyType(
    {SLEEP: "sleep_s", RELOAD: "reload_s", OFFLOAD: "offload_s", WAKE: "wake_s", REFIT: "refit_s"}
)
OTHER_SYSTEMS: Final = 0.3
"""Mean relative error on published sums of other systems, which no term is fitted to (rows `whole`
of the table): 25 to 38 %, by the parallelism that they do not state.

Their models have 0.6 to 4B parameters. Measured steps of larger ones are longer by more than that,
in no term: 89 s beside 23 s of terms (32B on 32 H100), 138 s beside 19 s (7B on 16 H20). See
`colocation.other_s` and `reproductions.measured_runs`, rows N4 and V8."""
_SOURCE: Final = (
    "published seconds (simulator/costs/data/colocation.csv): engines that sleep (vLLM 2025-10), "
    "state in main memory (NeMo-RL, SGLang, torch_memory_saver 2026), refits (HybridFlow 2024-09; "
    "NeMo-RL, SkyRL, slime, verl 2025; Relax, vime 2026); sums were compared for models of at most "
    "4B, and measured steps of larger ones were longer by what no term names (colocation.other_s)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchCost:
    """Seconds in which GPUs neither generate nor train, by term and in order."""

    to_training: Mapping[str, float]
    to_generation: Mapping[str, float]
    error: float | None = None
    """Mean relative error of the sum; 0 if it was given, None if unknown."""
    provenance: str = ""

    def __post_init__(self) -> None:
        for terms in (self.to_training, self.to_generation):
            for name, seconds in terms.items():
                if not math.isfinite(seconds) or seconds < 0:
                    raise ValueError(f"{name} takes {seconds} s, but must be >= 0")

    @property
    def to_training_s(self) -> float:
        """Before a training step."""
        return sum(self.to_training.values())

    @property
    def to_generation_s(self) -> float:
        """After it, until the engines generate."""
        return sum(self.to_generation.values())

    @property
    def seconds(self) -> float:
        """Both ways."""
        return self.to_training_s + self.to_generation_s


def switch_cost(config: SimulationConfig, model: ModelShape, gpu: GPU) -> SwitchCost:
    """To training and back, once per training step.

    Raises:
        ValueError: no GPUs.
    """
    gpus = config.cluster.training_gpus
    if gpus < 1:
        raise ValueError(f"{gpus} GPUs cannot switch; there must be at least 1")
    modeled = _modeled(config, model, gpu)
    given = {
        name: seconds
        for name, setting in _SETTINGS.items()
        if (seconds := getattr(config.colocation, setting)) is not None
    }
    terms = {**modeled, **given}
    cost = SwitchCost(
        to_training={name: terms[name] for name in TO_TRAINING},
        to_generation={name: terms[name] for name in TO_GENERATION},
        error=_error(config, model, gpu, terms, given),
        provenance=_provenance(given),
    )
    switch_s = config.weights.switch_s
    if switch_s is None:
        return cost
    if cost.seconds == 0:
        return SwitchCost(
            to_training={}, to_generation={REFIT: switch_s}, error=0.0, provenance=_GIVEN
        )
    share = switch_s / cost.seconds
    return SwitchCost(
        to_training={name: share * seconds for name, seconds in cost.to_training.items()},
        to_generation={name: share * seconds for name, seconds in cost.to_generation.items()},
        error=0.0,
        provenance=_GIVEN,
    )


_GIVEN: Final = "weights.switch_s, divided into terms as modeled"


def _modeled(config: SimulationConfig, model: ModelShape, gpu: GPU) -> dict[str, float]:
    colocation, trainer = config.colocation, config.trainer
    gpus = config.cluster.training_gpus
    change_s = sleep_or_wake_s(
        colocation.sleep,
        model,
        gpu,
        tensor_parallel=config.rollout.tensor_parallel,
        gpus=gpus,
        numbers=engine_numbers(config),
    )
    offload_s, reload_s = (
        move_s(
            direction,
            colocation.offload,
            trainer,
            model,
            gpu,
            gpus=gpus,
            pinned=colocation.pinned,
        )
        for direction in ("to host", "to gpu")
    )
    return {
        SLEEP: change_s,
        RELOAD: reload_s,
        OFFLOAD: offload_s,
        WAKE: change_s,
        REFIT: refit_s(colocation.refit, model, sent_weights(config)),
        GRAPHS: colocation.graphs_s,
        OTHER: colocation.other_s,
    }


def _error(
    config: SimulationConfig,
    model: ModelShape,
    gpu: GPU,
    terms: Mapping[str, float],
    given: Mapping[str, float],
) -> float:
    """Relative error of the sum: of the terms that were not given, and from system to system."""
    gpus, pinned = config.cluster.training_gpus, config.colocation.pinned
    sleeping = PINNED_ERROR if config.colocation.sleep == "to_host" else sleep_start().error
    errors = {
        SLEEP: sleeping,
        WAKE: sleeping,
        RELOAD: copy_rate("to gpu", gpu, pinned=pinned, gpus=gpus).error,
        OFFLOAD: copy_rate("to host", gpu, pinned=pinned, gpus=gpus).error,
        REFIT: refit_speed(config.colocation.refit, mixture=bool(model.experts)).error,
    }
    total_s = sum(terms.values())
    if total_s == 0:
        return 0.0
    modeled = {name: terms[name] for name in errors if name not in given}
    wrong = [seconds * errors[name] for name, seconds in modeled.items()]
    return math.hypot(*wrong, OTHER_SYSTEMS * sum(modeled.values())) / total_s


def _provenance(given: Mapping[str, float]) -> str:
    names = ", ".join(f"colocation.{_SETTINGS[name]}" for name in given)
    if len(given) == len(_SETTINGS):
        return f"{names}, given"
    return f"{names}, given; {_SOURCE}" if given else _SOURCE
