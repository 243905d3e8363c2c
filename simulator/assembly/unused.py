"""Warn about settings that have no effect because another setting overrides them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, TypeAlias

from areal_lab.config.record import value_of
from simulator.config.load import ALIASES
from simulator.config.schema import ControllerConfig, LengthConfig, SimulationConfig, TrainerConfig

_Row: TypeAlias = tuple[str, object, bool, str]
"""A setting, its value (None if it is the default), whether it has no effect, and why."""
_STEP: Final = "trainer.step_s is the whole step; leave one of them out"
_DECODE: Final = "rollout.decode_step_s includes the engine's CPU time; leave one of them out"
_MEASURED: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "sleep": ("sleep_s", "wake_s"),
        "offload": ("offload_s", "reload_s"),
        "pinned": ("offload_s", "reload_s"),
        "refit": ("refit_s",),
    }
)
"""Settings of `colocation`, and the measured times that together replace what each determines."""


def ignored_settings(config: SimulationConfig) -> Iterator[str]:
    """One line per setting that differs from its default but has no effect, with a fix."""
    for name, value, excluded, why in (
        *_schedule_rows(config),
        *_rollout_rows(config),
        *_trainer_rows(config),
        *_weights_rows(config),
        *_outside_rows(config),
        *_controller_rows(config),
    ):
        if value is not None and excluded:
            yield f"{name} is {_shown(value)}, but has no effect: {why}"
    yield from _ignored_turns(config)
    yield from _ignored_spread(config.workload.answers)
    yield from _ignored_colocation(config)
    weights = config.weights
    if weights.update_s is not None and config.cluster.sends_weights:
        for name in ("export_s", "load_s"):
            value = getattr(weights, name)
            if value is not None:
                yield (
                    f"weights.{name} is {value}, but weights.update_s ({weights.update_s:g}) gives "
                    "the whole update, so that it only changes the proportion of its parts; leave "
                    "one of them out"
                )


def _shown(value: object) -> object:
    return str(value).lower() if isinstance(value, bool) else value


def _schedule_rows(config: SimulationConfig) -> Iterator[_Row]:
    schedule, minibatches = config.schedule, config.workload.minibatches
    bound = "schedule.batch_order=bounded_lag"
    yield from (
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
            "cluster.hybrid_gpus",
            config.cluster.hybrid_gpus or None,
            config.cluster.colocated,
            "all GPUs are colocated and train; use cluster.placement=disaggregated",
        ),
    )


def _rollout_rows(config: SimulationConfig) -> Iterator[_Row]:
    rollout = config.rollout
    measured = rollout.decode_step_s is not None
    yield ("rollout.engine_overhead_s", rollout.engine_overhead_s, measured, _DECODE)
    yield ("rollout.engine_sequence_s", rollout.engine_sequence_s, measured, _DECODE)
    yield ("rollout.engine_overlap", rollout.engine_overlap, measured, _DECODE)
    # A measured CPU time leaves the engine's way to overlap it.
    given = rollout.engine_overhead_s is not None and rollout.engine_overlap is not None
    yield (
        "rollout.engine",
        None if rollout.engine == "default" else rollout.engine,
        measured or given,
        "measured times replace the engine's; leave one of them out",
    )
    yield (
        "rollout.cuda_graphs",
        None if rollout.cuda_graphs else False,
        measured,
        "rollout.decode_step_s includes the launches; leave one of them out",
    )


def _trainer_rows(config: SimulationConfig) -> Iterator[_Row]:
    trainer, usual = config.trainer, TrainerConfig()
    measured = trainer.step_s is not None
    for name in ("time_factor", "fixed_s", "balance"):
        value = getattr(trainer, name)
        yield (f"trainer.{name}", None if value == getattr(usual, name) else value, measured, _STEP)
    yield (
        "trainer.mfu",
        trainer.mfu,
        measured,
        "trainer.step_s replaces it; leave one of them out",
    )
    # What alternating GPUs move to main memory depends on the trainer's state.
    only_step = measured and not config.cluster.switches
    yield (
        "trainer.kind",
        None if trainer.kind == usual.kind else trainer.kind,
        only_step,
        _STEP,
    )
    yield (
        "trainer.lora_rank",
        trainer.lora_rank or None,
        only_step and config.weights.merge_adapters,
        "trainer.step_s is the whole step, and all weights are sent (weights.merge_adapters); "
        "leave both out",
    )
    yield (
        "trainer.precision",
        None if trainer.precision == usual.precision else trainer.precision,
        measured or trainer.mfu is not None,
        _STEP if measured else "trainer.mfu is a share of the bf16 peak; leave one of them out",
    )
    yield (
        "trainer.pipeline_chunks",
        None if trainer.pipeline_chunks == 1 else trainer.pipeline_chunks,
        trainer.pipeline_parallel == 1,
        "one stage has no bubble; raise trainer.pipeline_parallel",
    )
    yield (
        "trainer.expert_imbalance",
        trainer.expert_imbalance,
        trainer.expert_parallel == 1,
        "without trainer.expert_parallel every GPU has all experts",
    )


def _weights_rows(config: SimulationConfig) -> Iterator[_Row]:
    weights, cluster = config.weights, config.cluster
    yield (
        "weights.switch_s",
        weights.switch_s,
        not cluster.switches,
        "only colocated and hybrid GPUs switch; use weights.update_s instead",
    )
    for name in ("update_s", "export_s", "load_s"):
        yield (
            f"weights.{name}",
            getattr(weights, name),
            not cluster.sends_weights,
            "all GPUs that generate also train, and refit; use colocation.refit_s",
        )
    # Engines that discard their weights need merged ones, however long the refit takes.
    needed = config.colocation.sleep == "discard"
    for name in ("merge_adapters", "quantize_before_sending"):
        yield (
            f"weights.{name}",
            getattr(weights, name) or None,
            not (cluster.sends_weights or config.colocation.refit_s is None or needed),
            "colocation.refit_s is the whole refit; leave one of them out",
        )


def _outside_rows(config: SimulationConfig) -> Iterator[_Row]:
    outside = config.outside
    for what, seconds, steps in (
        ("validation", outside.validation_s, outside.validation_steps),
        ("checkpoint", outside.checkpoint_s, outside.checkpoint_steps),
    ):
        yield (
            f"outside.{what}_s",
            seconds or None,
            not steps,
            f"there is no {what}; set outside.{what}_steps",
        )
        yield (
            f"outside.{what}_steps",
            steps or None,
            not seconds,
            f"a {what} takes no time; set outside.{what}_s",
        )


def _controller_rows(config: SimulationConfig) -> Iterator[_Row]:
    controller, usual = config.controller, ControllerConfig()
    network = controller.network_bytes_per_s
    yield (
        "controller.ranks",
        controller.ranks or None,
        controller.kind != "spmd",
        "only ranks without a controller have programs of their own; use controller.kind=spmd",
    )
    yield (
        "controller.inputs",
        controller.inputs or None,
        controller.kind == "none",
        "the controller takes no time; set controller.kind",
    )
    yield (
        "controller.network_bytes_per_s",
        None if network == usual.network_bytes_per_s else network,
        controller.kind in ("none", "spmd"),
        f"with controller.kind={controller.kind} responses do not travel; use single or metadata",
    )


def _ignored_turns(config: SimulationConfig) -> Iterator[str]:
    if config.workload.turns > 1:
        return
    for name in (
        *("workload.tool.mean_s", "workload.tool_tokens", "workload.turns_most"),
        *("rollout.turn_prefix_cache", "rollout.max_samples"),
    ):
        if value := value_of(config, name):
            yield (
                f"{name} is {_shown(value)}, but has no effect: responses have one turn; raise "
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
    colocation, switch_s = config.colocation, config.weights.switch_s
    given = colocation.model_dump(exclude_defaults=True)
    if config.cluster.switches and switch_s is None:
        for name, measured in _MEASURED.items():
            if name in given and all(getattr(colocation, one) is not None for one in measured):
                yield (
                    f"colocation.{name} is {_shown(given[name])}, but has no effect: "
                    f"{' and '.join(f'colocation.{one}' for one in measured)} replace what it "
                    "determines; leave it out"
                )
            elif name == "pinned" and name in given and colocation.offload == "none":
                yield (
                    "colocation.pinned is true, but has no effect: nothing of the trainer is moved "
                    "to main memory; use colocation.offload=all or optimizer"
                )
        return
    for name, value in given.items():
        said = f"colocation.{name} is {_shown(value)}, but"
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
