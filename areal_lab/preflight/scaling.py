"""Whether engines can join and leave while a run continues."""

from __future__ import annotations

from collections.abc import Iterator

from areal_lab.config.problem import Kind, Problem
from areal_lab.config.schema import TrainConfig
from areal_lab.preflight.allocation import engine_plan
from areal_lab.preflight.limits import schedule_of
from areal_lab.preflight.placement import machine_of, place_engines, place_trainer, runs_on_hosts

_SETTING = "rollout.scaling.max_engines"


def check_scaling(config: TrainConfig) -> Iterator[Problem]:
    """Check the bounds, the schedule and the room of more engines; call it after
    `check_placement`."""
    scaling, plan = config.rollout.scaling, engine_plan(config)
    if not (most := scaling.max_engines):
        return
    if config.rollout.addresses:
        yield Problem(
            Kind.SETTINGS,
            _SETTING,
            f"{_SETTING} is {most}, but a run starts no engines beside those of rollout.addresses; "
            "leave one of them out",
        )
        return
    if not scaling.min_engines <= plan.servers <= most:
        yield Problem(
            Kind.SETTINGS,
            _SETTING,
            f"the run starts with {plan.servers} engines, but rollout.scaling keeps "
            f"{scaling.min_engines} (min_engines) to {most} (max_engines) of them; change these, "
            "or rollout.engines",
        )
    schedule = schedule_of(config)
    if plan.shared or schedule.eta < 1:
        yield Problem(
            Kind.SETTINGS,
            _SETTING,
            f"{_SETTING} is {most}, but "
            + (
                "engines and trainer share devices"
                if plan.shared
                else f"schedule {schedule.name} with eta {schedule.eta:g} makes the trainer wait "
                "for engines however many there are"
            )
            + "; use rollout.schedule=asynchronous with eta >= 1 and devices of their own, or 0",
        )
        return
    machine = machine_of(config)
    if not runs_on_hosts(config) and place_engines(config, machine).device == "cuda":
        needed = most * plan.tensor_parallel + len(place_trainer(config, machine).gpus)
        if needed > len(machine.gpus):
            yield Problem(
                Kind.PLACEMENT,
                _SETTING,
                f"{_SETTING} is {most}, but engines and trainer would then need {needed} GPUs of "
                f"the {len(machine.gpus)} here; lower it",
            )
