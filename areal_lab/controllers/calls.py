"""Calls over a pipe: requests with numbers, replies in any order.

Caller.ask(body) --(number, body)--> serve(pipe, handle): a task for each request
                 <--(number, reply | error)--
"""

from __future__ import annotations

import asyncio
import pickle
import threading
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from areal_lab.host.pipes import in_own_thread, shut
from areal_lab.host.processes import ChildDied, RunningProcess


class CallFailed(RuntimeError):
    """A call raised in the other process; the message is its error."""


@dataclass(frozen=True, slots=True)
class _Request:
    number: int
    body: object


@dataclass(frozen=True, slots=True)
class _Reply:
    number: int
    body: object = None
    error: str = ""
    traceback: str = ""


@dataclass(slots=True)
class Traffic:
    """Bytes of the messages of a pipe."""

    sent_bytes: int = 0
    received_bytes: int = 0


@dataclass(slots=True)
class Caller:
    """The end that asks. Make it in an event loop, and `close` it."""

    pipe: Connection
    process: RunningProcess
    """At the other end."""
    traffic: Traffic = field(default_factory=Traffic)
    _waiting: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    _numbers: count[int] = field(default_factory=count)
    _lost: ChildDied | None = None
    _sending: threading.Lock = field(default_factory=threading.Lock)
    """A long message takes several writes, in a thread that a canceled call leaves behind."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        for work in (self._read(), self._watch()):
            task = asyncio.create_task(work, name=f"calls of {self.process.name}")
            self._tasks.add(task)

    async def ask(self, body: object) -> Any:
        """Send a request and wait for its reply.

        Raises:
            CallFailed: as the other process says.
            ChildDied: it ended before it replied.
        """
        if self._lost is not None:
            raise self._lost
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        data = pickle.dumps(_Request(number, body), pickle.HIGHEST_PROTOCOL)
        self.traffic.sent_bytes += len(data)
        try:
            with suppress(OSError):  # the end of the process is told by `_watch`
                await asyncio.to_thread(self._send, data)
            return await future
        finally:
            self._waiting.pop(number, None)

    async def close(self) -> None:
        """Ask nothing any more."""
        shut(self.pipe)
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _send(self, data: bytes) -> None:
        with self._sending:
            self.pipe.send_bytes(data)

    async def _read(self) -> None:
        while True:
            try:
                data = await in_own_thread(self.pipe.recv_bytes)
            except (EOFError, OSError):
                return
            self.traffic.received_bytes += len(data)
            reply = pickle.loads(data)  # the other end has shown the key of this run
            future = self._waiting.get(reply.number)
            if future is None or future.done():
                continue
            if reply.error:
                error = CallFailed(reply.error)
                error.add_note(reply.traceback)
                future.set_exception(error)
            else:
                future.set_result(reply.body)

    async def _watch(self) -> None:
        self._lost = await self.process.died()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._lost)


async def serve(pipe: Connection, handle: Callable[[Any], Awaitable[object]]) -> None:
    """Answer requests, each in a task of its own, until the other end closes the pipe.

    Args:
        pipe: to the other process.
        handle: replies to a request; what it raises becomes `CallFailed` there.
    """
    sending, tasks = asyncio.Lock(), set[asyncio.Task[None]]()

    async def answer(request: _Request) -> None:
        try:
            reply = _Reply(request.number, await handle(request.body))
        except Exception as error:  # any error is the caller's to handle
            text = str(error) or type(error).__name__
            reply = _Reply(request.number, error=text, traceback=traceback.format_exc())
        data = pickle.dumps(reply, pickle.HIGHEST_PROTOCOL)
        async with sending:
            with suppress(OSError):  # the caller is gone, and this process ends with it
                await asyncio.to_thread(pipe.send_bytes, data)

    try:
        while True:
            try:
                data = await in_own_thread(pipe.recv_bytes)
            except (EOFError, OSError):
                return
            request = pickle.loads(data)
            task = asyncio.create_task(answer(request))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    finally:
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
