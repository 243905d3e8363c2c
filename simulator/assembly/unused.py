"""Warn about settings that have no effect because another setting overrides them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from areal_lab.config.record import value_of
from simulator.config.load import ALIASES
from simulator.config.schema import LengthConfig, SimulationConfig


def ignored_settings(config: SimulationConfig) -> Iterator[str]:
    """One line per setting that differs from its default but has no effect, with a fix."""
    rollout, trainer, weights = config.rollout, config.trainer, config.weights
    outside = config.outside
    schedule, minibatches = config.schedule, config.workload.minibatches
    bound = "schedule.batch_order=bounded_lag"
    for name, value, excluded, why in (
        (
            "schedule.max_lag",
            schedule.max_lag or None,
            schedule.batch_order != "bounded_lag",
            f"schedule.batch_order is {schedule.batch_order}; use {bound}",
        ),
        (
            "schedule.drop_late",
            schedule.drop_late or None,
            schedule.batch_order != "bounded_lag",
            f"schedule.batch_order is {schedule.batch_order}; use {bound}",
        ),
        (
            "schedule.require_batches",
            schedule.require_batches or None,
            schedule.require_batches == minibatches,
            f"a batch has {minibatches} minibatch{'es' * (minibatches > 1)} "
            "(workload.minibatches), so the trainer waits for all of it; lower it, or leave it out",
        ),
        (
            "weights.switch_s",
            weights.switch_s,
            not config.cluster.switches,
            "only colocated and hybrid GPUs switch; use weights.update_s instead",
        ),
        (
            "cluster.hybrid_gpus",
            config.cluster.hybrid_gpus or None,
            config.cluster.colocated,
            "all GPUs are colocated and train; use cluster.placement=disaggregated",
        ),
        (
            "outside.validation_s",
            outside.validation_s or None,
            not outside.validation_steps,
            "there is no validation; set outside.validation_steps",
        ),
        (
            "outside.checkpoint_s",
            outside.checkpoint_s or None,
            not outside.checkpoint_steps,
            "there is no checkpoint; set outside.checkpoint_steps",
        ),
        (
            "rollout.engine_overhead_s",
            rollout.engine_overhead_s,
            rollout.decode_step_s is not None,
            "rollout.decode_step_s includes the engine's CPU time; leave one of them out",
        ),
        (
            "rollout.engine_sequence_s",
            rollout.engine_sequence_s,
            rollout.decode_step_s is not None,
            "rollout.decode_step_s includes the engine's CPU time; leave one of them out",
        ),
        (
            "rollout.engine",
            None if rollout.engine == "default" else rollout.engine,
            rollout.decode_step_s is not None or rollout.engine_overhead_s is not None,
            "measured times replace the engine's; leave one of them out",
        ),
        (
            "rollout.cuda_graphs",
            None if rollout.cuda_graphs else "false",
            rollout.decode_step_s is not None,
            "rollout.decode_step_s includes the launches; leave one of them out",
        ),
        (
            "trainer.mfu",
            trainer.mfu,
            trainer.step_s is not None,
            "trainer.step_s replaces it; leave one of them out",
        ),
        (
            "trainer.time_factor",
            None if trainer.time_factor == 1 else trainer.time_factor,
            trainer.step_s is not None,
            "trainer.step_s is the whole step; leave one of them out",
        ),
        (
            "trainer.fixed_s",
            trainer.fixed_s or None,
            trainer.step_s is not None,
            "trainer.step_s is the whole step; leave one of them out",
        ),
        (
            "trainer.expert_imbalance",
            trainer.expert_imbalance,
            trainer.expert_parallel == 1,
            "without trainer.expert_parallel every GPU has all experts",
        ),
    ):
        if value is not None and excluded:
            shown = "true" if value is True else value
            yield f"{name} is {shown}, but has no effect: {why}"
    yield from _ignored_turns(config)
    yield from _ignored_spread(config.workload.answers)
    yield from _ignored_colocation(config)
    if weights.update_s is not None:
        for name in ("export_s", "load_s"):
            value = getattr(weights, name)
            if value is not None:
                yield (
                    f"weights.{name} is {value}, but weights.update_s ({weights.update_s:g}) gives "
                    "the whole update, so that it only changes the proportion of its parts; leave "
                    "one of them out"
                )


def _ignored_turns(config: SimulationConfig) -> Iterator[str]:
    if config.workload.turns > 1:
        return
    for name in (
        *("workload.tool.mean_s", "workload.tool_tokens", "workload.turns_most"),
        *("rollout.turn_prefix_cache", "rollout.max_samples"),
    ):
        if value := value_of(config, name):
            shown = "true" if value is True else value
            yield (
                f"{name} is {shown}, but has no effect: responses have one turn; raise "
                "workload.turns"
            )


def _ignored_spread(answers: LengthConfig) -> Iterator[str]:
    """Spreads of lengths that another setting overrides."""
    sigma = "" if answers.sigma == LengthConfig().sigma else f"{answers.sigma:g}"
    share = "" if answers.truncated_share is None else f"{answers.truncated_share:g}"
    given = {"sigma": sigma, "tail": answers.tail, "truncated_share": share}
    said = "workload.answers.{} is {}, but has no effect: {}"
    if answers.kind != "lognormal":
        why = f"lengths of kind {answers.kind} have their own spread; use kind: lognormal"
        for name in ("tail", "truncated_share"):
            if given[name]:
                yield said.format(name, given[name], why)
        return
    for name, others in (("truncated_share", ("tail", "sigma")), ("tail", ("sigma",))):
        if given[name]:
            why = f"workload.answers.{name} determines the spread; leave one of them out"
            for other in others:
                if given[other]:
                    yield said.format(other, given[other], why)
            return


def _ignored_colocation(config: SimulationConfig) -> Iterator[str]:
    """Settings of colocated and hybrid GPUs that change nothing, or only proportions."""
    switch_s = config.weights.switch_s
    if config.cluster.switches and switch_s is None:
        return
    for name, value in config.colocation.model_dump(exclude_defaults=True).items():
        shown = str(value).lower() if isinstance(value, bool) else value
        said = f"colocation.{name} is {shown}, but"
        if not config.cluster.switches:
            yield (
                f"{said} has no effect: GPUs are not colocated; use cluster.placement=colocated or "
                "cluster.hybrid_gpus"
            )
        else:
            yield (
                f"{said} weights.switch_s ({switch_s:g}) gives the whole switch, so that it only "
                "changes the proportion of its terms; leave one of them out"
            )


def ignored_overrides(config: SimulationConfig, overrides: Sequence[str]) -> Iterator[str]:
    """The same for `schedule.eta`, which files often contain: only if it was given explicitly."""
    keys = {one.partition("=")[0].strip() for one in overrides}
    asked = any(ALIASES.get(key, key) == "schedule.eta" for key in keys)
    schedule = config.schedule
    if asked and schedule.eta != schedule.versions_ahead:
        yield (
            f"schedule.eta is {schedule.eta:g}, but has no effect: with {schedule.name} it is "
            f"always {schedule.versions_ahead:g}; use schedule.name=asynchronous"
        )
