"""Warn about settings that have no effect because another setting overrides them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, TypeAlias

from areal_lab.config.record import value_of
from simulator.config.load import ALIASES
from simulator.config.schema import DriftConfig, LengthConfig, SimulationConfig

_Row: TypeAlias = tuple[str, bool, str]
"""A setting, whether it has no effect, and why."""
_USUAL: Final = SimulationConfig()
_DECODE: Final = "rollout.decode_step_s includes the engine's CPU time; leave one of them out"
_STEP: Final = "trainer.step_s is the whole step; leave one of them out"
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
    for name, excluded, why in (
        *_schedule_rows(config),
        *_rollout_rows(config),
        *_trainer_rows(config),
        *_weights_rows(config),
        *_outside_rows(config),
        *_controller_rows(config),
    ):
        value = value_of(config, name)
        if excluded and value != value_of(_USUAL, name):
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
    order = f"schedule.batch_order is {schedule.batch_order}; use schedule.batch_order=bounded_lag"
    for name in ("max_lag", "on_late"):
        yield f"schedule.{name}", schedule.batch_order != "bounded_lag", order
    bounded = schedule.name == "bounded_drift"
    drift = [f"workload.drift.{name}" for name in DriftConfig.model_fields]
    for name in ("schedule.max_drift", "schedule.min_eta", *drift):
        yield name, not bounded, f"schedule.name is {schedule.name}; use bounded_drift"
    yield (
        "schedule.require_batches",
        schedule.require_batches == minibatches,
        f"a batch has {minibatches} minibatch{'es' * (minibatches > 1)} "
        "(workload.minibatches), so the trainer waits for all of it; lower it, or leave it out",
    )
    yield (
        "cluster.hybrid_gpus",
        config.cluster.colocated,
        "all GPUs are colocated and train; use cluster.placement=disaggregated",
    )


def _rollout_rows(config: SimulationConfig) -> Iterator[_Row]:
    rollout = config.rollout
    measured = rollout.decode_step_s is not None
    for name in ("engine_overhead_s", "engine_sequence_s", "engine_overlap"):
        yield f"rollout.{name}", measured, _DECODE
    # A measured CPU time leaves the engine's way to overlap it.
    given = rollout.engine_overhead_s is not None and rollout.engine_overlap is not None
    why = "measured times replace the engine's; leave one of them out"
    yield "rollout.engine", measured or given, why
    why = "rollout.decode_step_s includes the launches; leave one of them out"
    yield "rollout.cuda_graphs", measured, why


def _trainer_rows(config: SimulationConfig) -> Iterator[_Row]:
    trainer = config.trainer
    measured = trainer.step_s is not None
    for name in ("time_factor", "fixed_s", "balance"):
        yield f"trainer.{name}", measured, _STEP
    yield "trainer.mfu", measured, "trainer.step_s replaces it; leave one of them out"
    # What alternating GPUs move to main memory depends on the trainer's state.
    only_step = measured and not config.cluster.switches
    yield "trainer.kind", only_step, _STEP
    yield (
        "trainer.lora_rank",
        only_step and config.weights.merge_adapters,
        "trainer.step_s is the whole step, and all weights are sent (weights.merge_adapters); "
        "leave both out",
    )
    why = "trainer.mfu is a share of the bf16 peak; leave one of them out"
    excluded = measured or trainer.mfu is not None
    yield "trainer.precision", excluded, _STEP if measured else why
    yield (
        "trainer.pipeline_chunks",
        trainer.pipeline_parallel == 1,
        "one stage has no bubble; raise trainer.pipeline_parallel",
    )
    yield (
        "trainer.expert_imbalance",
        trainer.expert_parallel == 1,
        "without trainer.expert_parallel every GPU has all experts",
    )


def _weights_rows(config: SimulationConfig) -> Iterator[_Row]:
    cluster, colocation = config.cluster, config.colocation
    why = "only colocated and hybrid GPUs switch; use weights.update_s instead"
    yield "weights.switch_s", not cluster.switches, why
    why = "all GPUs that generate also train, and refit; use colocation.refit_s"
    for name in ("update_s", "export_s", "load_s"):
        yield f"weights.{name}", not cluster.sends_weights, why
    # Engines that discard their weights need merged ones, however long the refit takes.
    needed = colocation.sleep == "discard"
    excluded = not (cluster.sends_weights or colocation.refit_s is None or needed)
    for name in ("merge_adapters", "quantize_before_sending"):
        yield (
            f"weights.{name}",
            excluded,
            "colocation.refit_s is the whole refit; leave one of them out",
        )


def _outside_rows(config: SimulationConfig) -> Iterator[_Row]:
    for what in ("validation", "checkpoint"):
        seconds, steps = f"outside.{what}_s", f"outside.{what}_steps"
        yield seconds, not value_of(config, steps), f"there is no {what}; set {steps}"
        yield steps, not value_of(config, seconds), f"a {what} takes no time; set {seconds}"


def _controller_rows(config: SimulationConfig) -> Iterator[_Row]:
    kind = config.controller.kind
    yield (
        "controller.ranks",
        kind != "spmd",
        "only ranks without a controller have programs of their own; use controller.kind=spmd",
    )
    why = "the controller takes no time; set controller.kind"
    yield "controller.inputs", kind == "none", why
    yield (
        "controller.network_bytes_per_s",
        kind in ("none", "spmd"),
        f"with controller.kind={kind} responses do not travel; use single or metadata",
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
