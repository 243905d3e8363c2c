"""The hosts that controllers share: which generate, and which train.

async with host_pool(config) as pool:
    rollouts = await AsyncRolloutController.start(pool, config, problems)
    trainer = await AsyncTrainController.start(pool, config)
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from areal_lab.cluster.run_hosts import RunHosts, opened
from areal_lab.config.schema import TrainConfig
from areal_lab.models.folder import read_model_facts
from areal_lab.models.locate import resolve_model_path
from areal_lab.preflight.hosts import host_demand
from areal_lab.preflight.limits import version_bytes


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
    model = resolve_model_path(config.actor.path)
    folder = folder or Path(tempfile.mkdtemp(prefix="areal_lab-controllers-"))
    async with opened(
        config.scheduler,
        config.cluster,
        host_demand(config),
        weights_bytes=version_bytes(config, model, read_model_facts(model).parameters),
        log_folder=folder / "logs",
        say=say,
        waiting=waiting,
    ) as hosts:
        yield HostPool(config, hosts, model, folder, say)
