"""The actor that runs a host agent on its node.

    ready --> start(name) --> ended: how its agent ended          the actor dies --> its agent, too

The agent is a child with a lifeline and in a session of its own: Ray leaves such a child alone when
an actor is killed, and the lifeline ends it.
"""

from __future__ import annotations

import asyncio
import os
import select
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import ray

from areal_lab.cluster.ray.addresses import address_of_agent
from areal_lab.cluster.records import TOKEN_VARIABLE
from areal_lab.host.owned_folders import (
    make_owned_folder,
    remove_abandoned_folders,
    remove_owned_folder,
)
from areal_lab.host.processes import Child, last_lines, start_child

_SET_BY_RAY: Final = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT")
"""For the one CPU of an actor, and for its debugger: engines and trainers must not have them."""
_LINES: Final = 200
_DISMISSED_S: Final = 2.0
"""For an agent that was dismissed, to remove its files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Where an actor is."""

    node: str
    """Ray's number of the node."""
    address: str
    """Of the node, as Ray's other nodes reach it."""


class HostActor:
    """Runs one host agent."""

    def __init__(self) -> None:
        _end_with_raylet()
        self._agent: Child | None = None
        folder = Path(tempfile.gettempdir())
        remove_abandoned_folders(folder)  # an actor that Ray kills leaves its own
        self._folder = make_owned_folder(folder, mode=0o700)

    async def ready(self) -> Where:
        """Where this actor is."""
        return Where(
            node=ray.get_runtime_context().get_node_id(),
            address=ray.util.get_node_ip_address(),
        )

    async def start(self, name: str, run: str, token: str) -> None:
        """Start the agent.

        Args:
            name: of its host.
            run: `ADDRESS:PORT` of the run.
            token: of the run's hosts.
        """
        for variable in _SET_BY_RAY:
            if variable not in _first_environment():
                os.environ.pop(variable, None)
        address = address_of_agent(ray.util.get_node_ip_address(), run)
        self._agent = await start_child(
            f"host {name}",
            "areal_lab.cluster.agent.main",
            ["--join", run, "--name", name, *(["--address", address] if address else [])],
            log_path=self._folder / f"host-{name}.log",
            environment={TOKEN_VARIABLE: token},
        )

    async def ended(self) -> str:
        """Wait until the agent has ended; the end of what it printed."""
        assert self._agent is not None, "started before"
        await self._agent.ended()
        return last_lines(self._agent.log_path, _LINES)

    async def stop(self) -> str:
        """End the agent; the end of what it printed."""
        if self._agent is None:
            return ""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._agent.ended(), _DISMISSED_S)
        await self._agent.stop()
        said = last_lines(self._agent.log_path, _LINES)
        remove_owned_folder(self._folder)
        return said


def _end_with_raylet() -> None:
    """End this process with Ray's process of the node: Ray leaves that to chance."""
    raylet = os.getppid()
    try:
        end = os.pidfd_open(raylet)
    except (OSError, AttributeError):  # it is gone, or this is not Linux
        return

    def wait() -> None:
        select.select([end], [], [])
        os._exit(1)

    threading.Thread(target=wait, name="raylet", daemon=True).start()


def _first_environment() -> set[str]:
    """Names of the variables with which this process was started; outside of Linux, all names."""
    try:
        entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return set(os.environ)
    return {entry.partition(b"=")[0].decode(errors="replace") for entry in entries}
