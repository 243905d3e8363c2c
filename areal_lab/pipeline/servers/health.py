"""Health checks that find a dead or hung server, or wrong weights, within a known time.

    check      finds                               within
    exit       its process ended                   at once, if this run started it
    silence    the server is gone or hung          interval_s + timeout_s since its last reply
    stall      its compute process is hung         interval_s + stall_s since its last reply
    weights    other weights than the pushed ones  interval_s and one reply

Silence: every interval_s: GET /ready --reply--> wait for the next check
                                      --no reply, or refused, for timeout_s--> the server is lost

SGLang's /health is not used: it generates a token, so it hangs while generation is paused. A
stopped server (SIGSTOP) still accepts connections, and a busy one may reply slowly: only a silence
of `timeout_s` counts. Time in which a local server computed or waited for a CPU, or in which this
process did not listen, does not count (`control.liveness.Silence`). SGLang and vLLM serve /ready
and /health from a separate HTTP process, so the compute process is pinged as well; it replies
between two steps. A paused server is not pinged: it may be loading weights, which has a separate
timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from areal_lab.control.liveness import Silence
from areal_lab.engines.client.engine_client import EngineError, EngineUnreachable, VersionMismatch
from areal_lab.host.processes import ChildDied
from areal_lab.host.silence import unless_silent
from areal_lab.pipeline.servers.server import EXIT_NOTICE_S, Server

RETRY_S = 0.1
"""Pause between two requests to a server that is not ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthLimits:
    """Interval and timeouts of the health checks."""

    interval_s: float
    timeout_s: float
    stall_s: float

    @property
    def bound_s(self) -> float:
        """Maximum time from the last reply of a server until it counts as lost."""
        return self.interval_s + self.timeout_s

    @property
    def stall_bound_s(self) -> float:
        """Maximum time from the last reply of its compute process until a server counts as lost."""
        return self.interval_s + self.stall_s


async def watch(
    server: Server, health: HealthLimits, check_weights: Callable[[Server], Awaitable[None]]
) -> None:
    """Check a server until it is lost; another call may also find the loss.

    Args:
        server: the server.
        health: interval and timeouts.
        check_weights: compares the server's weights with the pushed ones, and reports a loss.
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
            raise  # otherwise the error comes from the connection that was closed


async def while_responsive(
    server: Server, health: HealthLimits, work: Coroutine[Any, Any, None]
) -> None:
    """Run `work` on a server that `watch` does not check yet.

    Raises:
        EngineUnreachable: the server did not reply for the timeout.
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
    """Return the reason of a loss: if the process exits soon, its exit instead of `error`.

    The exit explains more than the broken connection that precedes it.
    """
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
    """Check every `interval_s`; return the error once the server does not reply."""
    while True:
        await asyncio.sleep(health.interval_s)
        silence = Silence(health.timeout_s)
        try:
            await unless_silent(
                _ready(server), silence.passed, server.computes(), limit_s=health.timeout_s
            )
        except TimeoutError:
            busy = f", and was busy for {silence.busy_s:.0f} s" if silence.busy_s else ""
            return EngineUnreachable(
                f"{server.name} did not respond to GET {server.client.api.ready.path} for "
                f"{health.timeout_s:g} s (rollout.health_timeout_s){busy}"
            )
        if silence.total_s > health.timeout_s:
            server.note(
                f"{server.name} did not respond for {silence.total_s:.0f} s, "
                "but is alive: the machine is busy"
            )


async def _ready(server: Server) -> None:
    while not await server.client.ready():
        await asyncio.sleep(RETRY_S)


async def _report_stall(server: Server, health: HealthLimits) -> None:
    while True:
        await asyncio.sleep(health.interval_s)
        if server.paused:
            continue
        silence = Silence(health.stall_s)
        try:
            # The HTTP process is always busy, so its CPU time does not count here.
            await unless_silent(
                server.client.ping_compute(), silence.passed, limit_s=health.stall_s
            )
        except TimeoutError:
            if not server.paused:  # it may have been paused since the request
                error = EngineUnreachable(
                    f"{server.name} responds, but its compute process did not for "
                    f"{health.stall_s:g} s (rollout.stall_timeout_s)"
                )
                server.report_loss(server, error)
        except EngineError:
            pass  # the other checks handle a refused or failed request


async def _compare_weights(
    server: Server, health: HealthLimits, check_weights: Callable[[Server], Awaitable[None]]
) -> None:
    """Find a server that lost its weights, such as after a restart by its owner."""
    while True:
        await asyncio.sleep(health.interval_s)
        with suppress(EngineError):  # a loss was reported; the other checks find the rest
            await check_weights(server)
