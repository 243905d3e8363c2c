"""The hosts that controllers share: which generate, and which train; and the folder of their run.

async with host_pool(config) as pool:
    rollouts = await AsyncRolloutController.start(pool, config, problems)
    trainer = await AsyncTrainController.start(pool, config)

The folder has process.json meanwhile and summary.json at the end, however the program ends: also by
Ctrl-C or SIGTERM, of which the program gets a `KeyboardInterrupt` or a cancelled task.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from areal_lab.cluster.run_hosts import RunHosts, opened
from areal_lab.config.problem import ConfigError, Kind, Problem
from areal_lab.config.schema import TrainConfig
from areal_lab.control.events import Request
from areal_lab.control.placement import Demand
from areal_lab.controllers.batch import HeldShards
from areal_lab.models.folder import read_model_facts
from areal_lab.models.locate import sound_model_path
from areal_lab.resolve.hosts import host_demand
from areal_lab.resolve.limits import version_bytes
from areal_lab.resolve.placement import place_parts
from areal_lab.runlog.folder import RunFolder
from areal_lab.shell.display import Silent
from areal_lab.shell.recorded import Ending, recorded
from areal_lab.shell.requests import Reply
from areal_lab.shell.stop import StopSignal, ended_like_ctrl_c


@dataclass(frozen=True, slots=True)
class HostPool:
    """Hosts that have joined, for the controllers of one program."""

    config: TrainConfig
    hosts: RunHosts
    model: Path
    """The model's folder on this machine."""
    folder: Path
    """For logs and checkpoints."""
    say: Callable[[str], None]
    """Shows what happened."""
    shards: HeldShards = field(default_factory=HeldShards)
    """Tensors of the batches that were prepared, and of groups that wait."""
    summary: dict[str, Any] = field(default_factory=dict[str, Any])
    """What summary.json says of the run, besides its status."""


@dataclass(frozen=True, slots=True)
class _Said(Silent):
    """The display of a program, which has its own."""

    say: Callable[[str], None]

    def note(self, text: str) -> None:
        self.say(text)


@asynccontextmanager
async def host_pool(
    config: TrainConfig,
    *,
    folder: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
    waiting: Callable[[str], None] = lambda _: None,
) -> AsyncIterator[HostPool]:
    """Have the hosts of a configuration join; they are dismissed at the end.

    Args:
        config: `scheduler`, `cluster` and what is to be placed.
        folder: for logs and checkpoints; None makes a temporary one.
        say: shows what happened.
        waiting: shows what is waited for.

    Raises:
        TooFewHosts: hosts did not join in time.
        Unplaceable: they have too little.
        ConfigError: settings contradict each other.
    """
    if config.rollout.slots == "samples":
        raise ConfigError(
            Problem(
                Kind.SETTINGS,
                "rollout.slots",
                "rollout.slots is samples, but workers of controllers report whole groups; use "
                "rollout.slots=groups",
            )
        )
    model = sound_model_path(config.actor.path)
    folder = folder or Path(tempfile.mkdtemp(prefix="areal_lab-controllers-"))
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    summary: dict[str, Any] = {"command": "controllers", "steps": 0}
    ending = Ending(
        draw=lambda _: None, pictures="", failure=lambda wall_s: {**summary, "wall_s": wall_s}
    )
    if config.sinks:
        names = ", ".join(config.sinks)
        say(f"sinks ({names}) receive nothing: a program sends what `ppo_update` returns itself")
    quiet = config.with_settings({"plots": False, "sinks": []})  # steps are the program's
    began_s = time.monotonic()
    with ended_like_ctrl_c():
        async with recorded(
            quiet, RunFolder(folder), _Said(say), ending, StopSignal(), submit=_refuse
        ) as run:
            async with opened(
                config.scheduler,
                config.cluster,
                _demand(config),
                weights_bytes=version_bytes(config, model, read_model_facts(model).parameters),
                log_folder=folder / "logs",
                say=say,
                waiting=waiting,
            ) as hosts:
                yield HostPool(config, hosts, model, folder, say, summary=summary)
            wall_s = time.monotonic() - began_s
            run.summary = {**summary, "wall_s": wall_s, "status": "complete"}


async def _refuse(request: Request) -> Reply:
    del request
    return Reply(False, "a program drives this run, and decides when it pauses and stops")


def _demand(config: TrainConfig) -> Demand:
    """What is placed; each server of `rollout.addresses` has its rollout worker on a host."""
    demand, attached = host_demand(place_parts(config)), len(config.rollout.addresses)
    return replace(demand, engines=attached, gpus_per_engine=0) if attached else demand
