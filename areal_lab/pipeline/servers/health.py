"""Is a server still there, and does it hold what it was given? Found out within a stated time.

    task       finds                               within
    death      its process ended                   at once, if the process is ours
    silence    gone, or hung                       interval_s + timeout_s since its last answer
    stall      what computes behind it is hung     interval_s + stall_s since its last answer
    weights    other weights than it was given     interval_s and an answer

Silence: every interval_s: GET /ready --answered--> wait for the next
                                      --silent, or refused, for timeout_s--> the server is lost

SGLang's /health is never asked: it generates a token, so that it hangs while generation is paused.
A server that is stopped (SIGSTOP) still accepts connections, and a busy one may be slow to answer:
only silence for the whole of `timeout_s` counts. SGLang and vLLM answer /ready and /health in a
process before the one that computes, which is asked by itself and answers between two steps. While
it is paused it is not: it may be loading, which has a bound of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from areal_lab.engines.client.engine_client import EngineError, EngineUnreachable, VersionMismatch
from areal_lab.host.processes import ChildDied
from areal_lab.pipeline.servers.server import EXIT_NOTICE_S, Server

RETRY_S = 0.1
"""Between two questions to a server that refuses to answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthLimits:
    """How often a server is asked, and how long it may be silent."""

    interval_s: float
    timeout_s: float
    stall_s: float

    @property
    def bound_s(self) -> float:
        """Longest time from the last answer of a server until it counts as lost."""
        return self.interval_s + self.timeout_s

    @property
    def stall_bound_s(self) -> float:
        """The same of what computes behind it."""
        return self.interval_s + self.stall_s


async def watch(
    server: Server, health: HealthLimits, check_weights: Callable[[Server], Awaitable[None]]
) -> None:
    """Return when the server is lost: found out here, or by somebody else.

    Args:
        check_weights: compares what the server holds with what it was given, and reports it.
    """
    checks = (
        _report_exit(server),
        _report_silence(server, health),
        _report_stall(server, health),
        _compare_weights(server, health, check_weights),
    )
    try:
        async with asyncio.TaskGroup() as watching:
            tasks = [watching.create_task(look) for look in checks]
            await server.lost.wait()
            for task in tasks:
                task.cancel()
    except* Exception:
        if not server.lost.is_set():
            raise  # else it is of a connection that was cut off


async def while_responsive(
    server: Server, health: HealthLimits, work: Coroutine[Any, Any, None]
) -> None:
    """`work` with a server that is not watched yet.

    Raises:
        EngineUnreachable: if it falls silent meanwhile.
    """
    working = asyncio.create_task(work)
    listening = asyncio.create_task(_wait_for_silence(server, health))
    try:
        await asyncio.wait({working, listening}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise listening.result()
        working.result()
    finally:
        for task in (working, listening):
            task.cancel()
        await asyncio.gather(working, listening, return_exceptions=True)


async def loss_cause(server: Server, error: Exception) -> Exception:
    """Why a server is lost: a connection breaks before its process is reaped, whose end says more
    than the connection's."""
    if server.child is None or isinstance(error, ChildDied | VersionMismatch):
        return error
    with suppress(TimeoutError):
        return await asyncio.wait_for(server.child.died(), EXIT_NOTICE_S)
    return error


async def _report_exit(server: Server) -> None:
    if server.child is not None:
        server.report_loss(server, await server.child.died())


async def _report_silence(server: Server, health: HealthLimits) -> None:
    server.report_loss(server, await _wait_for_silence(server, health))


async def _wait_for_silence(server: Server, health: HealthLimits) -> EngineUnreachable:
    """Ask again and again; return what is wrong once the server does not answer any more."""
    while True:
        await asyncio.sleep(health.interval_s)
        try:
            async with asyncio.timeout(health.timeout_s):
                while not await server.client.ready():
                    await asyncio.sleep(RETRY_S)
        except TimeoutError:
            return EngineUnreachable(
                f"{server.name} did not answer GET {server.client.api.ready.path} for "
                f"{health.timeout_s:g} s (rollout.health_timeout_s)"
            )


async def _report_stall(server: Server, health: HealthLimits) -> None:
    while True:
        await asyncio.sleep(health.interval_s)
        if server.paused:
            continue
        try:
            async with asyncio.timeout(health.stall_s):
                await server.client.ping_compute()
        except TimeoutError:
            if not server.paused:  # as it may be since it was asked
                error = EngineUnreachable(
                    f"{server.name} answers, but what computes behind it did not for "
                    f"{health.stall_s:g} s (rollout.stall_timeout_s)"
                )
                server.report_loss(server, error)
        except EngineError:
            pass  # how it answers, and whether it does, is what others look at


async def _compare_weights(
    server: Server, health: HealthLimits, check_weights: Callable[[Server], Awaitable[None]]
) -> None:
    """A server that was restarted behind our back has forgotten its weights."""
    while True:
        await asyncio.sleep(health.interval_s)
        with suppress(EngineError):  # a loss was reported; anything else shows elsewhere
            await check_weights(server)
