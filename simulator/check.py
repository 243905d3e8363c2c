"""What cannot be, said before anything is simulated: one line each, with the bound and the mend."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final

from areal_lab.capacity import lag_bound
from simulator.config import SimulationConfig
from simulator.gpu import GPU
from simulator.hardware import find_gpu
from simulator.latency import latency_from
from simulator.lengths import lengths_from
from simulator.memory import cache_tokens
from simulator.model_shape import ModelShape, find_model
from simulator.nearest import did_you_mean
from simulator.recorded_lengths import RecordedLengths
from simulator.switch_cost import switch_cost
from simulator.training_cost import training_cost
from simulator.weight_sync import weight_sync

PLACEMENTS: Final = ("disaggregated", "colocated")
SCHEDULES: Final = ("synchronous", "one_step_overlap", "asynchronous", "partial_rollout")
ORDERS: Final = ("oldest_finished_first", "strict_start_order", "bounded_lag")

_WHOLE_AND_POSITIVE: Final = (
    *("workload.prompts_per_batch", "workload.samples_per_prompt", "workload.minibatches"),
    *("workload.steps", "workload.turns", "cluster.gpus", "rollout.tensor_parallel"),
    *("trainer.tensor_parallel", "trainer.pipeline_parallel", "trainer.micro_batch_tokens"),
    *("trainer.micro_batches", "seeds"),
)
_WHOLE_OR_NONE: Final = (
    *("workload.prompt_tokens", "workload.warmup_steps", "workload.reward_workers"),
    *("rollout.max_running", "schedule.max_concurrent_prompts", "seed"),
)
_NOT_NEGATIVE: Final = (
    *("cluster.price_per_gpu_h", "cluster.overhead", "rollout.engine_overhead_s"),
    *("rollout.decode_sequence_s", "rollout.decode_context_token_s", "rollout.prefill_pass_s"),
    *("rollout.prefill_token_s", "rollout.prefill_pair_s", "trainer.token_s"),
    *("weights.update_s", "weights.export_s", "weights.load_s"),
    *("weights.poll_s", "weights.switch_s", "schedule.max_lag"),
    *("faults.node_mtbf_h", "faults.detection_s", "faults.restart_s"),
    *("calibration.decode_error", "calibration.prefill_error", "calibration.training_error"),
)
_WITH: Final = (
    ("rollout.decode_step_s", ("rollout.decode_sequence_s", "rollout.decode_context_token_s")),
    ("rollout.prefill_pass_s", ("rollout.prefill_token_s", "rollout.prefill_pair_s")),
    ("trainer.step_s", ("trainer.token_s",)),
)
"""Measured seconds, and what adds to them."""
_POSITIVE: Final = ("rollout.decode_step_s", "trainer.step_s")


def check_config(config: SimulationConfig) -> None:
    """Refuse what cannot be simulated.

    Raises:
        ValueError: everything that `problems` finds, one line each.
    """
    found = problems(config)
    if found:
        raise ValueError("\n".join(found))


def problems(config: SimulationConfig) -> list[str]:
    """What is impossible about a configuration, one line each; empty if nothing is.

    Sizes and names come first: with a wrong one of these nothing else can be looked at.
    """
    found = wrong_values(config)
    if found:
        return found
    gpu = find_gpu(config.cluster.gpu)
    rollout_gpu = find_gpu(config.cluster.rollout_gpu or config.cluster.gpu)
    model = find_model(config.model)
    found = [*wrong_workload(config), *_placement(config, gpu), *_schedule(config)]
    if found:
        return found
    return list(_costs(config, model, gpu, rollout_gpu))


def wrong_values(config: SimulationConfig) -> list[str]:
    """Numbers and names that are wrong whatever the others are, one line each."""
    return [*_numbers(config), *_names(config)]


def _numbers(config: SimulationConfig) -> Iterator[str]:
    for name in _WHOLE_AND_POSITIVE:
        yield from _bound(config, name, lambda value: value >= 1, ">= 1")
    for name in _WHOLE_OR_NONE:
        yield from _bound(config, name, lambda value: value >= 0, ">= 0")
    for name in _NOT_NEGATIVE:
        yield from _bound(config, name, lambda value: value >= 0, "a number >= 0")
    for name in _POSITIVE:
        yield from _bound(config, name, lambda value: value > 0, "> 0")
    knee = config.rollout.decode_knee
    if math.isnan(knee) or knee < 1:
        yield f"rollout.decode_knee is {knee}, but must be >= 1; 1 adds, inf takes the larger"
    yield from _lonely(config)
    eta = config.schedule.eta
    if math.isnan(eta) or eta < 0:
        yield (
            f"schedule.eta is {eta}, but a staleness bound is a number of versions >= 0; "
            "0 is synchronous, inf has no bound"
        )


def _lonely(config: SimulationConfig) -> Iterator[str]:
    """Measured seconds that nothing is added to: the cost model would hide them."""
    for first, others in _WITH:
        if _value(config, first) is None:
            for name in others:
                if _value(config, name) not in (None, 0):
                    yield f"{name} is {_value(config, name)}, but needs {first} beside it"


def _value(config: SimulationConfig, name: str) -> object:
    value: object = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _bound(
    config: SimulationConfig, name: str, holds: Callable[[float], bool], bound: str
) -> Iterator[str]:
    value = _value(config, name)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        yield f"{name} is {value!r}, but must be a number {bound}"
    elif not math.isfinite(value) or not holds(value):
        yield f"{name} is {value}, but must be {bound}"


def _names(config: SimulationConfig) -> Iterator[str]:
    cluster, schedule = config.cluster, config.schedule
    for name, value, known in (
        ("cluster.placement", cluster.placement, PLACEMENTS),
        ("schedule.name", schedule.name, SCHEDULES),
        ("schedule.batch_order", schedule.batch_order, ORDERS),
    ):
        if value not in known:
            yield f"{name} is {value!r}; {did_you_mean(value, known)}"
    yield from _refused("cluster.gpu", lambda: find_gpu(cluster.gpu))
    if cluster.rollout_gpu:
        yield from _refused("cluster.rollout_gpu", lambda: find_gpu(cluster.rollout_gpu))
    yield from _refused("model", lambda: find_model(config.model))


def wrong_workload(config: SimulationConfig) -> Iterator[str]:
    """What is wrong about a workload whatever it runs on, one line each."""
    workload = config.workload
    if workload.warmup_steps >= workload.steps:
        yield (
            f"workload.warmup_steps is {workload.warmup_steps}, but must be below workload.steps "
            f"({workload.steps}), or no step is left to average; raise steps"
        )
    sequences = workload.prompts_per_batch * workload.samples_per_prompt
    if workload.minibatches > sequences:
        yield (
            f"workload.minibatches is {workload.minibatches}, but a batch has only {sequences} "
            "sequences (prompts_per_batch x samples_per_prompt)"
        )
    yield from _refused("workload.answers", lambda: _check_lengths(config))
    yield from _refused("workload.reward", lambda: latency_from(workload.reward))
    yield from _refused("workload.tool", lambda: latency_from(workload.tool))


def _check_lengths(config: SimulationConfig) -> None:
    lengths = lengths_from(config.workload.answers)
    if isinstance(lengths, RecordedLengths):
        lengths.check_samples(config.workload.samples_per_prompt)


def _placement(config: SimulationConfig, gpu: GPU) -> Iterator[str]:
    cluster, split = config.cluster, config.rollout.tensor_parallel
    colocated = cluster.placement == "colocated"
    rollout = cluster.gpus if colocated else cluster.rollout_gpus
    which = "cluster.gpus" if colocated else "cluster.rollout_gpus"
    if not colocated and not 1 <= rollout < cluster.gpus:
        yield (
            f"cluster.rollout_gpus is {rollout}, but must be from 1 to {cluster.gpus - 1}: of "
            f"cluster.gpus ({cluster.gpus}) at least one trains; or use placement: colocated"
        )
    elif rollout % split:
        lower = rollout // split * split
        nearest = f"{lower} or {lower + split}" if lower else str(split)
        yield (
            f"{which} is {rollout}, which is no multiple of rollout.tensor_parallel ({split}); "
            f"use {nearest}, or another tensor_parallel"
        )
    if colocated and cluster.rollout_gpu not in ("", cluster.gpu):
        yield (
            f"cluster.rollout_gpu is {cluster.rollout_gpu!r}, but colocated GPUs generate and "
            f"train: leave it empty, or use placement: disaggregated"
        )
    if split > gpu.node_gpus:
        yield (
            f"rollout.tensor_parallel is {split}, but a node of {gpu.name} has {gpu.node_gpus} "
            "GPUs and an engine does not reach beyond it"
        )


def _schedule(config: SimulationConfig) -> Iterator[str]:
    schedule = config.schedule
    overlaps = schedule.name == "one_step_overlap" or (
        schedule.name == "asynchronous" and schedule.eta > 0
    )
    if config.cluster.placement == "colocated" and overlaps:
        yield (
            f"schedule.name is {schedule.name!r}, which generates while it trains, but colocated "
            "GPUs do one or the other; use placement: disaggregated, or schedule synchronous"
        )
    if schedule.batch_order == "bounded_lag" and not schedule.drop_late:
        ahead = lag_bound(
            {"synchronous": 0.0, "one_step_overlap": 1.0}.get(schedule.name, schedule.eta)
        )
        bound = schedule.max_lag or ahead
        if bound < ahead:
            yield (
                f"schedule.max_lag is {bound:g}, but eta starts groups {ahead:g} versions ahead, "
                f"which waiting cannot undo; raise max_lag to {ahead:g}, lower eta, or set "
                "drop_late"
            )


def _costs(
    config: SimulationConfig, model: ModelShape, gpu: GPU, rollout_gpu: GPU
) -> Iterator[str]:
    workload, rollout, cluster = config.workload, config.rollout, config.cluster
    longest = workload.prompt_tokens + workload.answers.max_tokens
    yield from _refused(
        "rollout",
        lambda: cache_tokens(
            model,
            rollout_gpu,
            rollout.tensor_parallel,
            rollout.memory_utilization,
            longest_tokens=longest,
        ),
    )
    gpus = cluster.gpus
    if cluster.placement == "disaggregated":
        gpus -= cluster.rollout_gpus
    yield from _refused(
        "trainer",
        lambda: training_cost(config.trainer, model, gpu, gpus, longest_tokens=longest),
    )
    if cluster.placement == "colocated":
        yield from _refused("weights", lambda: switch_cost(config.weights, model, gpu, gpus))
    else:
        yield from _refused("weights", lambda: weight_sync(config.weights, model, gpu))


def _refused(name: str, make: Callable[[], object]) -> Iterator[str]:
    """What a part of the cost model says about its own numbers."""
    try:
        make()
    except ValueError as error:
        text = str(error)
        yield text if text.startswith(name) else f"{name}: {text}"
