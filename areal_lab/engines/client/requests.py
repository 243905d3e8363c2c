"""The running requests of one server: sent, received, and sent again if a pause ended them.

requests --may_send?--Dialect.generate--> server --messages--> SampleStream --> Generated
    ^                                                               |
    +--------------- with the tokens so far, after an abort ---------+

During an `abort` pause, requests wait here. Where versions are adapters, each request names its
adapter: its tokens have that version, whatever the server holds by then.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence, Set
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from areal_lab.control.events import Version
from areal_lab.data.stop_strings import StopScanner
from areal_lab.data.tokenize import TextCodec
from areal_lab.engines.client.connection import Connection, RequestTimeouts
from areal_lab.engines.client.dialect import Call, Dialect, GenerateOptions, HeldWeights
from areal_lab.engines.client.resubmit import completed_sample, continuation, merge
from areal_lab.engines.client.stream import SampleStream
from areal_lab.engines.protocol import EngineError, EngineUnreachable, Generated, GenerateRequest

_POLL_S = 0.005
_POLLS = 20


@dataclass(slots=True, kw_only=True)
class RunningRequests:
    """All requests that one server is running."""

    connection: Connection
    api: Dialect
    held: HeldWeights
    timeouts: RequestTimeouts
    stream: bool
    stream_interval: int
    end_tokens: Set[int] = frozenset()
    """The model's end tokens, if known."""
    sample_ended: Callable[[str], None] = lambda _: None
    """Called with the name of a request when its sample has ended, before others of its call. A
    sample of which a pause proves later that it was complete is not reported."""
    tokenizer: Path | None = None
    """Folder of the model's tokenizer, if known; requests with stop strings need it."""
    may_send: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared during an `abort` pause."""
    _waiting: set[str] = field(default_factory=set)
    """Requests that wait for `may_send`."""
    _streams: dict[str, SampleStream] = field(default_factory=dict)
    _earlier: dict[str, Generated] = field(default_factory=dict)
    """Tokens from before a request was sent again, of calls that have not returned."""
    _aborted: set[str] = field(default_factory=set)
    """Requests that the caller has ended; they are not sent again."""
    _abort_pauses: int = 0
    """Starts and ends of `abort` pauses; odd while one is in progress."""
    _codec: TextCodec | None = None
    _server_checks_stops: bool | None = None
    _preparing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """True if the server also finds stop strings; None until it was asked."""
    _sent: Iterator[int] = field(default_factory=itertools.count)
    _name: str = field(default_factory=lambda: secrets.token_hex(3))

    def __post_init__(self) -> None:
        self.may_send.set()

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generated]:
        """Generate one sample per request."""
        ids = {request.request_id for request in requests}
        try:
            return await self._generate(list(requests))
        finally:
            self._aborted -= ids
            for name in ids:
                self._earlier.pop(name, None)

    def received_tokens(self, request_id: str) -> int:
        """Received tokens of a running sample since it was last sent."""
        stream = self._streams.get(request_id)
        return 0 if stream is None else len(stream)

    def confirmed_tokens(self, request_id: str) -> int:
        """The received tokens that are kept if the engine is lost now."""
        stream = self._streams.get(request_id)
        return 0 if stream is None else len(stream.generated().tokens)

    def received(self, request_ids: Iterable[str]) -> dict[str, Generated]:
        """The confirmed tokens so far of running samples, by request id, without empty ones. The
        call that runs them continues.
        """
        found: dict[str, Generated] = {}
        for name in request_ids:
            stream, sample = self._streams.get(name), self._earlier.get(name)
            if stream is not None:
                now = stream.generated()
                sample = now if sample is None else merge(sample, now)
            if sample is not None and sample.segments:
                found[name] = sample
        return found

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests; their `generate` returns the tokens so far."""
        running = self._streams.keys() & set(request_ids)
        self._aborted |= running | (self._waiting & set(request_ids))
        await asyncio.gather(
            *(self.connection.call(self.api.abort(self._streams[name].sent_as)) for name in running)
        )

    async def hold_requests(self) -> None:
        """Send nothing until `may_send` is set, and end all running requests.

        They are sent again afterwards. A server ignores the abort of a request that has not
        reached it yet, so the abort is repeated until no request runs.
        """
        self.may_send.clear()
        try:
            with self.ended_by_pause():
                async with asyncio.timeout(self.connection.timeout_s):
                    await self._end_all()
        except BaseException as error:  # otherwise waiting requests would wait forever
            self.may_send.set()
            if not isinstance(error, TimeoutError):
                raise
            raise EngineUnreachable(
                f"engine {self.connection.base_url} has not ended {len(self._streams)} requests "
                f"within {self.connection.timeout_s:g} s"
            ) from error

    @contextmanager
    def ended_by_pause(self) -> Iterator[None]:
        """Mark that a pause ends all samples: those sent before or meanwhile are sent again."""
        # Counted at both ends: a request sent meanwhile may reach the server before the pause.
        self._abort_pauses += 1
        try:
            yield
        finally:
            self._abort_pauses += 1

    def count_lost_caches(self) -> None:
        """Count a lost cache for every running sample, where the server does not report it."""
        for one in self._streams.values():
            one.lost_caches += len(one) > 0

    async def _generate(self, requests: list[GenerateRequest]) -> list[Generated]:
        """Generate the samples; requests that a pause ended are continued.

        An abort may break the connection: SGLang (0.5.23, without a tokenizer) fails to merge the
        unsent tokens of a waiting request with its abort, and breaks the reply to all requests of
        the same call. These are sent again; if the server is really gone, that fails.
        """
        await self._prepare_stops(requests)
        if not self.may_send.is_set():
            return await self._generate_later(requests)
        pauses = self._abort_pauses
        sent_to = self.held.version if self.held.adapter is None else None
        streams = [
            SampleStream(
                request.request_id,
                self._fresh_id(request),
                sent_to,
                self._scanner(request),
                prompt_tokens=request.prompt_tokens if request.images else None,
            )
            for request in requests
        ]
        try:
            await self._receive(requests, streams)
            broken = False
        except EngineUnreachable:
            broken = self._pausing_since(pauses) or any(
                one.request_id in self._aborted or one.stopped for one in streams
            )
            if not broken:
                raise
        results = [one.generated() for one in streams]
        if not broken and not self._pausing_since(pauses):
            return results
        again = []
        for index, result in enumerate(results):
            if result.finish_reason != "abort" or result.request_id in self._aborted:
                continue
            whole = completed_sample(requests[index], result, self.end_tokens)
            if whole is None:
                again.append(index)
            else:
                results[index] = whole
        if again:
            for result in results:
                name = result.request_id
                earlier = self._earlier.get(name)
                self._earlier[name] = result if earlier is None else merge(earlier, result)
            more = [continuation(requests[index], results[index]) for index in again]
            try:
                rest = await self._generate(more)
            except EngineUnreachable as error:
                raise EngineUnreachable(
                    str(error),
                    _all_partial(results, error),
                    discarded_tokens=error.discarded_tokens,
                ) from error
            for index, one in zip(again, rest, strict=True):
                results[index] = merge(results[index], one)
        return results

    async def adapters(self) -> Sequence[str]:
        """Names of the LoRA adapters on the server."""
        reply = await self.connection.call(self.api.adapters)
        with self.connection.named():
            return self.api.held_adapters(reply)

    async def _end_all(self) -> None:
        while self._streams:
            count = len(self._streams)
            left = [one.sent_as for one in self._streams.values() if one.finish_reason is None]
            if left:
                await self.connection.call(self.api.abort_all(left))
            await self._until_fewer(count)

    async def _until_fewer(self, count: int) -> None:
        """Wait until fewer than `count` samples run, but only for a moment."""
        for _ in range(_POLLS):
            if len(self._streams) < count:
                return
            await asyncio.sleep(_POLL_S)

    async def _generate_later(self, requests: list[GenerateRequest]) -> list[Generated]:
        """Generate once requests may be sent; those aborted before that return no tokens."""
        ids = {request.request_id for request in requests}
        self._waiting |= ids
        try:
            await self.may_send.wait()
        finally:
            self._waiting -= ids
        left = [request for request in requests if request.request_id not in self._aborted]
        generated = {one.request_id: one for one in await self._generate(left)} if left else {}
        nothing = {name: SampleStream(name).generated() for name in ids}
        return [(nothing | generated)[request.request_id] for request in requests]

    async def _prepare_stops(self, requests: Iterable[GenerateRequest]) -> None:
        """If a request has stop strings, load the tokenizer and ask the server whether it finds
        them itself.
        """
        if not any(request.sampling.stop for request in requests):
            return
        if self.tokenizer is None:
            raise EngineError(
                f"a request to engine {self.connection.base_url} has stop strings, but its client "
                "knows no tokenizer; give it the model folder (note_tokenizer)"
            )
        # Workflows start many turns together: each would load the tokenizer.
        async with self._preparing:
            if self._codec is None:
                self._codec = await asyncio.to_thread(TextCodec.load, self.tokenizer)
            if self._server_checks_stops is None:
                reply = await self.connection.call(self.api.info)
                with self.connection.named():
                    self._server_checks_stops = self.api.checks_stops(reply)

    def _scanner(self, request: GenerateRequest) -> StopScanner | None:
        """Finder of the stop strings of a request; None without any."""
        if not request.sampling.stop:
            return None
        assert self._codec is not None, "see _prepare_stops"
        return StopScanner(self._codec, request.sampling.stop, request.response_so_far)

    async def _receive(
        self, requests: Sequence[GenerateRequest], streams: Sequence[SampleStream]
    ) -> None:
        """Send the requests and receive messages until all samples have ended."""
        if self.held.version is None and not self.api.tells_interruptions:
            with self.connection.named():
                self.held.version = self.api.held_version(await self.connection.call(self.api.held))
        adapter = self.held.adapter
        options = GenerateOptions(
            stream=self.stream,
            stream_interval=self.stream_interval,
            cache_name=self.held.cache_name,
            adapter="" if adapter is None else adapter.name,
            send_stops=bool(self._server_checks_stops),
        )
        adapter_version = None if adapter is None else adapter.version
        self._streams.update((one.request_id, one) for one in streams)
        try:
            sent = [
                replace(request, request_id=one.sent_as)
                for request, one in zip(requests, streams, strict=True)
            ]
            if self.api.together:
                await self._exchange(self.api.generate(sent, options), streams, adapter_version)
            else:
                await _all_or_none(
                    self._exchange(self.api.generate([request], options), [one], adapter_version)
                    for request, one in zip(sent, streams, strict=True)
                )
        except EngineError as refused:
            error = await self._as_loss(refused, options.adapter)
            if error is None:
                raise
            samples = [one.generated() for one in streams]
            discarded = sum(map(len, streams)) - sum(len(one.tokens) for one in samples)
            partial = {one.request_id: one for one in samples if one.segments}
            raise EngineUnreachable(str(error), partial, discarded_tokens=discarded) from error
        finally:
            for one in streams:
                del self._streams[one.request_id]

    async def _as_loss(self, error: EngineError, adapter: str) -> EngineUnreachable | None:
        """Convert the error to a loss of the server, if it is one: after a restart by its owner,
        for example, the server no longer has its adapter.
        """
        if isinstance(error, EngineUnreachable):
            return error
        if not adapter:
            return None
        try:
            lost = adapter not in await self.adapters()
        except EngineUnreachable as gone:
            return gone
        except EngineError:
            return None  # the server does not report its adapters
        return EngineUnreachable(f"{error}; it has lost the adapter {adapter}") if lost else None

    def _pausing_since(self, pauses: int) -> bool:
        """Return whether an `abort` pause is in progress, or was since the count was `pauses`."""
        return self._abort_pauses != pauses or pauses % 2 == 1

    def _fresh_id(self, request: GenerateRequest) -> str:
        """An id that was never sent before. SGLang aborts the id of a streamed reply again two
        seconds after its end, which would hit a request that was resubmitted under that id.
        """
        return f"{request.request_id}#{self._name}-{next(self._sent)}"

    async def _exchange(
        self, call: Call, streams: Sequence[SampleStream], adapter_version: Version | None
    ) -> None:
        """Send one HTTP request and receive its reply, whole or in messages.

        A sample that has ended by a stop string that the server did not see is aborted there.
        """
        silent_s = self.timeouts.limit_s
        try:
            async with (
                self.timeouts.request() as timeout,
                aclosing(self.connection.messages(call)) as messages,
            ):
                async for message in messages:
                    timeout.restart()
                    with self.connection.named():
                        chunk = self.api.read(message)
                        if adapter_version is not None:
                            chunk = replace(chunk, spans=None, version=adapter_version)
                        stream = streams[chunk.index]
                        had_stopped = stream.stopped
                        stream.add(chunk, self.held.version or 0)
                    if stream.ended:
                        self.sample_ended(stream.request_id)
                    if stream.stopped and not had_stopped and stream.finish_reason is None:
                        await self.connection.call(self.api.abort(stream.sent_as))
        except TimeoutError as error:
            raise self.connection.unreachable(call, f"silent for {silent_s:g} s") from error
        if any(one.finish_reason is None for one in streams):
            raise self.connection.unreachable(call, "the reply ended early")


async def _all_or_none(exchanges: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Wait for all; the first error cancels the others."""
    tasks = [asyncio.ensure_future(one) for one in exchanges]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _all_partial(before: Sequence[Generated], error: EngineUnreachable) -> dict[str, Generated]:
    """Received part of each sample: for those sent again, both parts merged."""
    partial = {one.request_id: one for one in before if one.segments}
    for name, more in error.partial.items():
        partial[name] = merge(partial[name], more) if name in partial else more
    return partial
