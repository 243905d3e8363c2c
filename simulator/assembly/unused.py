"""Settings that were given and change nothing, for another setting replaces or excludes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from simulator.config.load import ALIASES
from simulator.config.schema import SimulationConfig


def ignored_settings(config: SimulationConfig) -> Iterator[str]:
    """A line for each that differs from its default and has no effect, with the mend."""
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
            "only colocated GPUs switch; use weights.update_s",
        ),
        (
            "rollout.engine_overhead_s",
            rollout.engine_overhead_s,
            rollout.decode_step_s is not None,
            "rollout.decode_step_s has the engine's CPU in it; leave one of them out",
        ),
        (
            "trainer.mfu",
            trainer.mfu,
            trainer.step_s is not None,
            "trainer.step_s replaces what it is for; leave one of them out",
        ),
        (
            "workload.tool.mean_s",
            workload.tool.mean_s or None,
            workload.turns == 1,
            "a sample of one turn calls no tool; raise workload.turns",
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
                    f"weights.{name} is {value}, but weights.update_s ({weights.update_s:g}) is "
                    "the whole update and only the proportion of its parts follows from it; leave "
                    "one of them out"
                )


def ignored_overrides(config: SimulationConfig, overrides: Sequence[str]) -> Iterator[str]:
    """The same of what is often in a file for another schedule, and is told if it was asked for."""
    keys = {one.partition("=")[0].strip() for one in overrides}
    asked = any(ALIASES.get(key, key) == "schedule.eta" for key in keys)
    schedule = config.schedule
    if asked and schedule.eta != schedule.versions_ahead:
        yield (
            f"schedule.eta is {schedule.eta:g}, but has no effect: of {schedule.name} it is always "
            f"{schedule.versions_ahead:g}; use schedule.name=asynchronous"
        )
