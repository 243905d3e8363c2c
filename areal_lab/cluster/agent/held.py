"""The processes that a host agent has started, by number.

start --number--> held --exit--> ended, with how, until the agent's next incarnation
                       --end---> stopped
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TypeVar

from areal_lab.cluster.records import (
    ProcessEnd,
    StartedEngine,
    StartedModule,
    StartEngine,
    StartModule,
)
from areal_lab.engines.launch.start import launch_engine
from areal_lab.host.processes import RunningProcess, start_child

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
    _numbers: count[int] = field(default_factory=lambda: count(1))
    _starting: set[asyncio.Task[StartedEngine] | asyncio.Task[StartedModule]] = field(
        default_factory=set
    )

    async def start_engine(self, request: StartEngine) -> StartedEngine:
        """Start an engine; raises as `launch_engine` does."""
        return await self._started(asyncio.create_task(self._start_engine(request)))

    async def start_module(self, request: StartModule) -> StartedModule:
        """Start a Python module that ends with its parent."""
        return await self._started(asyncio.create_task(self._start_module(request)))

    async def _started(self, task: asyncio.Task[_Started]) -> _Started:
        """Wait for a start, which `stop_all` cancels."""
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)
        return await task

    async def _start_engine(self, request: StartEngine) -> StartedEngine:
        engine = await launch_engine(
            request.backend,
            request.options,
            index=request.index,
            place=request.place,
            log_path=self.folder / f"engine-{request.index}.log",
            ready_timeout_s=request.ready_timeout_s,
            request_timeout_s=request.request_timeout_s,
        )

        async def stop(at_once: bool) -> None:
            await engine.stop(at_once=at_once)

        return StartedEngine(
            process=self._hold(engine.child, stop),
            pid=engine.child.pid,
            base_url=engine.base_url,
            key=engine.client.key,
            version=engine.version,
            build=engine.build,
        )

    async def _start_module(self, request: StartModule) -> StartedModule:
        child = await start_child(
            request.name,
            request.module,
            request.arguments,
            log_path=self.folder / request.log,
            environment=request.environment,
        )

        async def stop(at_once: bool) -> None:
            await child.stop(at_once=at_once)

        return StartedModule(process=self._hold(child, stop), pid=child.pid)

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
        """End a process with its descendants, and wait for it; one that is unknown is ended."""
        if (held := self._held.pop(number, None)) is not None:
            await self._stop(held, at_once=at_once)

    async def stop_all(self) -> None:
        """Kill all at once, also those that are starting."""
        starting = list(self._starting)
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        held, self._held = self._held, {}
        await asyncio.gather(*(self._stop(one, at_once=True) for one in held.values()))

    def _hold(self, process: RunningProcess, stop: Callable[[bool], Awaitable[None]]) -> int:
        number = next(self._numbers)
        self._held[number] = held = _Held(process, stop)

        async def watch() -> None:
            held.how = str(await process.died())

        held.watcher = asyncio.create_task(watch(), name=f"watch {process.name}")
        return number

    def _get(self, number: int) -> _Held:
        held = self._held.get(number)
        if held is None:
            raise ValueError(f"there is no process {number}")
        return held

    async def _stop(self, held: _Held, *, at_once: bool) -> None:
        if held.watcher is not None:
            held.watcher.cancel()
        await held.stop(at_once)
