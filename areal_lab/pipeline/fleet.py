"""The processes of one run: started here, watched during the run, stopped at its end.

guard(work)   returns what `work` returns, or raises
    ChildDied, with the end of its output, as soon as the trainer dies
    the first error of `work`, taken out of the exception groups around it
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
    """The child processes of one run, and everything else that is closed with it."""

    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    children: list[RunningProcess] = field(default_factory=list)
    """Trainer and engines, in start order."""
    _deaths: asyncio.Queue[ChildDied] = field(default_factory=asyncio.Queue)
    _watchers: list[asyncio.Task[None]] = field(default_factory=list)

    async def __aenter__(self) -> Fleet:
        """Start nothing yet."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop everything, newest first."""
        for watcher in self._watchers:
            watcher.cancel()
        await self.stack.aclose()

    async def start_trainer(self, start: Callable[[], Awaitable[RunningTrainer]]) -> RunningTrainer:
        """Start the trainer, and end the run if it dies from then on."""
        trainer = await start()
        self.stack.push_async_callback(trainer.stop)
        for child in trainer.children:
            self.watch(child)
        return trainer

    def add_engine(self, engine: EngineProcess | EngineClient) -> None:
        """List an engine; the server pool watches and stops it."""
        if isinstance(engine, EngineProcess):
            self.children.append(engine.child)

    def watch(self, child: RunningProcess) -> None:
        """End the run if `child` dies from now on."""

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
    """The first error inside nested exception groups; a child's death takes precedence."""
    leaves: list[BaseException] = []

    def collect(node: BaseException) -> None:
        if isinstance(node, BaseExceptionGroup):
            for inner in node.exceptions:
                collect(inner)
        else:
            leaves.append(node)

    collect(error)
    return next((leaf for leaf in leaves if isinstance(leaf, ChildDied)), leaves[0])
