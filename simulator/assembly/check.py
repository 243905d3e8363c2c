"""Validate a simulation config: every problem at once, one line each, with a fix.

A field has checked its own value, and each cost checks its own part when `build` makes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from areal_lab.config.problem import Kind, Problem
from areal_lab.config.record import value_of
from areal_lab.control.schedule import OnNewWeights
from simulator.assembly.engines import Engines
from simulator.catalogue.gpu import GPU
from simulator.config.schema import SimulationConfig, WorkloadConfig
from simulator.costs.controller import ControllerCost
from simulator.costs.training_timing import Training

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


def wrong_numbers(config: SimulationConfig) -> Iterator[Problem]:
    """Numbers of a workload that do not fit together, whatever it runs on."""
    yield from _sizes(config)
    yield from _lonely(config)


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


def wrong_placement(config: SimulationConfig, rollout_gpu: GPU) -> Iterator[Problem]:
    """GPUs that cannot be divided as the cluster says."""
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


def wrong_hybrid_schedule(config: SimulationConfig) -> Iterator[Problem]:
    """Schedules under which GPUs cannot join the training of a step."""
    if config.cluster.colocated or not config.cluster.hybrid_gpus:
        return
    if config.schedule.policy.on_new_weights is not OnNewWeights.INTERRUPT:
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


def wrong_overlap(config: SimulationConfig) -> Iterator[Problem]:
    """Schedules that generate while they train, on GPUs that do one or the other."""
    if config.cluster.colocated and config.schedule.policy.overlaps:
        yield _wrong(
            "schedule.name",
            f"is {config.schedule.name!r}, which generates while it trains, but colocated GPUs do "
            "one or the other; use placement: disaggregated, or schedule synchronous",
            Kind.PLACEMENT,
        )


def wrong_parts(config: SimulationConfig) -> Iterator[Problem]:
    """Batches that cannot be trained on in parts."""
    workload, taken = config.workload, config.schedule.require_batches
    if taken and workload.minibatches % taken:
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


def wrong_ranks(config: SimulationConfig, controller: ControllerCost | None) -> Iterator[Problem]:
    """Programs that do not share everything equally, or that need one controller."""
    if controller is None or controller.kind != "spmd":
        return
    ranks, most = controller.readers, controller.receivers
    yield from list(_divided(config, ranks, most)) or list(_shares(config, ranks))
    yield from _together(config, ranks)


def _divided(config: SimulationConfig, ranks: int, most: int) -> Iterator[Problem]:
    cluster, rollout, workload = config.cluster, config.rollout, config.workload
    engines = cluster.generating_gpus // rollout.tensor_parallel
    prompts = workload.prompts_per_batch
    if most % ranks or engines % ranks or prompts % ranks:
        yield Problem(
            Kind.DIVISIBILITY,
            "controller.ranks",
            f"controller.ranks is {ranks}, but must divide the data-parallel ranks of the trainer "
            f"({most}), the engines ({engines}) and the prompts of a batch ({prompts}), of which "
            f"each rank has an equal share; {math.gcd(most, engines, prompts)} does, and what "
            "divides it",
        )


def _shares(config: SimulationConfig, ranks: int) -> Iterator[Problem]:
    workload = config.workload
    share = workload.prompts_per_batch // ranks * workload.samples_per_prompt
    if share < workload.minibatches:
        yield Problem(
            Kind.SETTINGS,
            "workload.minibatches",
            f"workload.minibatches is {workload.minibatches}, but each of {ranks} ranks "
            f"(controller.kind=spmd) has only {share} responses of a batch; lower it",
        )
    if 0 < (at_once := config.schedule.max_concurrent_prompts) < ranks:
        yield Problem(
            Kind.SETTINGS,
            "schedule.max_concurrent_prompts",
            f"schedule.max_concurrent_prompts is {at_once}, but each of {ranks} ranks "
            "(controller.kind=spmd) needs one or more; raise it",
        )


def _together(config: SimulationConfig, ranks: int) -> Iterator[Problem]:
    named, schedule = config.schedule, config.schedule.policy
    if schedule.on_new_weights is not OnNewWeights.INTERRUPT or schedule.carry_over:
        yield _alone(
            "schedule.name",
            f"{named.name!r} (interruptible: {str(named.interruptible).lower()}), under which "
            f"{ranks} ranks would pause and load at different times; use synchronous, or "
            "asynchronous with interruptible: true",
        )
    for setting, value, unused in (
        ("schedule.require_batches", named.require_batches if config.batch_parts > 1 else 0, 0),
        ("cluster.hybrid_gpus", 0 if config.cluster.colocated else config.cluster.hybrid_gpus, 0),
        ("faults.node_mtbf_h", config.faults.node_mtbf_h, 0),
    ):
        if value:
            yield _alone(setting, f"{value:g}, but needs one controller; set it to {unused}")


def _alone(setting: str, text: str) -> Problem:
    return Problem(
        Kind.SETTINGS, setting, f"{setting} is {text}, or use another controller.kind than spmd"
    )


def wrong_scaling(config: SimulationConfig) -> Iterator[Problem]:
    """Engines that cannot join and leave."""
    setting, scaling, cluster = "scaling.max_engines", config.scaling, config.cluster
    if not scaling.max_engines:
        return
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


def wrong_in_flight(config: SimulationConfig, slots: int) -> Iterator[Problem]:
    """More responses in flight than are simulated in reasonable time."""
    workload, schedule = config.workload, config.schedule
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


def longest_tokens(workload: WorkloadConfig) -> int:
    """Tokens of the longest sequence: prompt, response, and results of tools between turns."""
    results = workload.tool_tokens * (workload.most_turns - 1)
    return workload.prompt_tokens + workload.answers.max_tokens + results


def wrong_failures(
    config: SimulationConfig, training: Training, engines: Engines, nodes: int
) -> Iterator[Problem]:
    """Work that failures end nearly always: it restarts again and again, and the run never ends."""
    workload, mtbf_h = config.workload, config.faults.node_mtbf_h
    if not mtbf_h:
        return
    parts, mean_tokens = config.batch_parts, engines.lengths.mean_tokens()
    sequences = workload.prompts_per_batch * workload.samples_per_prompt // parts
    lengths = [workload.prompt_tokens + round(mean_tokens)] * sequences
    # A failure during a part of a batch undoes the parts before it, too.
    step_s = parts * training.step(lengths, minibatches=workload.minibatches // parts).seconds
    yield from _fails(f"a training step of {step_s:,.0f} s", step_s, nodes, mtbf_h)
    tokens = round(min(workload.answers.max_tokens, _LONG_ANSWER * mean_tokens))
    seconds = tokens * engines.decode().step_s(1, workload.prompt_tokens + tokens / 2)
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
