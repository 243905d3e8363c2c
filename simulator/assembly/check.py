"""Validate a simulation config: every problem at once, one line each, with the fix.

A field has checked its own value; here is what must fit together, and fit the hardware.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final

from areal_lab.config.problem import ConfigError, Kind, Problem, problems_of
from areal_lab.config.record import value_of
from areal_lab.control.schedule import OnNewWeights
from simulator.assembly.controller import wrong_controller
from simulator.assembly.engines import engine_cache_tokens, engine_decode, running_sequences
from simulator.assembly.limits import limits_of, schedule_of
from simulator.assembly.parts import part_trainer
from simulator.catalogue.find_gpu import find_gpu
from simulator.catalogue.gpu import GPU
from simulator.catalogue.models import ModelShape, find_model
from simulator.config.schema import SimulationConfig
from simulator.costs.colocation.switch import switch_cost
from simulator.costs.lora.adapters import check_adapters
from simulator.costs.precision.numbers import check_precision
from simulator.costs.speculation.draft import speculation_of
from simulator.costs.training import training_cost
from simulator.costs.weight_sync import weight_update
from simulator.workload.lengths import lengths_from
from simulator.workload.recorded_lengths import RecordedLengths

MOST_ANSWERS: Final = 100_000_000
"""Responses of one seed. The presets simulate 100,000 to 500,000 a second of one core
(`docs/log.md`)."""
MOST_AT_ONCE: Final = 1_000_000
"""Responses of a batch, or in flight; the paper's batches have 8,192."""
_WITH: Final = (
    ("rollout.decode_step_s", ("rollout.decode_sequence_s", "rollout.decode_context_token_s")),
    ("rollout.prefill_pass_s", ("rollout.prefill_token_s", "rollout.prefill_pair_s")),
    ("trainer.step_s", ("trainer.token_s",)),
)
"""Measured seconds, and what adds to them."""
_MOST_FAILURES: Final = 5
"""Expected while something is done that a failure restarts: it takes e^5 = 150 attempts."""
_LONG_ANSWER: Final = 4
"""Times the mean: about as long as the longest of some hundred responses."""


def check_config(config: SimulationConfig) -> None:
    """Refuse what cannot be simulated.

    Raises:
        ConfigError: with everything that `problems` finds.
    """
    if found := problems(config):
        raise ConfigError(*found)


def problems(config: SimulationConfig) -> list[Problem]:
    """What is impossible about a configuration; empty if nothing is.

    Placement and costs need a known GPU and model, and costs everything else.
    """
    found, workload = wrong_names(config), wrong_workload(config)
    if found:
        return found + workload
    gpu = find_gpu(config.cluster.gpu)
    rollout_gpu = find_gpu(config.cluster.generating_gpu)
    model = find_model(config.model)
    found = [*workload, *_placement(config, rollout_gpu), *_schedule(config)]
    if not found:
        found = list(_costs(config, model, gpu, rollout_gpu))
    if not found:
        found = list(_at_once(config, model, rollout_gpu))
    if not found and config.scaling.max_engines:
        found = list(_scaling(config))
    if not found and config.faults.node_mtbf_h:
        found = list(_failures(config, model, gpu, rollout_gpu))
    return found


def wrong_names(config: SimulationConfig) -> list[Problem]:
    """GPUs and models that are unknown."""
    cluster = config.cluster
    found = _refused("cluster.gpu", lambda: find_gpu(cluster.gpu))
    if cluster.rollout_gpu:
        found += _refused("cluster.rollout_gpu", lambda: find_gpu(cluster.rollout_gpu))
    return found + _refused("model", lambda: find_model(config.model))


def wrong_workload(config: SimulationConfig) -> list[Problem]:
    """What is wrong about a workload whatever it runs on."""
    return [
        *_sizes(config),
        *_lonely(config),
        *_refused("workload.answers", lambda: _check_lengths(config)),
    ]


def _sizes(config: SimulationConfig) -> Iterator[Problem]:
    workload = config.workload
    if workload.warmup_steps >= workload.steps:
        yield _wrong(
            "workload.warmup_steps",
            f"is {workload.warmup_steps}, but must be below workload.steps "
            f"({workload.steps}), or no step is left to average; raise steps",
        )
    if 0 < workload.turns_most < workload.turns:
        yield _wrong(
            "workload.turns_most",
            f"is {workload.turns_most}, but must be at least workload.turns ({workload.turns}), "
            "the mean; 0 gives every response that number",
        )
    batch = workload.prompts_per_batch * workload.samples_per_prompt
    if workload.minibatches > batch:
        yield _wrong(
            "workload.minibatches",
            f"is {workload.minibatches}, but a batch has only {batch} sequences "
            "(prompts_per_batch x samples_per_prompt)",
        )
    if batch > MOST_AT_ONCE:
        yield _wrong(
            "workload.prompts_per_batch",
            f"is {workload.prompts_per_batch:,}, but with samples_per_prompt "
            f"({workload.samples_per_prompt}) a batch must have at most {MOST_AT_ONCE:,} "
            "responses, which are held at once; lower one of them",
        )
    elif batch * max(workload.turns, workload.turns_most) * workload.steps > MOST_ANSWERS:
        yield _wrong(
            "workload.steps",
            f"is {workload.steps:,}, but steps x prompts_per_batch x samples_per_prompt x turns "
            f"must be at most {MOST_ANSWERS:,} responses, all of which are simulated; take fewer "
            "steps, about ten show how it continues",
        )


