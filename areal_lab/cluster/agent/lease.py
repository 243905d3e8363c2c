"""What a host agent does for a run, and for how long: its lease and its incarnations.

    joins --> holds processes while heartbeats come --silence for lease_s--> kills them,
      ^                                                                      another incarnation
      '----------------------------- joins again ----------------------------'

A host that is cut off, or whose run is gone, so ends what it was asked to run. The run has counted
it as lost before that, and uses nothing that comes from the earlier incarnation.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from starlette.types import ASGIApp

from areal_lab.cluster.agent.files import HostFiles
from areal_lab.cluster.agent.held import HeldProcesses
from areal_lab.cluster.records import HostFacts, HostHealth, facts_of_this_host
from areal_lab.cluster.shards.connections import Connections
from areal_lab.cluster.shards.local import Host as PlaneHost
from areal_lab.cluster.shards.server import DataPlane
from areal_lab.cluster.shards.store import Limits, ShardStore
from areal_lab.host.memory import memory_bytes

_LOOK_S: Final = 0.25
_SHARDS_SHARE: Final = 0.25
"""Largest share of the host's memory that shards take."""


@dataclass(slots=True)
class HostAgent:
    """The agent of this host."""

    name: str
    address: str
    port: int
    folder: Path
    token: str = field(repr=False)
    incarnation: str = ""
    held: HeldProcesses = field(init=False)
    files: HostFiles = field(init=False)
    """Of this incarnation."""
    data_plane: ASGIApp = field(init=False, repr=False)
    """Of this incarnation: shards and folders for other hosts."""
    dismissed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the run needs the host no longer."""
    _heard_s: float = 0.0

    def __post_init__(self) -> None:
        self.held = HeldProcesses(self.folder / "logs")
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)

    def next_incarnation(self) -> HostFacts:
        """Begin another incarnation, and tell of this host."""
        self.incarnation = secrets.token_hex(8)
        plane = DataPlane(
            PlaneHost(self.name, f"{self.address}:{self.port}", self.incarnation),
            ShardStore(Limits(memory_bytes=int(memory_bytes() * _SHARDS_SHARE))),
        )
        self.data_plane = plane.app(self.token)
        self.files = HostFiles(self.folder, plane.folders, Connections(self.token))
        return facts_of_this_host(
            name=self.name,
            incarnation=self.incarnation,
            address=self.address,
            port=self.port,
            folder=str(self.folder),
        )

    def heard(self) -> HostHealth:
        """A heartbeat came from the run that this incarnation has joined."""
        self._heard_s = time.monotonic()
        return HostHealth(incarnation=self.incarnation, ended=self.held.ended)

    async def serve_out_lease(self, lease_s: float) -> bool:
        """Return when heartbeats have stopped for the length of the lease, or the run has dismissed
        this host; every process is gone then.

        Returns:
            Whether the host was dismissed.
        """
        self._heard_s = time.monotonic()
        try:
            while not self.dismissed.is_set():
                left_s = self._heard_s + lease_s - time.monotonic()
                if left_s <= 0:
                    break
                await _wait(self.dismissed, min(left_s, _LOOK_S))
        finally:
            self.incarnation = ""  # nothing is started any more
            await self.held.stop_all()
            self.files.close()
        return self.dismissed.is_set()


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        pass
