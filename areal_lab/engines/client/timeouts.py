"""How long to wait for an engine: time in which it is paused by us does not count.

with patience.wait() as watch:      TimeoutError after `limit_s` of silence
    ... watch.heard() ...           a sign of life: the time starts again
patience.hold(), patience.go_on()   around a pause of any length
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Watch:
    """One wait."""

    def __init__(self, timeout: asyncio.Timeout, limit_s: float | None) -> None:
        self._timeout = timeout
        self._limit_s = limit_s
        self._held = False

    def heard(self) -> None:
        """There was a sign of life."""
        self.arm(held=self._held)

    def arm(self, *, held: bool) -> None:
        """Begin again, or stand still."""
        self._held = held
        if self._timeout.expired() or self._limit_s is None:
            return
        now_s = asyncio.get_running_loop().time()
        self._timeout.reschedule(None if held else now_s + self._limit_s)


class Patience:
    """All waits of one client."""

    def __init__(self, limit_s: float | None) -> None:
        self.limit_s = limit_s
        self._watches: set[Watch] = set()
        self._held = False

    @asynccontextmanager
    async def wait(self) -> AsyncIterator[Watch]:
        """Wait inside; `TimeoutError` after `limit_s` without a sign of life."""
        async with asyncio.timeout(None) as timeout:
            watch = Watch(timeout, self.limit_s)
            watch.arm(held=self._held)
            self._watches.add(watch)
            try:
                yield watch
            finally:
                self._watches.discard(watch)

    def hold(self) -> None:
        """Nothing is to be expected from now on."""
        self._set(True)

    def go_on(self) -> None:
        """From now on answers are due; the time of every wait starts again."""
        self._set(False)

    def _set(self, held: bool) -> None:
        self._held = held
        for watch in self._watches:
            watch.arm(held=held)