def _lonely(config: SimulationConfig) -> Iterator[Problem]:
    """Measured seconds that nothing is added to: the cost model would hide them."""
    for first, others in _WITH:
        if value_of(config, first) is None:
            for name in others:
                if value := value_of(config, name):
                    yield _wrong(name, f"is {value}, but needs {first} beside it")


def _check_lengths(config: SimulationConfig) -> None:
    lengths = lengths_from(config.workload.answers)
    if isinstance(lengths, RecordedLengths):
        lengths.check_samples(config.workload.samples_per_prompt)


def _placement(config: SimulationConfig, rollout_gpu: GPU) -> Iterator[Problem]:
    cluster, split = config.cluster, config.rollout.tensor_parallel
    rollout = cluster.generating_gpus
    most = cluster.gpus if cluster.hybrid_gpus else cluster.gpus - 1
    if not cluster.colocated and not 1 <= rollout <= most:
        yield _wrong(
            "cluster.rollout_gpus",
            f"is {rollout}, but must be from 1 to {most}: of cluster.gpus ({cluster.gpus}) at "
            "least one trains; or use placement: colocated",
            Kind.PLACEMENT,
        )
    elif rollout % split:
        lower = rollout // split * split
        nearest = f"{lower} or {lower + split}" if lower else str(split)
        yield _wrong(
            "cluster.gpus" if cluster.colocated else "cluster.rollout_gpus",
            f"is {rollout}, but must be a multiple of rollout.tensor_parallel ({split}); "
            f"use {nearest}, or another tensor_parallel",
            Kind.DIVISIBILITY,
        )
    if cluster.colocated and cluster.rollout_gpu not in ("", cluster.gpu):
        yield _wrong(
            "cluster.rollout_gpu",
            f"is {cluster.rollout_gpu!r}, but colocated GPUs generate and train: leave it empty, "
            "or use placement: disaggregated",
            Kind.PLACEMENT,
        )
    if cluster.hybrid_gpus and not cluster.colocated:
        yield from _hybrid(config)
    node = rollout_gpu.node_gpus
    if split > node and split % node:
        yield _wrong(
            "rollout.tensor_parallel",
            f"is {split}, but a node of {rollout_gpu.name} has {node} GPUs, and a larger engine "
            f"takes whole nodes; use {node} or {math.ceil(split / node) * node}",
            Kind.PLACEMENT,
        )


def _hybrid(config: SimulationConfig) -> Iterator[Problem]:
    """GPUs that cannot join the training of a step."""
    cluster, hybrid = config.cluster, config.cluster.hybrid_gpus
    setting, split = "cluster.hybrid_gpus", config.rollout.tensor_parallel
    if hybrid > cluster.rollout_gpus:
        yield _wrong(
            setting,
            f"is {hybrid}, but must be at most cluster.rollout_gpus ({cluster.rollout_gpus}), of "
            "which they are a part",
            Kind.PLACEMENT,
        )
    elif hybrid == cluster.gpus:
        yield _wrong(
            setting,
            f"is {hybrid}, all GPUs, which then alternate between generation and training: use "
            "placement: colocated, with schedule synchronous or partial_rollout",
            Kind.PLACEMENT,
        )
    elif hybrid % split:
        lower = hybrid // split * split
        yield _wrong(
            setting,
            f"is {hybrid}, but must be a multiple of rollout.tensor_parallel ({split}); use "
            f"{lower or split} or {lower + split}",
            Kind.DIVISIBILITY,
        )
    if cluster.rollout_gpu not in ("", cluster.gpu):
        yield _wrong(
            "cluster.rollout_gpu",
            f"is {cluster.rollout_gpu!r}, but hybrid GPUs (cluster.hybrid_gpus) generate and train "
            "with the others: leave it empty, or set cluster.hybrid_gpus to 0",
            Kind.PLACEMENT,
        )
    if config.faults.node_mtbf_h:
        yield _wrong(
            "faults.node_mtbf_h",
            f"is {config.faults.node_mtbf_h:g}, but failures of hybrid GPUs are not simulated: "
            "set it or cluster.hybrid_gpus to 0",
        )


