"""Hosts on this machine for tests, with real agents."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from areal_lab.cluster.host import Host, RemoteProcess
from areal_lab.cluster.hosts import Hosts
from areal_lab.cluster.scheduler import LocalScheduler
from areal_lab.config.sections import ClusterConfig
from tests.ended import gone

DEADLINE_S = 60.0
"""For what takes a second or two on an idle machine."""


@dataclass(slots=True)
class HostLab:
    """Hosts that have joined."""

    hosts: Hosts
    scheduler: LocalScheduler
    said: list[str] = field(default_factory=list)

    def host(self, name: str) -> Host:
        """The host that sits in the seat of this name."""
        found = self.hosts.seats[name]
        assert found is not None, self.said
        return found

    def signal_agent(self, name: str, number: signal.Signals) -> None:
        """Send a signal to an agent alone."""
        os.kill(self.scheduler.agents[name].pid, number)


async def start_sleeper(host: Host, name: str = "sleeper") -> RemoteProcess:
    """A process on a host that ends with its agent."""
    return await host.start_module(
        name, "tests.cluster.sleeper", [], log=f"{name}.log", environment={}
    )


async def until(holds: Callable[[], bool], what: str) -> None:
    """Wait until something holds."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not holds():
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"not within {DEADLINE_S:g} s: {what}") from None


@asynccontextmanager
async def host_lab(folder: Path, count: int, **settings: object) -> AsyncIterator[HostLab]:
    """This many hosts of this machine.

    Args:
        folder: for logs.
        count: of hosts.
        settings: of `cluster`.
    """
    scheduler, said = LocalScheduler(folder), list[str]()
    hosts = Hosts(
        config=ClusterConfig.model_validate({"n_nodes": count, **settings}),
        scheduler=scheduler,
        address="127.0.0.1",
        start_timeout_s=DEADLINE_S,
        say=said.append,
        waiting=lambda _: None,
    )
    try:
        await hosts.start()
        yield HostLab(hosts, scheduler, said)
    finally:
        await hosts.close()
        assert all(gone(agent.pid) for agent in scheduler.agents.values())
