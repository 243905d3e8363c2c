"""Pool of the inference servers of a run: live and lost servers, restarts and weight updates.

    alive --exit | silence | broken connection | other weights--> lost --restarted--> alive
                                                                      \\-> given up

    task             produces                         waits for
    watch (each)     EngineLost                       exit, silence or other weights of the server
    restart (each)   EngineJoined; EngineLost again,  a new process, or a reply from its address;
                     when it is given up              then the end of a running weight update
    add (each)       EngineJoined                     the same
    retire (each)    EngineRetired, at once           its last tokens, which the run keeps

A restarted server loads the current weights, and reports them, before it joins. Outside of training
no events are sent, and evaluation uses the live servers.

A pinned server keeps its weights while the others load new ones, so held-out responses have one
version. Groups that run on it end there; new groups go to another server.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from areal_lab.control.events import (
    EngineId,
    EngineJoined,
    EngineLost,
    EngineRetired,
    Event,
    Version,
)
from areal_lab.engines.client.engine_client import (
    EngineClient,
    EngineError,
    EngineUnreachable,
    VersionMismatch,
)
from areal_lab.engines.launch.start import EngineProcess
from areal_lab.engines.protocol import MemoryTag, PauseMode, WeightsFolder
from areal_lab.pipeline.servers.health import HealthLimits, loss_cause, watch, while_responsive
from areal_lab.pipeline.servers.server import PreparePush, Server, Weights

RESTART_PAUSE_S = 1.0
"""Pause before another attempt to restart a server: the cause of the failure may be temporary."""


EngineSource: TypeAlias = Callable[[], Awaitable[EngineProcess | EngineClient]]
"""Starts a server, or waits for an attached one; returns when it is ready."""


@dataclass(frozen=True, slots=True)
class _Pin:
    """A server that keeps its weights."""

    server: Server
    version: Version


@dataclass(slots=True, kw_only=True)
class ServerPool:
    """The engines of one run."""

    sources: dict[EngineId, EngineSource]
    later: dict[EngineId, EngineSource] = field(default_factory=dict)
    """Sources of engines that may join during the run, including retired ones."""
    scales: bool = False
    """True if engines may join."""
    health: HealthLimits
    startup_s: float = 0.0
    """Seconds that the first engines took to start, including the trainer's start."""
    max_restarts: int
    """Restarts (reconnects, for attached servers) allowed per server."""
    pause_mode: PauseMode
    weights: Weights
    """Weights of every engine in `alive` except a pinned one."""
    prepare_push: PreparePush
    """Prepares a push of weights into engines."""
    foreign: bool = False
    """True if the servers keep the weights of their owners, who may change them at any time; then
    versions are not checked."""
    takes_turns: bool = False
    """True if engines and trainer share devices and compute in turns."""
    note: Callable[[str], None]
    """Shows a message to the user."""
    opened: Callable[[EngineProcess | EngineClient], None] = lambda _: None
    """Called with each server that was started or attached."""
    sample_ended: Callable[[str], None] = lambda _: None
    """Called with the name of each request whose sample ended, perhaps several times."""
    alive: dict[EngineId, Server] = field(default_factory=dict)
    given_up: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the last server is lost and none restarts, or when a task of the pool failed."""
    last_error: BaseException | None = None
    """Reason of the last loss, or of `given_up`."""
    counts: Counter[str] = field(default_factory=Counter)
    """`engine_losses`, `engine_restarts`, `version_mismatches`, `engines_added`,
    `engines_retired`, `engine_start_failures`."""
    backend: str = ""
    """Engine type reported by the first server; with `addresses` the config may not name it."""
    engine_version: str = ""
    """Version of the engine's package."""
    _newest: Version = 0
    _pin: _Pin | None = None
    _redirected: int = 0
    """Number of groups that another engine took because their engine was pinned."""
    _restarts: Counter[EngineId] = field(default_factory=Counter)
    _restarting: set[EngineId] = field(default_factory=set)
    _starting: set[EngineId] = field(default_factory=set)
    """Engines that are being added."""
    _leaving: set[EngineId] = field(default_factory=set)
    """Retired engines whose process still runs."""
    _announced_returns: set[EngineId] = field(default_factory=set)
    """Lost engines whose return was announced to the coordinator."""
    _send_event: Callable[[Event], None] | None = None
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _weights_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _devices: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock of devices that engines share with the trainer, taken for the trainer's turn and for the
    restart of an engine."""
    _released: bool = False
    """True during the trainer's turn."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _opened: list[Server] = field(default_factory=list)
    """Every server of the run, including lost ones."""

    @property
    def restarts_possible(self) -> bool:
        """True if engines may restart or join, and need the current weights again."""
        return self.max_restarts > 0 or self.scales

    async def start(self) -> None:
        """Open all sources concurrently; if one fails, close the others.

        Raises:
            ExceptionGroup: contains the first error.
        """
        self._newest = self.weights.version

        async def first(number: EngineId) -> None:
            server = self._server(number, await self.sources[number]())
            async with self._closed_on_error(server):
                await while_responsive(
                    server,
                    self.health,
                    self._push_to_one(server)
                    if server.process is None
                    else server.check_version(self.weights.version),
                )
            self.alive[number] = server

        try:
            async with asyncio.TaskGroup() as starting:
                for number in self.sources:
                    starting.create_task(first(number), name=f"start engine {number}")
        except BaseException:
            await self.close()
            raise
        self.alive = dict(sorted(self.alive.items()))
        for server in self.alive.values():
            self._spawn(watch(server, self.health, self._check_weights), f"watch {server.name}")
        with suppress(EngineError):  # some servers do not report them
            self.backend, self.engine_version = await next(iter(self.alive.values())).engine()

    async def close(self) -> None:
        """Stop the servers that this run started, and the pool's tasks."""
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Close lost ones too: the task that was closing one may have been cancelled above.
        await asyncio.gather(*(server.close() for server in self._opened))

    # --- for the event loop of the run -----------------------------------------------------------

    async def begin(self, send_event: Callable[[Event], None]) -> tuple[EngineId, ...]:
        """Start sending events of losses and returns; returns the engines that are alive.

        Raises:
            Exception: no engine is left; the reason of the last loss.
        """
        await self._wait_for_engine()
        self._send_event = send_event
        return tuple(sorted(self.alive))

    def end(self) -> None:
        """Stop sending events."""
        self._send_event = None
        self._announced_returns.clear()

    def engine(self, number: EngineId) -> Server:
        """Return the engine with this number.

        Raises:
            EngineUnreachable: the engine is lost.
        """
        server = self.alive.get(number)
        if server is None:
            raise EngineUnreachable(f"engine {number} is lost")
        return server

    async def round_robin(self, turn: int) -> EngineId:
        """Return the number of the next live engine in turn; waits while all are restarting.

        Raises:
            Exception: no engine is left; the reason of the last loss.
        """
        await self._wait_for_engine()
        numbers = sorted(self.alive)
        return numbers[turn % len(numbers)]

    async def for_rollouts(self) -> list[EngineId]:
        """Return the engines for rollouts: all but a pinned one, unless it is the only one.

        Raises:
            Exception: no engine is left; the reason of the last loss.
        """
        await self._wait_for_engine()
        return sorted(self.alive.keys() - {self.pinned}) or sorted(self.alive)

    @property
    def pinned(self) -> EngineId | None:
        """Number of the pinned engine; None without one."""
        return None if self._pin is None else self._pin.server.number

    def pin(self) -> EngineId | None:
        """Pin one engine to its current weights until `unpin`; returns its number.

        Returns None if rollouts would have no other engine, if the weights that the engine loads
        afterwards may be gone, or if engines lose their weights in the trainer's turns.
        """
        kept = isinstance(self.weights, WeightsFolder) or self.restarts_possible
        if self._pin is not None or len(self.alive) < 2 or not kept or self.takes_turns:
            return None
        number = max(self.alive)
        self._pin = _Pin(self.alive[number], self.weights.version)
        return number

    async def unpin(self) -> None:
        """Load the current weights into the pinned engine, if any, and allow its rollouts again."""
        async with self._weights_lock:
            if (pin := self._pin) is None:
                return
            server, paused = pin.server, pin.server.paused
            try:
                if pin.version != self.weights.version:
                    if not paused:
                        await server.pause(self.pause_mode)
                    await self._push_to_one(server)
                self._pin = None
                if not paused:
                    await server.resume()
            except EngineUnreachable:
                pass  # reported by the server's own call
            except EngineError as error:
                self.mark_lost(server, error)
        async with self._changed:
            self._changed.notify_all()

    async def takes_rollouts_of(self, number: EngineId) -> EngineId:
        """Return the engine for a new group of engine `number`: another one while it is pinned."""
        if self.pinned != number:
            return number
        async with self._changed:  # wait if the pinned engine is the only one
            await self._changed.wait_for(lambda: self.pinned != number or len(self.alive) > 1)
        if self.pinned != number:
            return number
        others = sorted(self.alive.keys() - {number})
        self._redirected += 1
        return others[self._redirected % len(others)]

    @property
    def paused(self) -> bool:
        """True if an engine is paused."""
        return any(server.paused for server in self.alive.values())

    async def pause(self, *, also_pinned: bool = False) -> None:
        """Pause all engines, and a pinned one only with `also_pinned`: it gets no weights."""
        async with self._weights_lock:
            await self._for_each(
                lambda server: server.pause(self.pause_mode),
                None if also_pinned else self.pinned,
            )

    async def resume(self) -> None:
        """Resume all engines."""
        async with self._weights_lock:
            await self._for_each(Server.resume)

    async def release(self) -> None:
        """Start the trainer's turn on shared devices; `load` ends it.

        Waits for engines that are restarting. An engine that does not release its memory counts as
        lost.
        """
        if not self.takes_turns or self._released:
            return
        await self._devices.acquire()
        self._released = True
        async with self._weights_lock:
            for server, error in (await self._for_each(Server.release)).items():
                self.mark_lost(server, error)
        # A process that is being stopped keeps its memory until it has exited.
        await asyncio.gather(*(s.close() for s in self._opened if s.lost.is_set()))

    async def abort(self, request_ids: list[str]) -> None:
        """Abort these requests on every engine."""
        await self._for_each(lambda server: server.abort(request_ids))

    async def load(self, weights: Weights) -> None:
        """Load a version into all engines but a pinned one; an engine that fails counts as lost.

        In the trainer's turn, engines first take back their memory; they stay paused.

        Raises:
            EngineError: every engine refused, so the weights are at fault.
        """
        async with self._weights_lock:
            self._newest = weights.version
            await self._take_back(MemoryTag.WEIGHTS)
            pinned = self.pinned
            loading = [server for number, server in self.alive.items() if number != pinned]
            push_to = self.prepare_push(weights, [s.client for s in loading], self.pause_mode)
            refusals = await self._for_each(lambda s: s.take_weights(push_to(s.client)), pinned)
            if refusals and len(refusals) == len(loading):
                raise next(iter(refusals.values()))
            for server, error in refusals.items():
                self.mark_lost(server, error)
            self.weights = weights
            await self._take_back(MemoryTag.KV_CACHE)
        if self._released:
            self._released = False
            self._devices.release()

    def mark_lost(self, server: Server, error: Exception) -> None:
        """Remove a server that is dead, hung, or has other weights. Idempotent."""
        number = server.number
        if server.lost.is_set():
            return
        self.counts["version_mismatches"] += isinstance(error, VersionMismatch)
        if self.alive.get(number) is not server:
            return  # the server has not joined yet
        del self.alive[number]
        server.mark_lost(error)
        if self.pinned == number:
            self._pin = None
        elif self.pinned in self.alive and len(self.alive) == 1:
            self._spawn(self.unpin(), "unpin the last engine")
        self.counts["engine_losses"] += 1
        returns = self._restarts[number] < self.max_restarts
        if returns:
            self._restarting.add(number)
            self._announced_returns |= set() if self._send_event is None else {number}
        self.emit(EngineLost(number, tokens_kept=True, returns=returns))
        self._spawn(self._after_loss(server, error), f"restart {server.name}")

    # --- engines that join and leave -------------------------------------------------------------

    @property
    def changing(self) -> bool:
        """True while engines are starting or leaving."""
        return bool(self._starting or self._restarting or self._leaving)

    def add_engine(self) -> EngineId | None:
        """Start another engine; returns the lowest free number, or None if none is free.

        The engine joins once it has the current weights. If it does not start, the run continues
        without it.
        """
        busy = {*self.alive, *self._restarting, *self._starting, *self._leaving}
        number = min({*self.sources, *self.later} - busy, default=None)
        if number is None:
            return None
        if number in self.later:
            self.sources[number] = self.later.pop(number)
        self._restarts[number] = 0
        self._starting.add(number)
        self._spawn(self._add(number), f"add engine {number}")
        return number

    def retire_engine(self) -> EngineId | None:
        """Retire the engine with the highest number; returns the number, or None.

        Its groups continue on the others with their tokens. The last engine and a pinned engine
        stay.
        """
        number = max(self.alive.keys() - {self.pinned}, default=None)
        if number is None or len(self.alive) < 2:
            return None
        server = self.alive.pop(number)
        self._leaving.add(number)
        self.later[number] = self.sources.pop(number)
        self.counts["engines_retired"] += 1
        self.emit(EngineRetired(number))
        if self.pinned in self.alive and len(self.alive) == 1:
            self._spawn(self.unpin(), "unpin the last engine")
        self._spawn(self._retire(server), f"retire {server.name}")
        return number

    # --- internal --------------------------------------------------------------------------------

    async def _take_back(self, tag: MemoryTag) -> None:
        for server, error in (await self._for_each(lambda s: s.take_back(tag))).items():
            self.mark_lost(server, error)

    @asynccontextmanager
    async def _closed_on_error(self, server: Server) -> AsyncIterator[None]:
        """Close a server on an error of the block, and raise the reason of the failure."""
        try:
            yield
        except BaseException as error:
            reason = await loss_cause(server, error) if isinstance(error, Exception) else error
            await server.close()
            if reason is error:
                raise
            raise reason from error

    async def _push_to_one(self, server: Server) -> None:
        """Load the current weights into one server."""
        push_to = self.prepare_push(self.weights, [server.client], self.pause_mode)
        await server.take_weights(push_to(server.client))

    async def _for_each(
        self, call: Callable[[Server], Awaitable[None]], without: EngineId | None = None
    ) -> dict[Server, EngineError]:
        """Call all servers concurrently; returns refusals, while losses report themselves."""
        refusals: dict[Server, EngineError] = {}

        async def one(server: Server) -> None:
            try:
                await call(server)
            except EngineUnreachable:
                pass  # reported by the server's own call
            except EngineError as error:
                refusals[server] = error

        called = [server for number, server in self.alive.items() if number != without]
        await asyncio.gather(*map(one, called))
        return refusals

    def _server(self, number: EngineId, opened: EngineProcess | EngineClient) -> Server:
        self.opened(opened)
        process = opened if isinstance(opened, EngineProcess) else None
        server = Server(
            number=number,
            client=opened.client if isinstance(opened, EngineProcess) else opened,
            process=process,
            report_loss=self.mark_lost,
            note=self.note,
            versions=lambda: self._versions_of(number),
        )
        server.client.report_samples(self._sample_ended)
        self._opened.append(server)
        return server

    def _versions_of(self, number: EngineId) -> tuple[Version, Version]:
        """Return the oldest and the newest version that an engine may have at the moment."""
        if self.foreign:
            return 0, sys.maxsize
        if self._pin is not None and self._pin.server.number == number:
            return self._pin.version, self._pin.version
        return self.weights.version, self._newest

    async def _check_weights(self, server: Server) -> None:
        if self.foreign:
            return
        async with self._weights_lock:
            if not server.released:
                expected, _ = self._versions_of(server.number)
                await server.check_version(expected)

    async def _after_loss(self, server: Server, error: Exception) -> None:
        await server.disconnect()
        self.last_error = error = await loss_cause(server, error)
        returns = server.number in self._restarting
        what = "restarting" if returns else f"{len(self.alive)} left"
        self.note(f"{server.name} is lost ({what}): {_first_line(error)}")
        if not returns:
            await self._give_up_if_none_left()
        await server.close()
        if returns:
            await self._restart(server.number)

    async def _add(self, number: EngineId) -> None:
        try:
            await self._join(number, await self.sources[number](), "joined")
            self.counts["engines_added"] += 1
        except Exception as error:  # the run continues without this engine, whatever the error
            self.counts["engine_start_failures"] += 1
            self.later[number] = self.sources.pop(number)
            self.note(f"engine {number} did not start: {_first_line(error)}")
        finally:
            self._starting.discard(number)

    async def _retire(self, server: Server) -> None:
        try:
            async with self._weights_lock:
                with suppress(EngineError):  # the tokens received so far are kept
                    if not server.paused:  # pausing flushes the generated tokens
                        await server.pause(self.pause_mode)
                server.lost.set()
            await server.disconnect()
            await server.close()
            self.note(f"{server.name} has left; {len(self.alive)} engines")
        finally:
            self._leaving.discard(server.number)

    async def _restart(self, number: EngineId) -> None:
        """Open the source again, at most `max_restarts` times, until the engine joins."""
        while self._restarts[number] < self.max_restarts:
            self._restarts[number] += 1
            try:
                async with self._devices if self.takes_turns else nullcontext():
                    await self._join(number, await self.sources[number](), "is back")
                self.counts["engine_restarts"] += 1
                return
            except Exception as error:  # any failure of a restart leads to the next attempt
                self.last_error = error
                left = self.max_restarts - self._restarts[number]
                self.note(f"engine {number} did not come back ({left} attempts left): "
                          f"{_first_line(error)}")  # fmt: skip
                await asyncio.sleep(RESTART_PAUSE_S)
        self._restarting.discard(number)
        if number in self._announced_returns:
            self._announced_returns.discard(number)
            self.emit(EngineLost(number))
        await self._give_up_if_none_left()

    async def _join(
        self, number: EngineId, opened: EngineProcess | EngineClient, what: str
    ) -> None:
        server = self._server(number, opened)
        async with self._closed_on_error(server), self._weights_lock:
            # The push checks the version and the checksum that the server reports.
            await while_responsive(server, self.health, self._push_to_one(server))
            self._restarting.discard(number)
            self._announced_returns.discard(number)
            self.alive[number] = server
            self.emit(EngineJoined(number))
        self.note(f"{server.name} {what} with version {self.weights.version}")
        self._spawn(watch(server, self.health, self._check_weights), f"watch {server.name}")
        async with self._changed:
            self._changed.notify_all()

    async def _give_up_if_none_left(self) -> None:
        if not self.alive and not self._restarting:
            self.given_up.set()
            async with self._changed:
                self._changed.notify_all()

    async def _wait_for_engine(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.alive or self.given_up.is_set())
        if not self.alive:
            assert self.last_error is not None, "a lost engine leaves a reason"
            raise self.last_error

    def _sample_ended(self, name: str) -> None:
        self.sample_ended(name)  # set after the first servers have started

    def emit(self, event: Event) -> None:
        """Send an event to the coordinator of the run, if one is in progress."""
        if self._send_event is not None:
            self._send_event(event)

    def _spawn(self, work: Any, name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A bug in this pool: the run must not continue with unwatched servers.
            self.last_error = error
            self.given_up.set()


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
