"""Servers of a model that is not trained: of an evaluation, or of a gateway of its own.

launched   hold the model that they were started with, as version 0, also after a restart
attached   hold what they hold: nothing is pushed into servers that others may use, too
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from areal_lab.config.schema import TrainConfig
from areal_lab.data.tokenize import TextCodec
from areal_lab.engines.client.engine_client import EngineClient
from areal_lab.engines.protocol import PauseMode, WeightsFolder
from areal_lab.pipeline.fleet import Fleet
from areal_lab.pipeline.progress import Display
from areal_lab.pipeline.servers.health import HealthLimits
from areal_lab.pipeline.servers.on_hosts import open_hosts
from areal_lab.pipeline.servers.pool import ServerPool
from areal_lab.pipeline.servers.push import PreparePush, PushTo, Weights
from areal_lab.pipeline.servers.sources import LaunchModel, count_engines, engine_sources
from areal_lab.runlog.folder import RunFolder


async def start_standing(
    config: TrainConfig,
    folder: RunFolder,
    model: Path,
    *,
    fleet: Fleet,
    display: Display,
    restarts: int = 0,
    conversations: bool | None = None,
    prepare_push: PreparePush | None = None,
) -> ServerPool:
    """Start the servers of a configuration, here or on its hosts, or attach to its addresses;
    `fleet` stops them.

    Args:
        config: whose `rollout` counts.
        folder: for the logs of servers.
        model: what they are launched with, and what attached ones have to fit to.
        fleet: stops what was started.
        display: shows what is waited for.
        restarts: allowed per server.
        conversations: whether prompts continue earlier responses; None if there is a workflow.
        prepare_push: loads weights into servers; None if theirs stay.

    Raises:
        ExceptionGroup: with the first error.
    """
    hosts = await open_hosts(
        config,
        model,
        fleet=fleet,
        display=display,
        log_folder=folder.path / "logs",
        trains=False,
    )
    there = None if hosts is None else hosts.threads()
    rollout, servers = config.rollout, count_engines(config)
    here = max(1, len(os.sched_getaffinity(0)) // servers)
    addresses = ", ".join(rollout.addresses)
    plural = "s" * (servers > 1)
    display.phase(
        f"waiting for the server{plural} at {addresses}"
        if addresses
        else f"waiting for {servers} {rollout.backend} server{plural} to start"
    )
    first: asyncio.Future[LaunchModel] = asyncio.get_running_loop().create_future()
    first.set_result(LaunchModel(model))
    pool = ServerPool(
        sources=engine_sources(
            config,
            folder,
            first,
            model_path=model,
            codec=TextCodec.load(model),
            threads=rollout.threads or (here if there is None else there.engine),
            conversations=conversations,
            launch=None if hosts is None else hosts.launch_engine,
        ),
        health=HealthLimits(
            interval_s=rollout.health_interval_s,
            timeout_s=rollout.health_timeout_s,
            stall_s=rollout.stall_timeout_s,
        ),
        max_restarts=restarts,
        pause_mode=PauseMode(rollout.pause_mode),
        weights=WeightsFolder(path=model, version=0, checksum="", size_bytes=0),
        prepare_push=prepare_push or _no_push,
        foreign=bool(rollout.addresses),
        note=display.note,
        opened=fleet.add_engine,
    )
    fleet.stack.push_async_callback(pool.close)
    await pool.start()
    return pool


def _no_push(weights: Weights, clients: Sequence[EngineClient], mode: PauseMode) -> PushTo:
    """They have their weights: of the folder that they were launched with, or of others."""
    del weights, clients, mode
    return _has_weights


async def _has_weights(client: EngineClient) -> None:
    del client
