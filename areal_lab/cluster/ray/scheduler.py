"""Host agents on the nodes of a Ray cluster, as the run sees it.

    start --> driver process --connected--> agents join              replace(name) --> the driver
                             --impossible--> ValueError              the driver is gone --> another

Ray's own opinion of what is lost is not asked: `cluster.hosts` counts heartbeats. If the driver
ends, as it does with the Ray node of this machine, its actors and their agents end, too: the run
finds all hosts lost, and the first one that is replaced starts another driver for all of them.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from areal_lab.cluster.ray.environment import driver_environment
from areal_lab.cluster.ray.messages import Begin, Order, Report
from areal_lab.cluster.records import from_json, to_json
from areal_lab.cluster.scheduler import Invitation
from areal_lab.config.cluster import ClusterConfig, SchedulerConfig
from areal_lab.extras import require
from areal_lab.host.processes import Child, last_lines, start_child

_CONNECT_S: Final = 90.0
"""Longest wait for Ray, which would try for ever."""
_STOP_S: Final = 20.0
"""Longest wait for the driver to end the agents; what it has not ended then ends with it."""
LINE_BYTES: Final = 1 << 20
"""Longest line between run and driver."""


@dataclass(slots=True, eq=False)
class _Driver:
    """The driver process, and the last that it told."""

    child: Child
    writer: asyncio.StreamWriter
    report: Report = field(default_factory=Report)
    told: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it is connected, cannot be, or has ended."""
    reading: asyncio.Task[None] | None = None

    @property
    def gone(self) -> bool:
        return self.reading is None or self.reading.done()

    async def read(self, reader: asyncio.StreamReader) -> None:
        """Take reports until it ends."""
        try:
            while line := await reader.readline():
                self.report = from_json(Report, line)
                if self.report.connected or self.report.impossible:
                    self.told.set()
        except ConnectionError:
            pass  # it was killed
        finally:
            self.told.set()

    async def tell(self, message: Begin | Order) -> None:
        try:
            self.writer.write(to_json(message) + b"\n")
            await self.writer.drain()
        except ConnectionError:
            pass  # it has ended, as `reading` notices

    async def stop(self) -> None:
        try:
            async with asyncio.timeout(_STOP_S if self.report.connected else 0):
                await self.tell(Order(stop=True))
                await self.child.ended()
        except TimeoutError:
            pass
        finally:
            await self.child.stop(at_once=True)
            self.writer.close()
            if self.reading is not None:
                self.reading.cancel()
                await asyncio.gather(self.reading, return_exceptions=True)


@dataclass(slots=True)
class RayScheduler:
    """A `Scheduler` by Ray."""

    config: SchedulerConfig
    cluster: ClusterConfig
    log_folder: Path
    _driver: _Driver | None = None
    _hosts: int = 0
    _invitation: Invitation | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def start(self, hosts: int, invitation: Invitation) -> None:
        """Connect to Ray, and ask it for hosts.

        Raises:
            MissingExtra: Ray is not installed.
            ValueError: there is no such Ray cluster, or it has other versions or another token.
        """
        require("scheduler.type=ray", "ray")
        self._hosts, self._invitation = hosts, invitation
        async with self._lock:
            await self._start_driver()

    async def state(self) -> str:
        """What Ray lacks, or that its driver has ended."""
        if self._driver is None or self._driver.gone:
            return f"the Ray driver has ended (see {self._log}); all hosts end with it"
        return f"Ray: {self._driver.report.state}"

    async def replace(self, name: str) -> None:
        """Ask Ray for another host; raises as `start` if its driver has to be started again."""
        async with self._lock:
            if self._driver is None or self._driver.gone:
                await self._start_driver()
            else:
                await self._driver.tell(Order(replace=name))

    async def stop(self) -> None:
        """End all agents and the driver."""
        async with self._lock:
            driver, self._driver = self._driver, None
            if driver is not None:
                await driver.stop()

    @property
    def _log(self) -> Path:
        return self.log_folder / "ray.log"

    async def _start_driver(self) -> None:
        assert self._invitation is not None, "started before"
        before, self._driver = self._driver, None
        named = 0
        if before is not None:
            named = before.report.named
            await before.stop()
        driver = await self._launch()
        try:
            await driver.tell(
                Begin(
                    address=self.config.ray_address,
                    hosts=self._hosts,
                    gpus=self.cluster.n_gpus_per_node,
                    resources=self.config.ray_resources,
                    named=named,
                    logs=str(self.log_folder.absolute()),
                    run=self._invitation.run,
                    token=self._invitation.token,
                )
            )
            try:
                async with asyncio.timeout(_CONNECT_S):
                    await driver.told.wait()
            except TimeoutError:
                raise ValueError(
                    f"Ray did not connect to {self.config.ray_address} within {_CONNECT_S:g} s; is "
                    f"that a Ray cluster? The last lines of {self._log}:\n{last_lines(self._log)}"
                ) from None
            if driver.report.impossible:
                raise ValueError(driver.report.impossible)
            if not driver.report.connected:
                raise ValueError(str(await driver.child.died()))
        except BaseException:
            await driver.stop()
            raise
        self._driver = driver

    async def _launch(self) -> _Driver:
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_connection(sock=ours, limit=LINE_BYTES)
            try:
                child = await start_child(
                    "Ray driver",
                    "areal_lab.cluster.ray.driver",
                    [str(theirs.fileno())],
                    log_path=self._log,
                    environment=driver_environment(self.config.ray_address),
                    pass_fds=(theirs.fileno(),),
                )
            except BaseException:
                writer.close()
                raise
        driver = _Driver(child, writer)
        driver.reading = asyncio.create_task(driver.read(reader), name="read from the Ray driver")
        return driver
