"""Warn about settings that have no effect because another setting overrides them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from simulator.config.load import ALIASES
from simulator.config.schema import SimulationConfig


def ignored_settings(config: SimulationConfig) -> Iterator[str]:
    """One line per setting that differs from its default but has no effect, with a fix."""
    rollout, trainer, weights = config.rollout, config.trainer, config.weights
    schedule, workload = config.schedule, config.workload
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
            "weights.switch_s",
            weights.switch_s,
            not config.cluster.colocated,
            "only colocated GPUs switch; use weights.update_s instead",
        ),
        (
            "rollout.engine_overhead_s",
            rollout.engine_overhead_s,
            rollout.decode_step_s is not None,
            "rollout.decode_step_s includes the engine's CPU time; leave one of them out",
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
        (
            "workload.tool.mean_s",
            workload.tool.mean_s or None,
            workload.turns == 1,
            "samples of one turn call no tool; raise workload.turns",
        ),
    ):
        if value is not None and excluded:
            shown = "true" if value is True else value
            yield f"{name} is {shown}, but has no effect: {why}"
    if weights.update_s is not None:
        for name in ("export_s", "load_s"):
            value = getattr(weights, name)
            if value is not None:
                yield (
                    f"weights.{name} is {value}, but weights.update_s ({weights.update_s:g}) gives "
                    "the whole update, so that it only changes the proportion of its parts; leave "
                    "one of them out"
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
