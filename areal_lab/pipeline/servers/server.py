"""One inference server as the run sees it: every call returns, or the server is lost.

    call --> client --> answer
         \\-> the server is lost meanwhile --> EngineUnreachable, with the tokens so far

A call never waits for a server that somebody else has found dead or hung, and whoever first meets
a broken connection, or weights that were never given, reports the loss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
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
from areal_lab.engines.protocol import Generated, GenerateRequest, PauseMode
from areal_lab.host.processes import Child

Result = TypeVar("Result")

EXIT_NOTICE_S = 2.0
"""How long after a broken connection the process behind it may take to be seen dead, and a call to
a server that was cut off may take to hand over its tokens."""


@dataclass(slots=True, kw_only=True, eq=False)
class Server:
    """A server that is alive, or was; one that returns is another `Server` of the same number."""

    number: EngineId
    client: EngineClient
    process: EngineProcess | None = None
    """None for a server that somebody else runs."""
    report_loss: Callable[[Server, Exception], None]
    versions: Callable[[], tuple[Version, Version]]
    """Oldest and newest version that its tokens may have now."""
    paused: bool = False
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    last_error: Exception | None = None
    """Why it is lost."""

    @property
    def name(self) -> str:
        """`engine 0`, or `engine 0 (http://host:30000)` if it is not ours."""
        whose = "" if self.process is not None else f" ({self.client.base_url})"
        return f"engine {self.number}{whose}"

    @property
    def child(self) -> Child | None:
        """Its process, if this run started it."""
        return None if self.process is None else self.process.child

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generated]:
        """Draw one sample per request.

        Raises:
            EngineUnreachable: if the server is lost, with the tokens so far; also if it turns out
                to hold other weights than it was given, and then without them.
            EngineError: if the server refuses.
        """
        oldest, _ = self.versions()
        try:
            generated = await self._call(self.client.generate(requests))
        except EngineUnreachable as error:
            if isinstance(self.last_error, VersionMismatch):
                # Which weights drew the tokens so far is not known, whatever they are named.
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
        """Stop decoding; over when what computes has taken note of it."""
        await self._call(self.client.pause(mode))
        # SGLang's HTTP process answers to some pauses by itself; and once paused, a server is not
        # watched for a stall, as to load weights may take long.
        await self._call(self.client.ping_compute())
        self.paused = True

    async def resume(self) -> None:
        """Go on, if it was paused."""
        if self.paused:
            await self._call(self.client.resume())
            self.paused = False

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests."""
        await self._call(self.client.abort(request_ids))

    async def take_weights(self, push: Coroutine[Any, Any, object]) -> None:
        """Load weights that a courier brings; version and checksum that it then reports were
        compared.

        Raises:
            EngineUnreachable: if the server is lost, or reports something else.
            EngineError: if it refuses; it keeps the old weights.
        """
        await self._call(push)

    async def check_version(self, expected: Version) -> None:
        """Report the loss of a server that holds another version."""
        found = await self._call(self.client.version())
        if found != expected:
            raise self._wrong_weights(
                VersionMismatch(f"{self.name} holds version {found}, but was given {expected}")
            )

    async def engine(self) -> tuple[str, str]:
        """Which of `backends.BACKENDS` it is, and the version of its package."""
        name = await self._call(self.client.engine_name())
        return name, await self._call(self.client.engine_version())

    async def spans(self, since: int) -> tuple[list[dict[str, Any]], int]:
        """What it did from span `since` on, and the next `since`; nothing if it never tells."""
        # What a process of ours refuses takes the time in which it might turn out to be dying.
        if self.process is not None and not BACKENDS[self.process.backend].tells_spans:
            return [], since
        return await self._call(self.client.spans(since))

    def mark_lost(self, error: Exception) -> None:
        """From now on it is lost; only whoever keeps the list of servers calls this."""
        self.last_error = error
        self.lost.set()

    async def disconnect(self) -> None:
        """Cut off every call: each ends, and says what it had."""
        with suppress(Exception):  # of a connection that is broken anyway
            await self.client.close()

    async def close(self) -> None:
        """End the connection, and the process if it is ours. Idempotent."""
        self.lost.set()
        if self.process is not None:
            await self.process.stop(at_once=self.last_error is not None)
        else:
            await self.client.close()

    async def _call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """`work`, unless the server is lost before it ends."""
        if self.lost.is_set():
            work.close()
            raise EngineUnreachable(f"{self.name} is lost")
        working = asyncio.create_task(work)
        losing = asyncio.create_task(self.lost.wait())
        try:
            await asyncio.wait({working, losing}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                # Its connection is closed by now: it ends by itself, and says what it had.
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
            with suppress(asyncio.CancelledError, Exception):  # it was raised above
                await working

    def _wrong_weights(
        self, error: VersionMismatch, *, discarded_tokens: int = 0
    ) -> EngineUnreachable:
        self.report_loss(self, error)
        return EngineUnreachable(str(error), discarded_tokens=discarded_tokens)

    async def _is_dying(self) -> bool:
        """Whether an error of the server was the first sign of its end."""
        if self.child is None:
            return False
        try:
            await asyncio.wait_for(self.child.died(), EXIT_NOTICE_S)
        except TimeoutError:
            return False
        return True
