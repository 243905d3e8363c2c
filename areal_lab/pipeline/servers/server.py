r"""One inference server of a run: every call returns, or the server is lost.

    call --> client --> reply
         \-> the server is lost meanwhile --> EngineUnreachable, with the tokens so far

A call does not wait for a server that another task has found dead or hung. The first call that
finds a broken connection, or weights that the run did not send, reports the loss.

`prepare_push` pushes one version into several engines concurrently, by any transfer:

    push_to = prepare_push(weights, clients, mode)   nothing is sent yet
    await push_to(client)                            for all clients concurrently: returns when the
                                                     engine has the version, or raises

Each engine reads a weights folder separately. Weights in the trainer's memory go to all engines in
one push, which starts at the first `push_to`; engines must be paused or idle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from areal_lab.control.events import EngineId, Version
from areal_lab.engines.client.engine_client import (
    EngineClient,
    EngineError,
    EngineUnreachable,
    VersionMismatch,
)
from areal_lab.engines.launch.backends import BACKENDS
from areal_lab.engines.launch.start import EngineProcess
from areal_lab.engines.protocol import (
    Generated,
    GenerateRequest,
    MemoryTag,
    PauseMode,
    RequestRefused,
    ScoredTokens,
    WeightsFolder,
)
from areal_lab.engines.weights.records import EngineFailure, EngineTarget, WeightsInMemory
from areal_lab.host.processes import Child, RunningProcess
from areal_lab.host.silence import computes
from areal_lab.training.protocol import Pushed, PushRequest, Trainer

Result = TypeVar("Result")

EXIT_NOTICE_S = 2.0
"""Maximum time after a broken connection until the server's process has exited, and until a call to
a disconnected server returns its tokens."""


@dataclass(slots=True, kw_only=True, eq=False)
class Server:
    """A live or lost server; after a restart it is a new `Server` with the same number."""

    number: EngineId
    client: EngineClient
    process: EngineProcess | None = None
    """None for an attached server."""
    report_loss: Callable[[Server, Exception], None]
    note: Callable[[str], None] = lambda _: None
    """Shows a message to the user."""
    versions: Callable[[], tuple[Version, Version]]
    """Returns the oldest and the newest version that its tokens may have at the moment."""
    paused: bool = False
    released: set[MemoryTag] = field(default_factory=set)
    """Memory released to the trainer of the same device; the server stays paused meanwhile."""
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    last_error: Exception | None = None
    """Reason of the loss."""

    @property
    def name(self) -> str:
        """Name for messages: `engine 0`, or `engine 0 (http://host:30000)` if attached."""
        whose = "" if self.process is not None else f" ({self.client.base_url})"
        return f"engine {self.number}{whose}"

    @property
    def child(self) -> RunningProcess | None:
        """Process of the server, if this run started it."""
        return None if self.process is None else self.process.child

    def computes(self) -> Callable[[], bool]:
        """Make a function that returns whether the server was busy since the function's last call.

        Busy means that it computed or waited for a CPU; always False for another machine.
        """
        return computes(self.child.pid) if isinstance(self.child, Child) else lambda: False

    def received(self, request_ids: Iterable[str]) -> dict[str, Generated]:
        """See `EngineClient.received`."""
        return self.client.received(request_ids)

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generated]:
        """Generate one sample per request.

        Raises:
            EngineUnreachable: the server is lost; the error has the tokens so far, unless the
                server had other weights than the pushed ones.
            EngineError: the server refused.
        """
        oldest, _ = self.versions()
        try:
            generated = await self._call(self.client.generate(requests))
        except EngineUnreachable as error:
            if isinstance(self.last_error, VersionMismatch):
                # The weights that generated these tokens are unknown, whatever version they name.
                discarded = error.discarded_tokens + sum(
                    len(one.tokens) for one in error.partial.values()
                )
                raise EngineUnreachable(str(error), discarded_tokens=discarded) from error
            raise
        _, newest = self.versions()
        for sample in generated:
            for segment in sample.segments:
                if not oldest <= segment.version <= newest:
                    raise self._wrong_weights(
                        VersionMismatch(
                            f"{self.name} generated with version {segment.version}, but was sent "
                            f"{oldest}" + (f" to {newest}" if newest > oldest else "")
                        ),
                        discarded_tokens=sum(len(one.tokens) for one in generated),
                    )
        return generated

    async def token_logprobs(self, tokens: Sequence[int], *, start: int, top: int) -> ScoredTokens:
        """Score given tokens (`EngineClient.token_logprobs`)."""
        return await self._call(self.client.token_logprobs(tokens, start=start, top=top))

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
        """Pause, and release the memory of cache and weights to the trainer."""
        await self.pause(PauseMode.ABORT)
        for tag in (MemoryTag.KV_CACHE, MemoryTag.WEIGHTS):
            self.released.add(tag)
            await self._call(self.client.release_memory(tag))
        # SGLang may reply before the memory is free (slime issue 579); its compute process replies
        # to a ping after that.
        await self._call(self.client.ping_compute())

    async def take_back(self, tag: MemoryTag) -> None:
        """Take back released memory: that of weights before a push, that of the cache after it."""
        if tag in self.released:
            await self._call(self.client.resume_memory(tag))
            self.released.discard(tag)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Abort these requests."""
        await self._call(self.client.abort(request_ids))

    async def take_weights(self, push: Coroutine[Any, Any, object]) -> None:
        """Wait for a push of weights, which checks the server's version and checksum.

        Raises:
            EngineUnreachable: the server is lost or reports other weights.
            EngineError: the server refused and keeps the old weights.
        """
        await self._call(push)

    async def check_version(self, expected: Version) -> None:
        """Report a loss if the server has another version."""
        found = await self._call(self.client.version())
        if found != expected:
            raise self._wrong_weights(
                VersionMismatch(f"{self.name} has version {found}, but was sent {expected}")
            )

    async def engine(self) -> tuple[str, str]:
        """Return its key in `backends.BACKENDS` and the version of its package."""
        name = await self._call(self.client.engine_name())
        return name, await self._call(self.client.engine_version())

    async def spans(self, since: int) -> tuple[list[dict[str, Any]], int]:
        """Return activity spans from number `since` on, and the next `since`; may be empty."""
        # A request that is refused would wait `EXIT_NOTICE_S` for the process to exit.
        if self.process is not None and not BACKENDS[self.process.backend].reports_spans:
            return [], since
        return await self._call(self.client.spans(since))

    def mark_lost(self, error: Exception) -> None:
        """Mark the server as lost; only the pool calls this."""
        self.last_error = error
        self.lost.set()

    async def disconnect(self) -> None:
        """End all running calls; each returns its tokens so far."""
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
        except RequestRefused:
            raise
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
        """Return whether the server's process exits right after an error."""
        if self.child is None:
            return False
        try:
            await asyncio.wait_for(self.child.died(), EXIT_NOTICE_S)
        except TimeoutError:
            return False
        return True