def _hybrid_schedule(config: SimulationConfig) -> Iterator[Problem]:
    """Schedules under which GPUs cannot join the training of a step."""
    if schedule_of(config.schedule).on_new_weights is not OnNewWeights.INTERRUPT:
        yield _wrong(
            "cluster.hybrid_gpus",
            f"is {config.cluster.hybrid_gpus}, but this schedule waits for responses to end before "
            "an update, and hybrid GPUs pause theirs until it is over; use schedule asynchronous "
            "with interruptible: true, or 0",
        )
    if config.batch_parts > 1:
        yield _wrong(
            "schedule.require_batches",
            f"is {config.schedule.require_batches}, but hybrid GPUs generate the responses of all "
            "minibatches before they train: set it or cluster.hybrid_gpus to 0",
        )


def _schedule(config: SimulationConfig) -> Iterator[Problem]:
    schedule = config.schedule
    found = list(_parts(config)) if schedule.require_batches else []
    found += wrong_controller(config)
    if config.cluster.hybrid_gpus and not config.cluster.colocated:
        found += _hybrid_schedule(config)
    yield from found
    if found:
        return
    if config.cluster.colocated and schedule_of(schedule).overlaps:
        yield _wrong(
            "schedule.name",
            f"is {schedule.name!r}, which generates while it trains, but colocated GPUs do one or "
            "the other; use placement: disaggregated, or schedule synchronous",
            Kind.PLACEMENT,
        )
    try:
        limits_of(config)
    except ValueError as error:
        yield _wrong("schedule.max_lag", f"schedule.{error}")


def _parts(config: SimulationConfig) -> Iterator[Problem]:
    """Batches that cannot be trained on in parts."""
    workload, taken = config.workload, config.schedule.require_batches
    if workload.minibatches % taken:
        yield _wrong(
            "schedule.require_batches",
            f"is {taken}, but must divide workload.minibatches ({workload.minibatches}), so that "
            "the trainer takes as many minibatches each time; 0 waits for the whole batch",
            Kind.DIVISIBILITY,
        )
        return
    parts = config.batch_parts
    if parts == 1:
        return
    if workload.prompts_per_batch % parts:
        lower = workload.prompts_per_batch // parts * parts
        yield _wrong(
            "workload.prompts_per_batch",
            f"is {workload.prompts_per_batch}, but must be a multiple of {parts}, the parts in "
            f"which the trainer takes a batch (workload.minibatches {workload.minibatches} / "
            f"schedule.require_batches {taken}); use {lower or parts} or {lower + parts}",
            Kind.DIVISIBILITY,
        )
    if config.cluster.colocated:
        yield _wrong(
            "schedule.require_batches",
            f"is {taken}, which generates while it trains, but colocated GPUs do one or the other; "
            "use placement: disaggregated, or 0",
            Kind.PLACEMENT,
        )
    elif config.schedule.name == "partial_rollout":
        yield _wrong(
            "schedule.require_batches",
            f"is {taken}, but schedule partial_rollout pauses generation while it trains, so that "
            "no prompt would finish meanwhile; use schedule asynchronous, or 0",
        )


def _scaling(config: SimulationConfig) -> Iterator[Problem]:
    """Engines that cannot join and leave."""
    setting, scaling, cluster = "scaling.max_engines", config.scaling, config.cluster
    engines = cluster.generating_gpus // config.rollout.tensor_parallel
    if not scaling.min_engines <= engines <= scaling.max_engines:
        yield _wrong(
            setting,
            f"is {scaling.max_engines}, and min_engines {scaling.min_engines}, but the engines at "
            f"first ({engines}: cluster.rollout_gpus / rollout.tensor_parallel) must be from "
            "min_engines to max_engines",
        )
    if cluster.switches or config.faults.node_mtbf_h:
        yield _wrong(
            setting,
            f"is {scaling.max_engines}, but engines whose GPUs also train or fail are simulated "
            "in a fixed number; use placement: disaggregated, cluster.hybrid_gpus 0 and "
            "faults.node_mtbf_h 0, or scaling.max_engines 0",
        )
    if config.controller.kind == "spmd":
        yield _wrong(
            setting,
            f"is {scaling.max_engines}, but ranks keep their engines (controller.kind=spmd); use "
            "another controller.kind, or 0",
        )
    if config.schedule.versions_ahead < 1:
        yield _wrong(
            setting,
            f"is {scaling.max_engines}, but with schedule.eta {config.schedule.versions_ahead:g} "
            "the trainer waits for engines however many there are; use eta >= 1, or 0",
        )


