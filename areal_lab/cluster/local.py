"""Host agents as processes of this machine: to try a run on several hosts without having them."""

from __future__ import annotations

import asyncio
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path

from areal_lab.cluster.records import TOKEN_VARIABLE
from areal_lab.cluster.scheduler import Invitation
from areal_lab.host.processes import Child, start_child


async def start_agent_here(
    name: str, invitation: Invitation, *, log_folder: Path, address: str = ""
) -> Child:
    """Start the agent of one host as a child of this process.

    Args:
        address: of the host; empty for that from which it reaches the run.
    """
    return await start_child(
        f"host {name}",
        "areal_lab.cluster.agent.main",
        ["--join", invitation.run, "--name", name, "--address", address],
        log_path=log_folder / f"host-{name}.log",
        environment={TOKEN_VARIABLE: invitation.token},
    )


@dataclass(slots=True)
class LocalScheduler:
    """Starts agents h1, h2, ... here, each with a loopback address of its own where there are any
    (Linux)."""

    log_folder: Path
    agents: dict[str, Child] = field(default_factory=dict)
    """The process of each agent, by the name of its host."""
    _invitation: Invitation | None = None

    async def start(self, hosts: int, invitation: Invitation) -> None:
        """Start agents."""
        self._invitation = invitation
        await asyncio.gather(*(self._start(number) for number in range(1, hosts + 1)))

    async def state(self) -> str:
        """How many run."""
        running = sum(agent.running for agent in self.agents.values())
        return f"{running} of {len(self.agents)} agents run on this machine"

    async def replace(self, name: str) -> None:
        """End the agent of a lost host, and start another one of this name."""
        await self.agents[name].stop(at_once=True)
        await self._start(int(name.removeprefix("h")))

    async def stop(self) -> None:
        """End all agents."""
        await asyncio.gather(*(agent.stop() for agent in self.agents.values()))

    async def _start(self, number: int) -> None:
        assert self._invitation is not None, "started before"
        name = f"h{number}"
        address = f"127.0.0.{number + 1}" if sys.platform == "linux" else "127.0.0.1"
        self.agents[name] = await start_agent_here(
            name, self._invitation, log_folder=self.log_folder, address=address
        )


@dataclass(slots=True)
class ManualScheduler:
    """Waits for agents that somebody else starts: a person, or a container's command."""

    log_folder: Path
    this_host: bool = True
    """Whether this machine is one of the hosts."""
    _invitation: Invitation | None = None
    _agent: Child | None = None

    async def start(self, hosts: int, invitation: Invitation) -> None:
        """Start the agent of this machine, if it is one of the hosts."""
        del hosts
        self._invitation = invitation
        if self.this_host:
            self._agent = await start_agent_here(
                socket.gethostname(), invitation, log_folder=self.log_folder
            )

    async def state(self) -> str:
        """How to start one."""
        assert self._invitation is not None, "started before"
        return (
            f"on each of the others run: {TOKEN_VARIABLE}=... areal-lab host --join "
            f"{self._invitation.run}"
        )

    async def replace(self, name: str) -> None:
        """Start nothing: the host joins again, or another one does."""
        del name

    async def stop(self) -> None:
        """End the agent of this machine."""
        if self._agent is not None:
            await self._agent.stop()
