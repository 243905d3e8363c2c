"""Servers of a model that is not trained, for an evaluation or a standalone gateway.

launched   serve the model with which they were started, as version 0, also after a restart
attached   keep their weights: nothing is pushed into servers that others may use
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from areal_lab.cluster.run_hosts import RunHosts, opened
from areal_lab.engines.client.engine_client import EngineClient
from areal_lab.engines.protocol import PauseMode, WeightsFolder
from areal_lab.pipeline.fleet import Fleet
from areal_lab.pipeline.servers.health import HealthLimits
from areal_lab.pipeline.servers.pool import ServerPool
from areal_lab.pipeline.servers.server import PreparePush, PushTo, Weights
from areal_lab.pipeline.servers.sources import LaunchModel, engine_sources
from areal_lab.resolve.hosts import host_demand
from areal_lab.resolve.placement import runs_on_hosts
from areal_lab.resolve.resolved import Served
from areal_lab.runlog.folder import RunFolder
from areal_lab.shell.display import Display


async def start_servers(
    served: Served,
    folder: RunFolder,
    *,
    fleet: Fleet,
    display: Display,
    restarts: int = 0,
    clients: bool = False,
    prepare_push: PreparePush | None = None,
) -> ServerPool:
    """Start the servers of a configuration, here or on its hosts, or attach to its addresses.

    Args:
        served: model to launch, which attached servers must have too.
        folder: run folder, for the logs of servers.
        fleet: stops the servers and closes the pool.
        display: shows the servers that are waited for.
        restarts: restarts allowed per server.
        clients: requests are those of a gateway's clients, as in `engine_sources`.
        prepare_push: loads weights into servers; None leaves their weights.

    Raises:
        ExceptionGroup: contains the first error.
    """
    hosts = await open_hosts(
        served, fleet=fleet, display=display, log_folder=folder.path / "logs", trains=False
    )
    there = None if hosts is None else hosts.threads()
    rollout, servers = served.config.rollout, served.engine_count
    here = max(1, served.machine.cores // servers)
    addresses = ", ".join(rollout.addresses)
    plural = "s" * (servers > 1)
    display.phase(
        f"waiting for the server{plural} at {addresses}"
        if addresses
        else f"waiting for {servers} {rollout.backend} server{plural} to start"
    )
    first: asyncio.Future[LaunchModel] = asyncio.get_running_loop().create_future()
    first.set_result(LaunchModel(served.model))
    sources = engine_sources(
        served,
        folder,
        first,
        threads=rollout.threads or (here if there is None else there.engine),
        clients=clients,
        launch=None if hosts is None else hosts.launch_engine,
    )
    pool = ServerPool(
        later={number: sources.pop(number) for number in list(sources)[servers:]},
        sources=sources,
        scales=rollout.scaling.max_engines > 0,
        health=HealthLimits(
            interval_s=rollout.health_interval_s,
            timeout_s=rollout.health_timeout_s,
            stall_s=rollout.stall_timeout_s,
        ),
        max_restarts=restarts,
        pause_mode=PauseMode(rollout.pause_mode),
        weights=WeightsFolder(path=served.model, version=0, checksum="", size_bytes=0),
        prepare_push=prepare_push or _no_push,
        foreign=bool(rollout.addresses) and prepare_push is None,
        note=display.note,
        opened=fleet.add_engine,
    )
    fleet.stack.push_async_callback(pool.close)
    await pool.start()
    return pool


def _no_push(weights: Weights, clients: Sequence[EngineClient], mode: PauseMode) -> PushTo:
    """Push nothing: the servers have their weights."""
    del weights, clients, mode
    return _has_weights


async def _has_weights(client: EngineClient) -> None:
    del client


async def open_hosts(
    served: Served,
    *,
    fleet: Fleet,
    display: Display,
    log_folder: Path,
    trains: bool = True,
) -> RunHosts | None:
    """Wait until the hosts of a configuration have joined; returns None if everything starts here.

    Args:
        served: the configuration.
        fleet: releases the hosts at its end.
        display: shows the hosts that are waited for or lost.
        log_folder: folder for the logs of hosts.
        trains: also wait for the hosts of a trainer.

    Raises:
        TooFewHosts: too few hosts joined in time.
        Unplaceable: the joined hosts have too few resources.
        ValueError: a setting does not fit this machine.
    """
    config = served.config
    if not runs_on_hosts(config):
        return None
    demand = host_demand(served)
    if not trains:
        demand = replace(demand, trainer_ranks=0, trainer_hosts=0)
    return await fleet.stack.enter_async_context(
        opened(
            config.scheduler,
            config.cluster,
            demand,
            weights_bytes=served.version_bytes,
            log_folder=log_folder,
            say=display.note,
            waiting=display.phase,
        )
    )
