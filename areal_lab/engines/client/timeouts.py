"""Request timeouts that stop while we have paused the engine.

async with timeouts.request() as timeout:     TimeoutError after `limit_s` without a message
    ... timeout.restart() ...                 a message arrived: the time starts over
timeouts.pause(), timeouts.resume()           around a pause of the engine, however long
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class RequestTimeout:
    """The timeout of one request."""

    def __init__(self, timeout: asyncio.Timeout, limit_s: float | None) -> None:
        self._timeout = timeout
        self._limit_s = limit_s
        self._paused = False

    def restart(self) -> None:
        """Start the time over: a message arrived."""
        self.arm(paused=self._paused)

    def arm(self, *, paused: bool) -> None:
        """Start the time over, or stop it while `paused`."""
        self._paused = paused
        if self._timeout.expired() or self._limit_s is None:
            return
        now_s = asyncio.get_running_loop().time()
        self._timeout.reschedule(None if paused else now_s + self._limit_s)


class RequestTimeouts:
    """The timeouts of all requests of one client."""

    def __init__(self, limit_s: float | None) -> None:
        self.limit_s = limit_s
        self._active: set[RequestTimeout] = set()
        self._paused = False

    @asynccontextmanager
    async def request(self) -> AsyncIterator[RequestTimeout]:
        """Raise `TimeoutError` inside the block after `limit_s` without a message."""
        async with asyncio.timeout(None) as timeout:
            one = RequestTimeout(timeout, self.limit_s)
            one.arm(paused=self._paused)
            self._active.add(one)
            try:
                yield one
            finally:
                self._active.discard(one)

    def pause(self) -> None:
        """Stop every timeout: no message is expected from now on."""
        self._set(True)

    def resume(self) -> None:
        """Start the time of every request over: messages are expected again."""
        self._set(False)

    def _set(self, paused: bool) -> None:
        self._paused = paused
        for one in self._active:
            one.arm(paused=paused)
