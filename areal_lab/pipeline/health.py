"""Is a server still there? One that is gone or hung is found out within a stated time.

    every interval_s: GET /ready --answered--> wait for the next
                                 --silent, or refused, for timeout_s--> the server is lost

/health is never asked: SGLang generates a token for it, so that it hangs while generation is
paused. A server that is stopped (SIGSTOP) still accepts connections, and a busy one may be slow to
answer: only silence for the whole of `timeout_s` counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

RETRY_S = 0.1
"""Between two questions to a server that refuses to answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """How often a server is asked, and how long it may be silent."""

    interval_s: float
    timeout_s: float

    @property
    def bound_s(self) -> float:
        """Longest time from the last answer of a server until it counts as lost."""
        return self.interval_s + self.timeout_s


async def until_silent(ready: Callable[[], Awaitable[bool]], health: Health) -> str:
    """Ask again and again; return what is wrong once the server does not answer any more."""
    while True:
        await asyncio.sleep(health.interval_s)
        try:
            async with asyncio.timeout(health.timeout_s):
                while not await ready():
                    await asyncio.sleep(RETRY_S)
        except TimeoutError:
            return f"did not answer GET /ready for {health.timeout_s:g} s"