def _at_once(config: SimulationConfig, model: ModelShape, rollout_gpu: GPU) -> Iterator[Problem]:
    """More responses in flight than are simulated in reasonable time."""
    workload, schedule = config.workload, config.schedule
    engines = config.cluster.generating_gpus // config.rollout.tensor_parallel
    engines = max(engines, config.scaling.max_engines)
    slots = engines * running_sequences(config, model, rollout_gpu)
    by_engines = schedule.max_concurrent_prompts * workload.samples_per_prompt or slots
    batch = workload.prompts_per_batch * workload.samples_per_prompt
    responses = min(max(batch, by_engines), (1 + schedule.versions_ahead) * batch)
    if responses > MOST_AT_ONCE:
        yield Problem(
            Kind.SETTINGS,
            "schedule.max_concurrent_prompts",
            f"{responses:,.0f} responses would be generated at once, but at most {MOST_AT_ONCE:,} "
            "are simulated; lower schedule.max_concurrent_prompts, schedule.eta or the GPUs that "
            "generate",
        )


def _costs(
    config: SimulationConfig, model: ModelShape, gpu: GPU, rollout_gpu: GPU
) -> Iterator[Problem]:
    workload, cluster = config.workload, config.cluster
    longest = workload.prompt_tokens + workload.answers.max_tokens
    longest += workload.tool_tokens * ((workload.turns_most or workload.turns) - 1)
    gpus = cluster.training_gpus
    yield from _refused("rollout.weight_precision", lambda: check_precision(config, rollout_gpu))
    if wrong := _refused("trainer.lora_rank", lambda: check_adapters(config)):
        yield from wrong
        return
    if wrong := _refused("rollout.speculative_tokens", lambda: speculation_of(config)):
        yield from wrong
        return
    yield from _refused(
        "rollout",
        lambda: engine_cache_tokens(config, model, rollout_gpu, longest_tokens=longest),
    )
    sequences = workload.prompts_per_batch * workload.samples_per_prompt
    trainer = _refused(
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
    yield from trainer
    if cluster.switches and not trainer:  # whose layout it moves
        yield from _refused("weights", lambda: switch_cost(config, model, gpu))
    if cluster.sends_weights:
        yield from _refused("weights", lambda: weight_update(config, model, gpu))


def _failures(
    config: SimulationConfig, model: ModelShape, gpu: GPU, rollout_gpu: GPU
) -> Iterator[Problem]:
    """Work that failures end nearly always: it restarts again and again, and the run never ends."""
    workload, mtbf_h = config.workload, config.faults.node_mtbf_h
    mean_tokens = lengths_from(workload.answers).mean_tokens()
    gpus = config.cluster.training_gpus
    nodes = math.ceil(gpus / gpu.node_gpus)
    parts = config.batch_parts
    sequences = workload.prompts_per_batch * workload.samples_per_prompt // parts
    lengths = [workload.prompt_tokens + round(mean_tokens)] * sequences
    training = training_cost(part_trainer(config.trainer, parts), model, gpu, gpus)
    # A failure during a part of a batch undoes the parts before it, too.
    step_s = parts * training.step(lengths, minibatches=workload.minibatches // parts).seconds
    yield from _fails(f"a training step of {step_s:,.0f} s", step_s, nodes, mtbf_h)
    decode = engine_decode(config, model, rollout_gpu)
    tokens = round(min(workload.answers.max_tokens, _LONG_ANSWER * mean_tokens))
    seconds = tokens * decode.step_s(1, workload.prompt_tokens + tokens / 2)
    yield from _fails(f"a response of {tokens:,} tokens in {seconds:,.0f} s", seconds, 1, mtbf_h)


def _fails(what: str, seconds: float, nodes: int, mtbf_h: float) -> Iterator[Problem]:
    failures = seconds * nodes / (3600 * mtbf_h)
    if failures > _MOST_FAILURES:
        least = seconds * nodes / 3600 / _MOST_FAILURES
        yield _wrong(
            "faults.node_mtbf_h",
            f"is {mtbf_h:g}, but {what} on {nodes} node{'s' * (nodes > 1)} then has "
            f"{failures:,.3g} failures and hardly ever ends; at most {_MOST_FAILURES} may be "
            f"expected: raise it to at least {least:.3g}",
        )


def _wrong(setting: str, text: str, kind: Kind = Kind.SETTINGS) -> Problem:
    return Problem(kind, setting, f"{setting} {text}")


def _refused(setting: str, make: Callable[[], object]) -> list[Problem]:
    """What a part of the cost model says about its own numbers."""
    try:
        make()
    except ValueError as error:
        return list(problems_of(error, setting))
    return []
