"""What a configuration means for the control core: schedule, batch order, routing, limits."""

from __future__ import annotations

import sys

from areal_lab.control.limits import Limits
from areal_lab.control.order import order_named
from areal_lab.control.routing import routing_named
from areal_lab.control.sampling import DynamicSampling
from areal_lab.control.scaling import ScalingRule
from areal_lab.control.schedule import Schedule, schedule_named
from simulator.config.schema import ScheduleConfig, SimulationConfig
from simulator.costs.controller.ways import spmd_ranks


def schedule_of(config: ScheduleConfig) -> Schedule:
    """The schedule that the configuration names."""
    return schedule_named(config.name, eta=config.eta, interruptible=config.interruptible)


def limits_of(config: SimulationConfig, *, room: int = 1) -> Limits:
    """What the coordinator may do in this simulation.

    Args:
        room: prompts that the engines can generate at once, where the configuration does not say.

    Raises:
        ValueError: if schedule and batch order contradict each other; begins with the setting.
    """
    workload, named, schedule = config.workload, config.schedule, schedule_of(config.schedule)
    return Limits(
        batch_groups=workload.prompts_per_batch,
        max_in_flight=named.max_concurrent_prompts or max(workload.prompts_per_batch, room),
        batch_parts=config.batch_parts,
        hybrid_engines=0
        if config.cluster.colocated
        else config.cluster.hybrid_gpus // config.rollout.tensor_parallel,
        ranks=spmd_ranks(config),
        train_steps=workload.steps if workload.whole_run else None,
        schedule=schedule,
        order=order_named(
            named.batch_order, schedule, max_lag=named.max_lag or None, drop_late=named.drop_late
        ),
        routing=routing_named(config.rollout.routing),
        # Without a bound: a share below 1 fills every batch.
        sampling=DynamicSampling(max_filtered=sys.maxsize)
        if workload.equal_rewards_share
        else None,
    )


def scaling_of(config: SimulationConfig) -> ScalingRule | None:
    """The rule by which engines join and leave; None if they stay."""
    scaling = config.scaling
    if not scaling.max_engines:
        return None
    return ScalingRule(
        min_engines=scaling.min_engines,
        max_engines=scaling.max_engines,
        window_steps=scaling.window_steps,
        cooldown_steps=scaling.cooldown_steps,
        tolerance=scaling.tolerance,
        startup_s=scaling.startup_s,
    )
