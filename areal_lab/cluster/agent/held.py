"""The processes that a host agent has started, by the number that the run gives each.

start --number--> held --exit--> ended, with how, until the agent's next incarnation
                       --stop--> stopped, also while it starts, or before a start that is late
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from areal_lab.cluster.records import (
    ProcessEnd,
    StartedEngine,
    StartedModule,
    StartEngine,
    StartModule,
)
from areal_lab.engines.launch.start import launch_engine
from areal_lab.host.processes import ChildDied, RunningProcess, start_child

_Started = TypeVar("_Started", StartedEngine, StartedModule)


@dataclass(slots=True)
class _Held:
    process: RunningProcess
    stop: Callable[[bool], Awaitable[None]]
    """Called with whether it is killed at once."""
    how: str = ""
    watcher: asyncio.Task[None] | None = None


@dataclass(slots=True)
class HeldProcesses:
    """Children of an agent. They end with it, however it ends."""

    folder: Path
    """For their logs."""
    _held: dict[int, _Held] = field(default_factory=dict)
    _starting: dict[int, asyncio.Task[Any]] = field(default_factory=dict)
    _stopped: set[int] = field(default_factory=set)
    """A start may come after its end, if a connection delivers it late."""

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
            task.cancel()  # before its first line
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
        """Numbers of those that have ended by themselves."""
        return tuple(number for number, held in self._held.items() if held.how)

    async def end_of(self, number: int) -> ProcessEnd:
        """How a process ended, if it has.

        Raises:
            ValueError: if there is none of this number.
        """
        held = self._get(number)
        return ProcessEnd(how=held.how, peak_memory_bytes=await held.process.peak_memory_bytes())

    def ask_to_end(self, number: int) -> None:
        """Send SIGTERM, and do not wait; raises as `end_of`."""
        self._get(number).process.ask_to_end()

    async def stop(self, number: int, *, at_once: bool) -> None:
        """End a process with its descendants, and wait for it; one that is unknown never starts."""
        self._stopped.add(number)
        if (starting := self._starting.get(number)) is not None:
            starting.cancel()
            await asyncio.wait({starting})
        if (held := self._held.pop(number, None)) is not None:
            await self._stop(held, at_once=at_once)

    async def stop_all(self) -> None:
        """Kill all at once, also those that are starting."""
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
        self._held[number] = held = _Held(process, stop)

        async def watch() -> None:
            held.how = str(await process.died())

        held.watcher = asyncio.create_task(watch(), name=f"watch {process.name}")

    def _get(self, number: int) -> _Held:
        held = self._held.get(number)
        if held is None:
            raise ValueError(f"there is no process {number}")
        return held

    async def _stop(self, held: _Held, *, at_once: bool) -> None:
        if held.watcher is not None:
            held.watcher.cancel()
        await held.stop(at_once)
