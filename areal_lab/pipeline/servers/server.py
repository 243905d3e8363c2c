"""One inference server as the run sees it: every call returns, or the server is lost.

    call --> client --> reply
         \\-> the server is lost meanwhile --> EngineUnreachable, with the tokens so far

A call does not wait for a server that another task has found dead or hung. The first call that
meets a broken connection, or weights that the run did not send, reports the loss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from areal_lab.control.events import EngineId, Version
from areal_lab.engines.client.engine_client import (
    EngineClient,
    EngineError,
    EngineUnreachable,
    VersionMismatch,
)
from areal_lab.engines.client.resubmit import token_count
from areal_lab.engines.launch.backends import BACKENDS
from areal_lab.engines.launch.start import EngineProcess
from areal_lab.engines.protocol import Generated, GenerateRequest, MemoryTag, PauseMode
from areal_lab.host.processes import RunningProcess

Result = TypeVar("Result")

EXIT_NOTICE_S = 2.0
"""Longest time after a broken connection until its process counts as still running, and until a
call to a disconnected server returns its tokens."""


@dataclass(slots=True, kw_only=True, eq=False)
class Server:
    """A server, alive or lost; one that comes back is another `Server` with the same number."""

    number: EngineId
    client: EngineClient
    process: EngineProcess | None = None
    """None for a server that the run did not start."""
    report_loss: Callable[[Server, Exception], None]
    versions: Callable[[], tuple[Version, Version]]
    """Oldest and newest version that its tokens may have at the moment."""
    paused: bool = False
    released: set[MemoryTag] = field(default_factory=set)
    """Memory that the trainer of the same device has now; the server stays paused meanwhile."""
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    last_error: Exception | None = None
    """Why it is lost."""

    @property
    def name(self) -> str:
        """`engine 0`, or `engine 0 (http://host:30000)` if the run did not start it."""
        whose = "" if self.process is not None else f" ({self.client.base_url})"
        return f"engine {self.number}{whose}"

    @property
    def child(self) -> RunningProcess | None:
        """Its process, if this run started it."""
        return None if self.process is None else self.process.child

    def received(self, request_ids: Iterable[str]) -> dict[str, Generated]:
        """See `EngineClient.received`."""
        return self.client.received(request_ids)

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generated]:
        """Generate one sample per request.

        Raises:
            EngineUnreachable: if the server is lost, with the tokens so far; without them if the
                server turns out to hold other weights than it was given.
            EngineError: if the server refuses.
        """
        oldest, _ = self.versions()
        try:
            generated = await self._call(self.client.generate(requests))
        except EngineUnreachable as error:
            if isinstance(self.last_error, VersionMismatch):
                # The weights behind the tokens so far are unknown, whatever version they name.
                discarded = error.discarded_tokens + sum(map(token_count, error.partial.values()))
                raise EngineUnreachable(str(error), discarded_tokens=discarded) from error
            raise
        _, newest = self.versions()
        for sample in generated:
            for segment in sample.segments:
                if not oldest <= segment.version <= newest:
                    raise self._wrong_weights(
                        VersionMismatch(
                            f"{self.name} generated with version {segment.version}, but was given "
                            f"{oldest}" + (f" to {newest}" if newest > oldest else "")
                        ),
                        discarded_tokens=sum(map(token_count, generated)),
                    )
        return generated

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding; returns when the compute process has stopped."""
        if self.released:
            return
        await self._call(self.client.pause(mode))
        # SGLang's HTTP process handles some pauses by itself. A paused server is not checked for a
        # stall, because loading weights may take long.
        await self._call(self.client.ping_compute())
        self.paused = True

    async def resume(self) -> None:
        """Resume decoding, if it was paused and has its memory."""
        if self.paused and not self.released:
            await self._call(self.client.resume())
            self.paused = False

    async def release(self) -> None:
        """Pause, and give the memory of cache and weights to the trainer."""
        await self.pause(PauseMode.ABORT)
        for tag in (MemoryTag.KV_CACHE, MemoryTag.WEIGHTS):
            self.released.add(tag)
            await self._call(self.client.release_memory(tag))
        # SGLang may reply before the memory is free (slime issue 579): its compute process replies
        # to this once it is.
        await self._call(self.client.ping_compute())

    async def take_back(self, tag: MemoryTag) -> None:
        """Take released memory again: of the weights before a push, of the cache after it."""
        if tag in self.released:
            await self._call(self.client.resume_memory(tag))
            self.released.discard(tag)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests."""
        await self._call(self.client.abort(request_ids))

    async def take_weights(self, push: Coroutine[Any, Any, object]) -> None:
        """Wait for a push of weights, which checks the version and checksum of the server.

        Raises:
            EngineUnreachable: if the server is lost, or reports other weights.
            EngineError: if it refuses; it keeps the old weights.
        """
        await self._call(push)

    async def check_version(self, expected: Version) -> None:
        """Report a loss if the server holds another version."""
        found = await self._call(self.client.version())
        if found != expected:
            raise self._wrong_weights(
                VersionMismatch(f"{self.name} holds version {found}, but was given {expected}")
            )

    async def engine(self) -> tuple[str, str]:
        """Its key in `backends.BACKENDS`, and the version of its package."""
        name = await self._call(self.client.engine_name())
        return name, await self._call(self.client.engine_version())

    async def spans(self, since: int) -> tuple[list[dict[str, Any]], int]:
        """Its activity spans from number `since` on, and the next `since`; none if unsupported."""
        # Asking anyway would cost time: a refusal waits `EXIT_NOTICE_S` for the process to exit.
        if self.process is not None and not BACKENDS[self.process.backend].reports_spans:
            return [], since
        return await self._call(self.client.spans(since))

    def mark_lost(self, error: Exception) -> None:
        """Mark the server as lost; only the pool calls this."""
        self.last_error = error
        self.lost.set()

    async def disconnect(self) -> None:
        """End every running call; each returns the tokens it has."""
        with suppress(Exception):  # the connection is broken anyway
            await self.client.close()

    async def close(self) -> None:
        """Close the connection, and stop the process if this run started it. Idempotent."""
        self.lost.set()
        if self.process is not None:
            await self.process.stop(at_once=self.last_error is not None)
        else:
            await self.client.close()

    async def _call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work`, unless the server is lost before it ends."""
        if self.lost.is_set():
            work.close()
            raise EngineUnreachable(f"{self.name} is lost")
        working = asyncio.create_task(work)
        losing = asyncio.create_task(self.lost.wait())
        try:
            await asyncio.wait({working, losing}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                # Its connection is closed by now, so it ends by itself with its tokens.
                await asyncio.wait({working}, timeout=EXIT_NOTICE_S)
            if not working.done():
                raise EngineUnreachable(f"{self.name} is lost")
            return working.result()
        except EngineUnreachable as error:
            self.report_loss(self, error)
            raise
        except VersionMismatch as error:
            raise self._wrong_weights(error) from error
        except EngineError as error:
            if self.lost.is_set() or await self._is_dying():
                self.report_loss(self, error)
                raise EngineUnreachable(str(error)) from error
            raise
        finally:
            losing.cancel()
            working.cancel()
            with suppress(asyncio.CancelledError, Exception):  # already raised above
                await working

    def _wrong_weights(
        self, error: VersionMismatch, *, discarded_tokens: int = 0
    ) -> EngineUnreachable:
        self.report_loss(self, error)
        return EngineUnreachable(str(error), discarded_tokens=discarded_tokens)

    async def _is_dying(self) -> bool:
        """Whether the server's process exits right after an error."""
        if self.child is None:
            return False
        try:
            await asyncio.wait_for(self.child.died(), EXIT_NOTICE_S)
        except TimeoutError:
            return False
        return True
