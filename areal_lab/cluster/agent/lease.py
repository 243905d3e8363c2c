"""Processes that a host agent runs for a run, and the lease that limits them.

    joins --> runs processes --silence--> reports it, --lease ends--> kills them,
      ^        while heartbeats come  <---  starts nothing            another incarnation
      '----------------------------- joins again ----------------------------'

The lease is a heartbeat timeout; an incarnation lasts from one join to the end of the lease. So a
host that is cut off, or whose run is gone, ends its processes. The run has counted it as lost
before that, and uses nothing from the earlier incarnation. A run that is only slow finds its
processes unchanged.

The processes that a host agent has started, by the number that the run gives each.

start --number--> held --exit--> ended, with how, until the agent's next incarnation
                       --stop--> stopped, also while it starts, or before a start that is late
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from starlette.types import ASGIApp

from areal_lab.cluster.agent.files import HostFiles
from areal_lab.cluster.folders.connections import Connections
from areal_lab.cluster.folders.server import DataPlane
from areal_lab.cluster.folders.server import Host as PlaneHost
from areal_lab.cluster.records import (
    HostFacts,
    HostHealth,
    ProcessEnd,
    StartedEngine,
    StartedModule,
    StartEngine,
    StartModule,
    Welcome,
    facts_of_this_host,
)
from areal_lab.control.liveness import RunLiveness
from areal_lab.engines.launch.start import launch_engine
from areal_lab.host.processes import ChildDied, RunningProcess, start_child

_LOOK_S: Final = 0.25


@dataclass(slots=True)
class _Child:
    process: RunningProcess
    stop: Callable[[bool], Awaitable[None]]
    """Called with True to kill the process immediately."""
    how: str = ""
    watcher: asyncio.Task[None] | None = None


@dataclass(slots=True)
class ChildProcesses:
    """Child processes of an agent. They end with it, however it ends."""

    folder: Path
    """Folder of their logs."""
    _held: dict[int, _Child] = field(default_factory=dict)
    _starting: dict[int, asyncio.Task[Any]] = field(default_factory=dict)
    _stopped: set[int] = field(default_factory=set)
    """Numbers of stopped processes: a late connection may deliver their start afterwards."""

    async def start_engine(self, number: int, request: StartEngine) -> StartedEngine:
        """Start an engine; raises as `launch_engine` does."""
        return await self._started(number, self._start_engine(number, request))

    async def start_module(self, number: int, request: StartModule) -> StartedModule:
        """Start a Python module that ends with its parent."""
        return await self._started(number, self._start_module(number, request))

    async def _started(self, number: int, start: Coroutine[Any, Any, _Started]) -> _Started:
        """Wait for a start, which `stop` and `stop_all` cancel."""
        task = asyncio.create_task(start)
        self._starting[number] = task
        task.add_done_callback(lambda _: self._starting.pop(number))
        if number in self._stopped:
            task.cancel()  # before its first line runs
        await asyncio.wait({task})
        if task.cancelled():
            raise ChildDied(f"process {number} was stopped while it started")
        return task.result()

    async def _start_engine(self, number: int, request: StartEngine) -> StartedEngine:
        engine = await launch_engine(
            request.backend,
            request.options,
            index=request.index,
            place=request.place,
            log_path=self.folder / request.log,
            ready_timeout_s=request.ready_timeout_s,
            request_timeout_s=request.request_timeout_s,
        )

        async def stop(at_once: bool) -> None:
            await engine.stop(at_once=at_once)

        self._hold(number, engine.child, stop)
        return StartedEngine(
            pid=engine.child.pid,
            base_url=engine.base_url,
            key=engine.client.key,
            version=engine.version,
            build=engine.build,
        )

    async def _start_module(self, number: int, request: StartModule) -> StartedModule:
        child = await start_child(
            request.name,
            request.module,
            request.arguments,
            log_path=self.folder / request.log,
            environment=request.environment,
        )

        async def stop(at_once: bool) -> None:
            await child.stop(at_once=at_once)

        self._hold(number, child, stop)
        return StartedModule(pid=child.pid)

    @property
    def ended(self) -> tuple[int, ...]:
        """Numbers of processes that have exited by themselves."""
        return tuple(number for number, held in self._held.items() if held.how)

    async def end_of(self, number: int) -> ProcessEnd:
        """Exit status of a process; ValueError for an unknown number."""
        held = self._get(number)
        return ProcessEnd(how=held.how, peak_memory_bytes=await held.process.peak_memory_bytes())

    def ask_to_end(self, number: int) -> None:
        """Send SIGTERM, and do not wait; raises as `end_of`."""
        self._get(number).process.ask_to_end()

    async def stop(self, number: int, *, at_once: bool) -> None:
        """Stop a process with its descendants, and wait; an unknown one never starts."""
        self._stopped.add(number)
        if (starting := self._starting.get(number)) is not None:
            starting.cancel()
            await asyncio.wait({starting})
        if (held := self._held.pop(number, None)) is not None:
            await self._stop(held, at_once=at_once)

    async def stop_all(self) -> None:
        """Kill all processes immediately, including those that are starting."""
        starting = list(self._starting.values())
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        held, self._held = self._held, {}
        self._stopped.clear()  # another incarnation has other numbers
        await asyncio.gather(*(self._stop(one, at_once=True) for one in held.values()))

    def _hold(
        self, number: int, process: RunningProcess, stop: Callable[[bool], Awaitable[None]]
    ) -> None:
        self._held[number] = held = _Child(process, stop)

        async def watch() -> None:
            held.how = str(await process.died())

        held.watcher = asyncio.create_task(watch(), name=f"watch {process.name}")

    def _get(self, number: int) -> _Child:
        held = self._held.get(number)
        if held is None:
            raise ValueError(f"there is no process {number}")
        return held

    async def _stop(self, held: _Child, *, at_once: bool) -> None:
        if held.watcher is not None:
            held.watcher.cancel()
        await held.stop(at_once)


@dataclass(slots=True)
class HostAgent:
    """The agent of this host."""

    name: str
    address: str
    port: int
    folder: Path
    token: str = field(repr=False)
    say: Callable[[str], None]
    """Prints events for the user."""
    incarnation: str = ""
    held: ChildProcesses = field(init=False)
    files: HostFiles = field(init=False)
    """Files of this incarnation."""
    data_plane: ASGIApp = field(init=False, repr=False)
    """Of this incarnation: folders for other hosts."""
    dismissed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the run no longer needs the host."""
    _run: RunLiveness | None = None
    """Facts about the run, from its welcome until the end of the lease."""
    _heard: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared while the run is silent."""

    def __post_init__(self) -> None:
        self.held = ChildProcesses(self.folder / "logs")
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        self._heard.set()

    def next_incarnation(self) -> HostFacts:
        """Start another incarnation, and return facts about this host."""
        self.incarnation = secrets.token_hex(8)
        plane = DataPlane(PlaneHost(self.name, f"{self.address}:{self.port}", self.incarnation))
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
        """Handle a heartbeat from the run that this incarnation has joined.

        `received` is the number of the newest reply that the run has received.
        """
        self._report_silence()
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
        """Wait while the run is silent; the incarnation may have changed afterwards."""
        self._report_silence()
        await self._heard.wait()

    async def serve_out_lease(self, welcome: Welcome) -> bool:
        """Return when heartbeats have stopped for the length of the lease, or the run has
        dismissed this host (True). Every process is gone then.
        """
        self._run = run = RunLiveness(
            silent_after_s=welcome.silent_after_s,
            lease_s=welcome.lease_s,
            heard_s=time.monotonic(),
        )
        try:
            while not (self.dismissed.is_set() or run.given_up(time.monotonic())):
                self._report_silence()
                await _wait(self.dismissed, min(run.next_look_s(time.monotonic()), _LOOK_S))
        finally:
            self.incarnation, self._run = "", None  # nothing starts any more
            self._heard.set()
            await self.held.stop_all()
            self.files.close()
        return self.dismissed.is_set()

    def _report_silence(self) -> None:
        """Report once if the run is silent."""
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


_Started = TypeVar("_Started", StartedEngine, StartedModule)
