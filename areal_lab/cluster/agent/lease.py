"""What a host agent does for a run, and for how long: its lease and its incarnations.

    joins --> holds processes --silence--> says so, --lease is over--> kills them,
      ^        while heartbeats come  <---  starts nothing             another incarnation
      '----------------------------- joins again ----------------------------'

A host that is cut off, or whose run is gone, so ends what it was asked to run. The run has counted
it as lost before that, and uses nothing that comes from the earlier incarnation. A run that is only
slow finds its processes as they were.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from starlette.types import ASGIApp

from areal_lab.cluster.agent.files import HostFiles
from areal_lab.cluster.agent.held import HeldProcesses
from areal_lab.cluster.records import HostFacts, HostHealth, Welcome, facts_of_this_host
from areal_lab.cluster.shards.connections import Connections
from areal_lab.cluster.shards.local import Host as PlaneHost
from areal_lab.cluster.shards.server import DataPlane
from areal_lab.cluster.shards.store import Limits, ShardStore
from areal_lab.control.liveness import RunLiveness
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
    say: Callable[[str], None]
    """Shows what happened."""
    incarnation: str = ""
    held: HeldProcesses = field(init=False)
    files: HostFiles = field(init=False)
    """Of this incarnation."""
    data_plane: ASGIApp = field(init=False, repr=False)
    """Of this incarnation: shards and folders for other hosts."""
    dismissed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the run needs the host no longer."""
    _run: RunLiveness | None = None
    """What is known of the run, from its welcome until the end of the lease."""
    _heard: asyncio.Event = field(default_factory=asyncio.Event)
    """Not set while the run is silent."""

    def __post_init__(self) -> None:
        self.held = HeldProcesses(self.folder / "logs")
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        self._heard.set()

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

    def heartbeat(self, received: int) -> HostHealth:
        """A heartbeat came from the run that this incarnation has joined.

        Args:
            received: number of the newest reply that the run has received.
        """
        self._look()
        if (run := self._run) is not None:
            unheard_s = run.unheard_s(time.monotonic())
            run.heartbeat(time.monotonic(), received)
            if not (run.silent or self._heard.is_set()):
                self._heard.set()
                self.say(f"host {self.name} hears the run again, after {unheard_s:.1f} s")
        return self.health()

    def health(self) -> HostHealth:
        """State of this host."""
        run = self._run
        return HostHealth(
            incarnation=self.incarnation,
            ended=self.held.ended,
            number=0 if run is None else run.replies,
            silent_s=run.unheard_s(time.monotonic()) if run is not None and run.silent else 0.0,
        )

    async def until_heard(self) -> None:
        """Wait while the run is silent; another incarnation may have begun then."""
        self._look()
        await self._heard.wait()

    async def serve_out_lease(self, welcome: Welcome) -> bool:
        """Return when heartbeats have stopped for the length of the lease, or the run has dismissed
        this host; every process is gone then.

        Returns:
            Whether the host was dismissed.
        """
        self._run = run = RunLiveness(
            silent_after_s=welcome.silent_after_s,
            lease_s=welcome.lease_s,
            heard_s=time.monotonic(),
        )
        try:
            while not (self.dismissed.is_set() or run.given_up(time.monotonic())):
                self._look()
                await _wait(self.dismissed, min(run.next_look_s(time.monotonic()), _LOOK_S))
        finally:
            self.incarnation, self._run = "", None  # nothing is started any more
            self._heard.set()
            await self.held.stop_all()
            self.files.close()
        return self.dismissed.is_set()

    def _look(self) -> None:
        """Say once if the run is silent."""
        if (run := self._run) is None:
            return
        run.look(now_s := time.monotonic())
        if run.silent and self._heard.is_set():
            self._heard.clear()
            unheard_s = run.unheard_s(now_s)
            self.say(
                f"host {self.name} has heard nothing from the run for {unheard_s:.1f} s; it ends "
                f"its processes in {max(0.0, run.lease_s - unheard_s):.1f} s, unless the run asks "
                "again"
            )


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        pass
