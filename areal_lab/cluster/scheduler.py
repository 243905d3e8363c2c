"""Interface of a scheduler, which starts and stops host agents; and the local and manual ones."""

from __future__ import annotations

import asyncio
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from areal_lab.cluster.records import TOKEN_VARIABLE
from areal_lab.host.processes import Child, start_child


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """Data with which an agent joins a run."""

    run: str
    """`ADDRESS:PORT` of the run."""
    token: str = field(repr=False)
    """Secret for its environment (`records.TOKEN_VARIABLE`), never a command line."""


class NoHosts(RuntimeError):
    """Requested hosts will not come; the message explains why."""


class Scheduler(Protocol):
    """Start and stop host agents."""

    async def start(self, hosts: int, invitation: Invitation) -> None:
        """Start agents on this many hosts; returns when they are requested.

        Raises ValueError, in one sentence, if that is impossible.
        """
        ...

    async def state(self) -> str:
        """Short description of why hosts have not joined yet.

        Raises NoHosts if some will never join.
        """
        ...

    async def replace(self, name: str) -> None:
        """Start another agent instead of a lost host's; it joins when it can.

        On any exception the run continues without it.
        """
        ...

    async def stop(self) -> None:
        """Stop every agent that was started. Idempotent."""
        ...


async def start_agent_here(
    name: str, invitation: Invitation, *, log_folder: Path, address: str = ""
) -> Child:
    """Start the agent of one host as a child of this process.

    An empty `address` takes the one from which the host reaches the run.
    """
    return await start_child(
        f"host {name}",
        "areal_lab.cluster.agent.run",
        ["--join", invitation.run, "--name", name, "--address", address],
        log_path=log_folder / f"host-{name}.log",
        environment={TOKEN_VARIABLE: invitation.token},
    )


@dataclass(slots=True)
class LocalScheduler:
    """Start agents h1, h2, ... on this machine, each with a separate loopback address if
    possible (Linux).
    """

    log_folder: Path
    agents: dict[str, Child] = field(default_factory=dict)
    """Process of each agent, by the name of its host."""
    _invitation: Invitation | None = None

    async def start(self, hosts: int, invitation: Invitation) -> None:
        """Start agents."""
        self._invitation = invitation
        await asyncio.gather(*(self._start(number) for number in range(1, hosts + 1)))

    async def state(self) -> str:
        """Number of running agents."""
        running = sum(agent.running for agent in self.agents.values())
        return f"{running} of {len(self.agents)} agents run on this machine"

    async def replace(self, name: str) -> None:
        """Stop the agent of a lost host, and start another one of this name."""
        await self.agents[name].stop(at_once=True)
        await self._start(int(name.removeprefix("h")))

    async def stop(self) -> None:
        """Stop all agents."""
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
    """Wait for agents that someone else starts: a person, or a container's command."""

    log_folder: Path
    this_host: bool = True
    """True if this machine is one of the hosts."""
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
        """Command that starts one."""
        assert self._invitation is not None, "started before"
        return (
            f"on each of the others run: {TOKEN_VARIABLE}=... areal-lab host --join "
            f"{self._invitation.run}"
        )

    async def replace(self, name: str) -> None:
        """Do nothing: the host joins again, or another one does."""
        del name

    async def stop(self) -> None:
        """Stop the agent of this machine."""
        if self._agent is not None:
            await self._agent.stop()
