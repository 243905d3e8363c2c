"""Processes of one run: start them, watch them during the run, and stop them at its end.

guard(work)   returns the result of `work`, or raises
    ChildDied, with the end of the process's output, as soon as the trainer dies
    the first error of `work`, taken out of its exception groups
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

from areal_lab.engines.client.engine_client import EngineClient
from areal_lab.engines.launch.start import EngineProcess
from areal_lab.host.processes import ChildDied, RunningProcess
from areal_lab.training.protocol import RunningTrainer

Result = TypeVar("Result")


@dataclass(slots=True)
class Fleet:
    """Child processes of one run, and the stack of everything to close at its end."""

    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    children: list[RunningProcess] = field(default_factory=list)
    """Trainer and engines, in start order."""
    _deaths: asyncio.Queue[ChildDied] = field(default_factory=asyncio.Queue)
    _watchers: list[asyncio.Task[None]] = field(default_factory=list)

    async def __aenter__(self) -> Fleet:
        """Enter without starting anything."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop everything, the newest first."""
        for watcher in self._watchers:
            watcher.cancel()
        await self.stack.aclose()

    async def start_trainer(self, start: Callable[[], Awaitable[RunningTrainer]]) -> RunningTrainer:
        """Start the trainer; its death ends the run from then on."""
        trainer = await start()
        self.stack.push_async_callback(trainer.stop)
        for child in trainer.children:
            self.watch(child)
        return trainer

    def add_engine(self, engine: EngineProcess | EngineClient) -> None:
        """Add an engine to `children`; the server pool watches and stops it."""
        if isinstance(engine, EngineProcess):
            self.children.append(engine.child)

    def watch(self, child: RunningProcess) -> None:
        """Watch a process; its death ends the run from now on."""

        self.children.append(child)

        async def report() -> None:
            self._deaths.put_nowait(await child.died())

        self._watchers.append(asyncio.create_task(report(), name=f"watch {child.name}"))

    async def guard(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` until it returns, raises, or a watched process dies."""
        working = asyncio.create_task(work, name="run")
        dying = asyncio.create_task(self._deaths.get(), name="watch processes")
        try:
            await asyncio.wait({working, dying}, return_when=asyncio.FIRST_COMPLETED)
            if dying.done():
                raise dying.result()
            try:
                return working.result()
            except BaseExceptionGroup as errors:
                raise first_error(errors) from errors
        finally:
            dying.cancel()
            working.cancel()
            with suppress(BaseException):  # already raised above, or superseded by the first error
                await working


def first_error(error: BaseException) -> BaseException:
    """Return the first error in nested exception groups; a child's death takes precedence."""
    leaves: list[BaseException] = []

    def collect(node: BaseException) -> None:
        if isinstance(node, BaseExceptionGroup):
            for inner in node.exceptions:
                collect(inner)
        else:
            leaves.append(node)

    collect(error)
    return next((leaf for leaf in leaves if isinstance(leaf, ChildDied)), leaves[0])
