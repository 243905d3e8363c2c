"""What cannot be, said before anything is simulated: one line each, with the bound and the mend."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final

from areal_lab.config.suggest import did_you_mean
from areal_lab.control.order import ORDERS
from areal_lab.control.routing import ROUTINGS
from areal_lab.control.schedule import SCHEDULES
from simulator.assembly.engines import engine_decode, running_sequences
from simulator.assembly.limits import limits_of, schedule_of
from simulator.catalogue.find_gpu import find_gpu
from simulator.catalogue.gpu import GPU
from simulator.catalogue.models import ModelShape, find_model
from simulator.config.bounds import MOST_AT_ONCE, wrong_numbers
from simulator.config.schema import SimulationConfig
from simulator.costs.colocation import switch_cost
from simulator.costs.engine_memory import cache_tokens
from simulator.costs.training import training_cost
from simulator.costs.weight_sync import weight_sync
from simulator.workload.latency import latency_from
from simulator.workload.lengths import lengths_from
from simulator.workload.recorded_lengths import RecordedLengths

PLACEMENTS: Final = ("disaggregated", "colocated")

_MOST_FAILURES: Final = 5
"""Expected while something is done that a failure lets begin again: it takes e^5 = 150 attempts."""
_LONG_ANSWER: Final = 4
"""Times the mean: about as long as the longest of some hundred answers."""


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
    found = [*wrong_workload(config), *_placement(config, rollout_gpu), *_schedule(config)]
    if not found:
        found = list(_costs(config, model, gpu, rollout_gpu))
    if not found:
        found = list(_at_once(config, model, rollout_gpu))
    if not found and config.faults.node_mtbf_h:
        found = list(_failures(config, model, gpu, rollout_gpu))
    return found


def wrong_values(config: SimulationConfig) -> list[str]:
    """Numbers and names that are wrong whatever the others are, one line each."""
    return [*wrong_numbers(config), *_names(config)]


def _names(config: SimulationConfig) -> Iterator[str]:
    cluster, schedule = config.cluster, config.schedule
    for name, value, known in (
        ("cluster.placement", cluster.placement, PLACEMENTS),
        ("schedule.name", schedule.name, SCHEDULES),
        ("schedule.batch_order", schedule.batch_order, ORDERS),
        ("rollout.routing", config.rollout.routing, tuple(ROUTINGS)),
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


def _placement(config: SimulationConfig, rollout_gpu: GPU) -> Iterator[str]:
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
    if split > rollout_gpu.node_gpus:
        yield (
            f"rollout.tensor_parallel is {split}, but a node of {rollout_gpu.name} has "
            f"{rollout_gpu.node_gpus} GPUs and an engine does not reach beyond it"
        )


def _schedule(config: SimulationConfig) -> Iterator[str]:
    schedule = config.schedule
    if config.cluster.placement == "colocated" and schedule_of(schedule).overlaps:
        yield (
            f"schedule.name is {schedule.name!r}, which generates while it trains, but colocated "
            "GPUs do one or the other; use placement: disaggregated, or schedule synchronous"
        )
    try:
        limits_of(config)
    except ValueError as error:
        yield f"schedule.{error}"


def _at_once(config: SimulationConfig, model: ModelShape, rollout_gpu: GPU) -> Iterator[str]:
    """More answers in flight than are simulated in reasonable time."""
    workload, cluster, schedule = config.workload, config.cluster, config.schedule
    gpus = cluster.gpus if cluster.placement == "colocated" else cluster.rollout_gpus
    places = gpus // config.rollout.tensor_parallel * running_sequences(config, model, rollout_gpu)
    by_engines = schedule.max_concurrent_prompts * workload.samples_per_prompt or places
    batch = workload.prompts_per_batch * workload.samples_per_prompt
    answers = min(max(batch, by_engines), (1 + schedule.versions_ahead) * batch)
    if answers > MOST_AT_ONCE:
        yield (
            f"{answers:,.0f} answers would be generated at once, but at most {MOST_AT_ONCE:,} are "
            "simulated; lower schedule.max_concurrent_prompts, schedule.eta or the GPUs that "
            "generate"
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
    gpus = _training_gpus(config)
    sequences = workload.prompts_per_batch * workload.samples_per_prompt
    yield from _refused(
        "trainer",
        lambda: training_cost(
            config.trainer,
            model,
            gpu,
            gpus,
            longest_tokens=longest,
            fewest_sequences=sequences // workload.minibatches,
        ),
    )
    if cluster.placement == "colocated":
        yield from _refused("weights", lambda: switch_cost(config.weights, model, gpu, gpus))
    else:
        yield from _refused("weights", lambda: weight_sync(config.weights, model, gpu))


def _training_gpus(config: SimulationConfig) -> int:
    cluster = config.cluster
    return cluster.gpus - (cluster.rollout_gpus if cluster.placement == "disaggregated" else 0)


def _failures(
    config: SimulationConfig, model: ModelShape, gpu: GPU, rollout_gpu: GPU
) -> Iterator[str]:
    """Work that failures end nearly always: it begins again and again, and the run never ends."""
    workload, mtbf_h = config.workload, config.faults.node_mtbf_h
    mean_tokens = lengths_from(workload.answers).mean_tokens()
    gpus = _training_gpus(config)
    nodes = math.ceil(gpus / gpu.node_gpus)
    sequences = workload.prompts_per_batch * workload.samples_per_prompt
    lengths = [workload.prompt_tokens + round(mean_tokens)] * sequences
    training = training_cost(config.trainer, model, gpu, gpus)
    step_s = training.step(lengths, minibatches=workload.minibatches).seconds
    yield from _fails(f"a training step of {step_s:,.0f} s", step_s, nodes, mtbf_h)
    decode = engine_decode(config, model, rollout_gpu)
    tokens = round(min(workload.answers.max_tokens, _LONG_ANSWER * mean_tokens))
    answer_s = tokens * decode.step_s(1, workload.prompt_tokens + tokens / 2)
    yield from _fails(f"an answer of {tokens:,} tokens in {answer_s:,.0f} s", answer_s, 1, mtbf_h)


def _fails(what: str, seconds: float, nodes: int, mtbf_h: float) -> Iterator[str]:
    failures = seconds * nodes / (3600 * mtbf_h)
    if failures > _MOST_FAILURES:
        least = seconds * nodes / 3600 / _MOST_FAILURES
        yield (
            f"faults.node_mtbf_h is {mtbf_h:g}, but {what} on {nodes} node{'s' * (nodes > 1)} then "
            f"has {failures:,.3g} failures and hardly ever ends; at most {_MOST_FAILURES} may be "
            f"expected: raise it to at least {least:.3g}"
        )


def _refused(name: str, make: Callable[[], object]) -> Iterator[str]:
    """What a part of the cost model says about its own numbers."""
    try:
        make()
    except ValueError as error:
        text = str(error)
        yield text if text.startswith(name) else f"{name}: {text}"
