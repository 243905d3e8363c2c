"""The actor that runs a host agent on its node.

    ready --> start(name) --> ended: exit of its agent            the actor dies --> its agent, too

The agent is a child with a lifeline, in a separate session: Ray does not kill such a child with the
actor, but the lifeline ends it.
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
"""Variables for the one CPU of an actor, and for its debugger: engines and trainers must not
have them."""
_LINES: Final = 200
_DISMISSED_S: Final = 2.0
"""Time for a dismissed agent to remove its files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Host and process of an actor."""

    node: str
    """Ray's id of the node."""
    address: str
    """Address of the node for Ray's other nodes."""


class HostActor:
    """Run one host agent."""

    def __init__(self) -> None:
        _end_with_raylet()
        self._agent: Child | None = None
        folder = Path(tempfile.gettempdir())
        remove_abandoned_folders(folder)  # an actor that Ray kills leaves its agent
        self._folder = make_owned_folder(folder, mode=0o700)

    async def ready(self) -> Where:
        """Host and process of this actor."""
        return Where(
            node=ray.get_runtime_context().get_node_id(),
            address=ray.util.get_node_ip_address(),
        )

    async def start(self, name: str, run: str, token: str) -> None:
        """Start the agent of host `name`; `run` is `ADDRESS:PORT` of the run, `token` its
        secret.
        """
        for variable in _SET_BY_RAY:
            if variable not in _first_environment():
                os.environ.pop(variable, None)
        address = address_of_agent(ray.util.get_node_ip_address(), run)
        self._agent = await start_child(
            f"host {name}",
            "areal_lab.cluster.agent.run",
            ["--join", run, "--name", name, *(["--address", address] if address else [])],
            log_path=self._folder / f"host-{name}.log",
            environment={TOKEN_VARIABLE: token},
        )

    async def ended(self) -> str:
        """Wait until the agent has ended; returns the end of its output."""
        assert self._agent is not None, "started before"
        await self._agent.ended()
        return last_lines(self._agent.log_path, _LINES)

    async def stop(self) -> str:
        """Stop the agent; returns the end of its output."""
        if self._agent is None:
            return ""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._agent.ended(), _DISMISSED_S)
        await self._agent.stop()
        said = last_lines(self._agent.log_path, _LINES)
        remove_owned_folder(self._folder)
        return said


def _end_with_raylet() -> None:
    """End this process with Ray's process of the node: Ray does not do so reliably."""
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
