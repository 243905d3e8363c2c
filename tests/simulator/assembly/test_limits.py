"""A run and its simulation get the same limits from the same settings, or both get none."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal_lab.config.schema import DatasetConfig, RolloutConfig, TrainConfig
from areal_lab.config.sections import ScalingConfig
from areal_lab.control.drift import DriftBound
from areal_lab.control.limits import Limits
from areal_lab.control.order import (
    ON_LATE,
    ORDERS,
    BatchOrder,
    bounded_lag,
    oldest_finished_first,
    order_named,
)
from areal_lab.control.routing import ROUTINGS, round_robin
from areal_lab.control.scaling import ScalingRule
from areal_lab.control.schedule import (
    FIXED_ETA,
    SCHEDULES,
    Schedule,
    asynchronous,
    bounded_drift,
    one_step_overlap,
    schedule_named,
)
from areal_lab.resolve import limits as run
from areal_lab.runlog.read_run import RecordedRun
from areal_lab.runlog.records import Log, RunHeader
from areal_lab.runlog.replay import limits_to_fields
from simulator.assembly import build as simulation
from simulator.config import schema
from simulator.workload.recorded_run import recorded_settings

ETAS = (0.0, 0.5, 1.0, 2.5, 4.0, math.inf)
MAX_LAGS = (0.0, 0.5, 1.0, 2.0, 3.0, 6.0)
"""As a configuration has them: 0 stands for eta."""


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_and_its_simulation_have_equal_limits(schedule: str, order: str) -> None:
    built = 0
    for eta, max_lag, on_late, interruptible, routing in itertools.product(
        ETAS, MAX_LAGS, ON_LATE, (False, True), ROUTINGS
    ):
        config = TrainConfig(
            total_train_steps=7,
            dataset=DatasetConfig(batch_size=3),
            rollout=RolloutConfig(
                schedule=schedule,
                max_head_offpolicyness=eta,
                interruptible=interruptible,
                batch_order=order,
                max_lag=max_lag,
                on_late=on_late,
                routing=routing,
                max_concurrent_rollouts=5,
            ),
        )
        of_run = limits_or_error(run.limits_of, config)
        of_simulation = limits_or_error(
            simulation.limits_of,
            schema.SimulationConfig(
                workload=schema.WorkloadConfig(prompts_per_batch=3, steps=7, whole_run=True),
                rollout=schema.RolloutConfig(routing=routing),
                schedule=schema.ScheduleConfig(
                    name=schedule,
                    eta=eta,
                    interruptible=interruptible,
                    batch_order=order,
                    max_lag=max_lag,
                    on_late=on_late,
                    max_concurrent_prompts=5,
                ),
            ),
        )
        assert of_run == of_simulation
        if isinstance(of_run, Limits):
            built += 1
            config.rollout = RolloutConfig().with_settings(run.rollout_settings(of_run))
            assert run.limits_of(config) == of_run
    assert built


def limits_or_error(make: Callable[[Any], Limits], config: object) -> Limits | str:
    try:
        return make(config)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("order", [oldest_finished_first(), bounded_lag(2), bounded_lag(0, "drop")])
@pytest.mark.parametrize(
    "schedule",
    [
        one_step_overlap(),
        asynchronous(2, interruptible=False),
        bounded_drift(DriftBound(max_drift=0.05, min_eta=1, max_eta=2), interruptible=False),
    ],
)
def test_the_simulation_of_a_recorded_run_has_its_limits(
    schedule: Schedule, order: BatchOrder
) -> None:
    limits = Limits(
        batch_groups=3,
        max_in_flight=5,
        train_steps=7,
        schedule=schedule,
        order=order,
        routing=round_robin(),
    )
    header = RunHeader(mode="train", started_at=0.0, limits=limits_to_fields(limits), processes=())
    settings = recorded_settings(RecordedRun(Path("run"), Log(header, ())))
    settings["workload.steps"] = 7  # no step of this run was recorded
    config = schema.SimulationConfig().with_settings(settings)
    assert simulation.limits_of(config) == dataclasses.replace(limits, train_steps=None)


def test_bounded_lag_takes_the_eta_of_the_schedule() -> None:
    for name, eta in FIXED_ETA.items():
        schedule = schedule_named(name, eta=4.0)
        assert order_named("bounded_lag", schedule).max_lag == schedule.eta == eta
    assert order_named("bounded_lag", schedule_named("asynchronous", eta=2.5)).max_lag == 3


def test_bounded_lag_without_any_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="eta is infinite, which gives no bound; set max_lag"):
        order_named("bounded_lag", schedule_named("asynchronous", eta=math.inf))


def test_a_scaling_rule_has_every_setting() -> None:
    given = {"min_engines": 2, "max_engines": 7, "window_steps": 5, "cooldown_steps": 3}
    rule = ScalingConfig(tolerance=0.2, **given).rule(9.0)
    assert rule == ScalingRule(tolerance=0.2, startup_s=9.0, **given)
    assert ScalingConfig().rule(9.0) is None


def test_names_are_those_of_what_they_build() -> None:
    schedules = [schedule_named(name, eta=2.0) for name in SCHEDULES]
    assert [schedule.name for schedule in schedules] == list(SCHEDULES)
    assert [order_named(name, schedules[0]).name for name in ORDERS] == list(ORDERS)
    with pytest.raises(ValueError, match=", ".join(SCHEDULES)):
        schedule_named("overlapped", eta=1.0)
    with pytest.raises(ValueError, match="oldest_finished_first, strict_start_order, bounded_lag"):
        order_named("fifo", schedules[0])
