"""Host agents on the nodes of a Ray cluster, from the run's point of view.

    start --> driver process --connected--> agents join              replace(name) --> the driver
                             --impossible--> ValueError              the driver is gone --> another

Only heartbeats (`cluster.hosts`) decide which hosts are lost, not Ray. If the driver ends, as it
does with the Ray node of this machine, its actors and their agents also end: the run finds all
hosts lost, and the first replacement starts another driver for all of them.

What the run and its Ray driver tell each other: one JSON record a line.

run --Begin, then Order, Order, ...--> driver
run <--Report, Report, ...------------ driver        each has everything; the last one counts
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from areal_lab.cluster.records import from_json, to_json
from areal_lab.cluster.scheduler import Invitation
from areal_lab.config.sections import ClusterConfig, SchedulerConfig
from areal_lab.extras import require
from areal_lab.host.processes import Child, last_lines, start_child

_CONNECT_S: Final = 90.0
"""Longest wait for Ray, which would try forever."""
_STOP_S: Final = 20.0
"""Longest wait for the driver to stop the agents; those left then end with it."""
LINE_BYTES: Final = 1 << 20
"""Longest line between run and driver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Status of the driver."""

    connected: bool = False
    impossible: str = ""
    """Why there can be no hosts, in one sentence; the driver exits after it."""
    state: str = ""
    """Reason for waiting."""
    named: int = 0
    """Number of hosts that were named."""


@dataclass(slots=True, eq=False)
class _Driver:
    """The driver process, and its last report."""

    child: Child
    writer: asyncio.StreamWriter
    report: Report = field(default_factory=Report)
    told: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it is connected, cannot connect, or has ended."""
    reading: asyncio.Task[None] | None = None

    @property
    def gone(self) -> bool:
        return self.reading is None or self.reading.done()

    async def read(self, reader: asyncio.StreamReader) -> None:
        """Read reports until it ends."""
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
    """A `Scheduler` that uses Ray."""

    config: SchedulerConfig
    cluster: ClusterConfig
    log_folder: Path
    _driver: _Driver | None = None
    _hosts: int = 0
    _invitation: Invitation | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def start(self, hosts: int, invitation: Invitation) -> None:
        """Connect to Ray, and request hosts.

        Raises ValueError for a missing cluster, other versions or another token.
        """
        require("scheduler.type=ray", "ray")
        self._hosts, self._invitation = hosts, invitation
        async with self._lock:
            await self._start_driver()

    async def state(self) -> str:
        """Missing resources of Ray, or the end of its driver."""
        if self._driver is None or self._driver.gone:
            return f"the Ray driver has ended (see {self._log}); all hosts end with it"
        return f"Ray: {self._driver.report.state}"

    async def replace(self, name: str) -> None:
        """Request another host; raises as `start` if the driver has to be restarted."""
        async with self._lock:
            if self._driver is None or self._driver.gone:
                await self._start_driver()
            else:
                await self._driver.tell(Order(replace=name))

    async def stop(self) -> None:
        """Stop all agents and the driver."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Requested hosts."""

    address: str
    """Address of the Ray cluster: `auto`, `local` or `HOST:PORT`."""
    hosts: int
    gpus: int
    """GPUs of each host; 0 takes all that it has."""
    resources: Mapping[str, float]
    """Further resources of each host."""
    named: int
    """Number of hosts that were named before: the next one is h(named + 1)."""
    logs: str
    """Folder for the agents' logs."""
    run: str
    """`ADDRESS:PORT` of the run."""
    token: str = field(repr=False)
    """Secret of the run's hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Command to the driver."""

    replace: str = ""
    """Name of a lost host."""
    stop: bool = False
    """Stop all hosts, and exit."""


TOKEN: Final = "RAY_AUTH_TOKEN"
"""It lets its holder run anything in the cluster: the driver gets it, other children do not."""
_DEFAULTS: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray and Python compare versions to the patch level; the messages here do not need that.
    "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
}


def driver_environment(address: str) -> dict[str, str]:
    """Variables to add for the driver. A variable that the user has set is kept.

    A private cluster (`local`) gets a new token. For any other, the user's token and mode are
    passed on; without a mode, Ray uses a token if it finds one (`~/.ray/auth_token`).
    """
    added = {name: value for name, value in _DEFAULTS.items() if name not in os.environ}
    if address == "local":
        added |= {"RAY_AUTH_MODE": "token", TOKEN: secrets.token_hex(32)}
    elif TOKEN in os.environ:
        added[TOKEN] = os.environ[TOKEN]
    return added
