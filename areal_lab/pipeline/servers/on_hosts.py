"""The hosts of what a configuration starts, if it starts engines on other hosts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from areal_lab.cluster.run_hosts import RunHosts, opened
from areal_lab.config.schema import TrainConfig
from areal_lab.models.folder import read_model_facts
from areal_lab.pipeline.fleet import Fleet
from areal_lab.pipeline.progress import Display
from areal_lab.preflight.hosts import host_demand
from areal_lab.preflight.limits import version_bytes
from areal_lab.preflight.placement import runs_on_hosts


async def open_hosts(
    config: TrainConfig,
    model: Path,
    *,
    fleet: Fleet,
    display: Display,
    log_folder: Path,
    trains: bool = True,
) -> RunHosts | None:
    """Have the hosts join; None if everything starts here.

    Args:
        config: of the run.
        model: folder of its model.
        fleet: dismisses them.
        display: shows what is waited for, and what is lost.
        log_folder: for their logs.
        trains: whether there is a trainer, which needs hosts of its own.

    Raises:
        TooFewHosts: they did not join in time.
        Unplaceable: those that did have too little.
        ValueError: a setting is wrong here.
    """
    if not runs_on_hosts(config):
        return None
    demand = host_demand(config)
    if not trains:
        demand = replace(demand, trainer_ranks=0, trainer_hosts=0)
    return await fleet.stack.enter_async_context(
        opened(
            config.scheduler,
            config.cluster,
            demand,
            weights_bytes=version_bytes(config, model, read_model_facts(model).parameters),
            log_folder=log_folder,
            say=display.note,
            waiting=display.phase,
        )
    )
