"""Switch of colocated or hybrid GPUs from generation to training and back, as a sum of terms.

Seconds in which an engine falls asleep and wakes up.

    to_host    weights are copied to pinned memory and back: vLLM's sleep level 1
    discard    memory is only unmapped and mapped again; a refit brings the weights: vLLM's level 2,
               SGLang's release_memory_occupation
    none       the engine keeps its memory, and training fits beside it

The cache is discarded in both ways, and the process, its CUDA context and graphs are kept.

Seconds to move the trainer's state to the host and back.

Gradients are released, not copied, as Megatron-Core and verl do.

Seconds of a refit: new weights from the trainer's layout into the engine on the same GPUs.

    seconds = start + bytes of the weights / rate + matrices of experts x seconds of one

Gathering over ranks, converting names and layouts, handles to the engine, copies inside the GPU.
Sending each matrix of the experts alone takes most of the time of a mixture; packing many into one
buffer saves it (48 to 6 s and 60 to 7 s for Qwen3-30B-A3B).

Each term has a setting with which a measurement replaces it; `weights.switch_s` replaces the sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Final, NamedTuple

from simulator.catalogue.gpu import GPU
from simulator.catalogue.transformer import ModelShape
from simulator.config.schema import Offload, Refit, SimulationConfig, Sleep, TrainerConfig
from simulator.costs.host_copies import PINNED_ERROR, Direction, copy_rate, relative_fit, rows_of
from simulator.costs.trainers import SPEEDS
from simulator.costs.training_layout import training_memory
from simulator.costs.weight_bytes import BF16, EngineNumbers, Sent, engine_numbers, sent_weights
from simulator.costs.weight_sync import NODES_EXPONENT


class SleepStart(NamedTuple):
    """Seconds of a change without the copy of the weights."""

    seconds: float
    error: float
    """Error on the wake-ups of engines on one A100, with the copies."""


@cache
def sleep_start() -> SleepStart:
    """Seconds to map the memory and to respond, from engines that wake alone on their host."""
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
    """Seconds until all engines sleep, or until all are awake: both take the same."""
    if sleep == "none":
        return 0.0
    start_s = sleep_start().seconds
    if sleep == "discard":
        return start_s
    held = numbers.weight_bytes(model) / tensor_parallel
    return start_s + held / copy_rate("to host", gpu, pinned=True, gpus=gpus).bytes_per_s


@cache
def move_start_s() -> float:
    """Seconds of a move besides its copies: memory cleared, process groups ended or started."""
    rows = rows_of("start")
    return sum(row.seconds for row in rows) / len(rows)


def offloaded_bytes(
    offload: Offload, config: TrainerConfig, model: ModelShape, *, gpus: int
) -> float:
    """Bytes that one GPU moves: optimizer state, and with `all` the parameters that it holds.

    A reference that is kept in the host's memory is there already.
    """
    if offload == "none":
        return 0.0
    speed = SPEEDS[config.kind]
    memory = training_memory(
        model,
        config,
        gpus=gpus,
        micro_batch_tokens=0,
        fully_sharded=speed.gathers,
        reference_on_host=speed.reference_on_host,
    )
    return memory.optimizer + (memory.parameters if offload == "all" else 0.0)


def move_s(
    direction: Direction,
    offload: Offload,
    config: TrainerConfig,
    model: ModelShape,
    gpu: GPU,
    *,
    gpus: int,
    pinned: bool,
) -> float:
    """Seconds to move the state in one direction."""
    if offload == "none":
        return 0.0
    moved = offloaded_bytes(offload, config, model, gpus=gpus)
    rate = copy_rate(direction, gpu, pinned=pinned, gpus=gpus)
    return move_start_s() + moved / rate.bytes_per_s


class RefitSpeed(NamedTuple):
    """Coefficients of a way to refit."""

    start_s: float
    bytes_per_s: float
    expert_matrix_s: float
    error: float
    """Mean absolute relative error on the published rows: of dense models, or of mixtures."""

    def seconds(self, weight_bytes: float, expert_matrices: int) -> float:
        """Seconds for one model."""
        copied_s = self.start_s + weight_bytes / self.bytes_per_s
        return copied_s + expert_matrices * self.expert_matrix_s


@cache
def refit_speed(refit: Refit, *, mixture: bool) -> RefitSpeed:
    """Start and rate fitted to dense models, and the time of an expert's matrix to mixtures."""
    dense = rows_of("refit dense")
    (start_s, byte_s), error = relative_fit(
        [[1.0] * len(dense), [row.bytes for row in dense]], [row.seconds for row in dense]
    )
    plain = RefitSpeed(float(start_s), float(1 / byte_s), 0.0, error)
    if not mixture:
        return plain
    rows = rows_of("refit packed" if refit == "packed" else "refit by tensor")
    # What the dense model leaves, as a share of each row.
    left = [1 - plain.seconds(row.bytes, 0) / row.seconds for row in rows]
    per_matrix = [row.tensors / row.seconds for row in rows]
    matrix_s = sum(a * b for a, b in zip(per_matrix, left, strict=True)) / sum(
        a * a for a in per_matrix
    )
    speed = plain._replace(expert_matrix_s=max(0.0, matrix_s))
    errors = [abs(speed.seconds(row.bytes, row.tensors) / row.seconds - 1) for row in rows]
    return speed._replace(error=sum(errors) / len(errors))


def expert_matrices(model: ModelShape) -> int:
    """Matrices of all routed experts of a model."""
    return model.moe_layers * model.experts * (3 if model.gated else 2)


REFIT_GPUS: Final = 128
"""GPUs of the largest published refit (NeMo-RL, 16 nodes of 8). On more of them, the rate of a
mixture grows as that of its broadcasts does (`weight_sync.NODES_EXPONENT`): DeepSeek-V3 on 256 and
512 H100 leaves at most 48 and 41 s of its steps for a refit that takes 85 s at the rate of the
published ones."""


def refit_s(refit: Refit, model: ModelShape, sent: Sent = BF16, *, gpus: int = REFIT_GPUS) -> float:
    """Seconds of one refit of a model of which this travels, on this many GPUs."""
    speed = refit_speed(refit, mixture=bool(model.experts))
    seconds = speed.seconds(sent.weight_bytes(model), expert_matrices(model))
    more = math.pow(max(1.0, gpus / REFIT_GPUS), NODES_EXPONENT) if model.experts else 1.0
    return speed.start_s + (seconds - speed.start_s) / more


SLEEP: Final = "engine falls asleep"
RELOAD: Final = "reload trainer state"
OFFLOAD: Final = "offload trainer state"
WAKE: Final = "engine wakes up"
REFIT: Final = "refit weights"
GRAPHS: Final = "capture CUDA graphs"
OTHER: Final = "other work between phases"
TO_TRAINING: Final = (SLEEP, RELOAD)
"""Terms before training, in order."""
TO_GENERATION: Final = (OFFLOAD, WAKE, REFIT, GRAPHS, OTHER)
"""Terms before generation, in order."""
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
        """Seconds before a training step."""
        return sum(self.to_training.values())

    @property
    def to_generation_s(self) -> float:
        """Seconds after a training step, until the engines generate."""
        return sum(self.to_generation.values())

    @property
    def seconds(self) -> float:
        """Both ways."""
        return self.to_training_s + self.to_generation_s


def switch_cost(config: SimulationConfig, model: ModelShape, gpu: GPU) -> SwitchCost:
    """Cost of switching to training and back, once per training step."""
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
        REFIT: refit_s(colocation.refit, model, sent_weights(config), gpus=gpus),
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