Weights: TypeAlias = WeightsFolder | WeightsInMemory
PushTo: TypeAlias = Callable[[EngineClient], Coroutine[Any, Any, object]]
PreparePush: TypeAlias = Callable[[Weights, Sequence[EngineClient], PauseMode], PushTo]


def prepare_push_from(
    trainer: Trainer,
    *,
    ranks: int = 1,
    pushed: Callable[[Pushed], None] = lambda _: None,
) -> PreparePush:
    """Make the function `prepare_push` for the weights of a trainer.

    Args:
        trainer: the trainer.
        ranks: tensor-parallel degree of each engine.
        pushed: called after each push from the trainer's memory.
    """

    def prepare_push(weights: Weights, clients: Sequence[EngineClient], mode: PauseMode) -> PushTo:
        if isinstance(weights, WeightsFolder):
            return lambda client: client.load_weights(weights, mode)
        push = _Push(trainer, weights, clients, mode, ranks, pushed)
        return push.push_to

    return prepare_push


@dataclass(slots=True)
class _Push:
    """One push to all engines, with a result for each engine."""

    trainer: Trainer
    weights: WeightsInMemory
    clients: Sequence[EngineClient]
    mode: PauseMode
    ranks: int
    pushed: Callable[[Pushed], None]
    work: asyncio.Task[dict[str, EngineFailure]] | None = None

    async def push_to(self, client: EngineClient) -> None:
        """Start the push if necessary, and wait for this engine's result.

        Raises:
            EngineUnreachable: the engine did not reply.
            VersionMismatch: the engine has other weights after the push.
            EngineError: the engine refused.
        """
        if self.work is None:
            self.work = asyncio.create_task(self._push(), name="push weights")
        # One caller may be cancelled; the other engines still get their weights.
        failures = await asyncio.shield(self.work)
        if (failure := failures.get(client.base_url)) is not None:
            raise _ERRORS[failure.problem](failure.message)
        await client.confirm_push(self.weights.version, self.mode)

    async def _push(self) -> dict[str, EngineFailure]:
        reply = await self.trainer.push(
            PushRequest(
                version=self.weights.version,
                engines=tuple(EngineTarget(c.base_url, self.ranks, c.key) for c in self.clients),
                flush_cache=self.mode is not PauseMode.IN_PLACE,
            )
        )
        self.pushed(reply)
        return {failure.engine: failure for failure in reply.failures}


_ERRORS: dict[str, type[EngineError]] = {
    "refused": EngineError,
    "unreachable": EngineUnreachable,
    "mismatch": VersionMismatch,
}
