"""The client of an inference server: HTTP and nothing else; what is said is a `Dialect`'s business.

    EngineClient.generate --requests--> server --messages--> Arriving --> Generated

What the server says about versions is believed, and compared with what was sent whenever weights
are loaded; what it says about itself is not enough for that, so digests of its weights are, too.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import httpx

from areal_lab.control.events import Version
from areal_lab.engines.arriving import Arriving
from areal_lab.engines.dialect import Call, Dialect, GenerateOptions
from areal_lab.engines.errors import EngineError, EngineUnreachable, VersionMismatch
from areal_lab.engines.folder_check import check_folder
from areal_lab.engines.held_weights import HeldWeights
from areal_lab.engines.patience import Patience
from areal_lab.engines.protocol import Generated, GenerateRequest, PauseMode, WeightsFolder
from areal_lab.engines.resubmit import continuation, merge
from areal_lab.engines.sglang_api import SGLANG

__all__ = ["EngineClient", "EngineError", "EngineUnreachable", "VersionMismatch"]

STREAM_INTERVAL = 8
"""Tokens of a sample between two messages of the server; at most so many are lost with it."""
_CONNECT_S = 10.0
_KEEP_ALIVE_S = 3.0
"""Shorter than the 5 s after which common servers close an idle connection, which a request sent
just then would run into."""
_EVENT = b"data: "
_LAST_EVENT = b"[DONE]"


class EngineClient:
    """An `Engine` over HTTP."""

    def __init__(
        self,
        base_url: str,
        *,
        api: Dialect = SGLANG,
        stream: bool = True,
        stream_interval: int = STREAM_INTERVAL,
        request_timeout_s: float | None = None,
        control_timeout_s: float = 600.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Nothing is sent yet.

        Args:
            base_url: as in `http://127.0.0.1:30000`.
            api: what the server speaks; `probe.dialect_at` finds out.
            stream: whether samples arrive piece by piece, so that what there is of them survives
                the server (`EngineUnreachable.partial`).
            stream_interval: tokens of a sample between two pieces.
            request_timeout_s: longest silence while `generate` waits, pauses by this client left
                out; `None` waits as long as the server lives. Without `stream` a server is silent
                until the last sample has ended.
            control_timeout_s: longest wait for any other answer; loading weights is one.
            transport: instead of the network, for tests.
        """
        self.base_url = base_url.rstrip("/")
        self.api = api
        self._stream = stream
        self._stream_interval = stream_interval
        self._control_timeout_s = control_timeout_s
        self._http = httpx.AsyncClient(
            base_url=self.base_url,
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_KEEP_ALIVE_S),
            trust_env=False,  # engines are addressed directly, never through a proxy
            transport=transport,
        )
        self._patience = Patience(request_timeout_s)
        self._paused: PauseMode | None = None
        self._abort_pauses = 0
        """Begun and ended ones; odd while one is on its way."""
        self._aborted: set[str] = set()
        self._sent = itertools.count()
        self._name = secrets.token_hex(3)
        self._arriving: dict[str, Arriving] = {}
        self._held = HeldWeights()

    # --- generating ---

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generated]:
        """Draw one sample per request.

        What an `abort` pause of this client ended is sent again, with the tokens it has.

        Raises:
            EngineUnreachable: if the connection is lost or the server is silent for too long; with
                what had arrived.
            EngineError: if the server refuses, or its answer contradicts itself.
        """
        ids = {request.request_id for request in requests}
        try:
            return await self._generate(list(requests))
        finally:
            self._aborted -= ids

    def arrived_tokens(self, request_id: str) -> int:
        """Tokens of a running sample that have arrived since it was sent, or sent again."""
        arriving = self._arriving.get(request_id)
        return 0 if arriving is None else len(arriving)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests now; their `generate` returns what they have."""
        running = self._arriving.keys() & set(request_ids)
        self._aborted |= running
        await asyncio.gather(
            *(self._call(self.api.abort(self._arriving[name].sent_as)) for name in running)
        )

    # --- pauses and weights ---

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding; requests sent meanwhile are held by the server."""
        # Counted at both ends: a request sent meanwhile may reach the server before the pause.
        self._abort_pauses += mode is PauseMode.ABORT
        try:
            await self._call(self.api.pause(mode))
        finally:
            self._abort_pauses += mode is PauseMode.ABORT
        self._paused = mode
        self._patience.hold()

    async def resume(self) -> None:
        """Go on, with the held requests too."""
        await self._call(self.api.resume)
        self._paused = None
        self._patience.go_on()

    async def load_weights(self, weights: WeightsFolder, mode: PauseMode) -> Version:
        """Load a folder and compare what the engine then holds with it.

        An engine that is not paused is paused for it: left running, it would first let every
        running request end. What was computed with other weights is dropped, unless running
        requests live on in it (`in_place`).

        Raises:
            VersionMismatch: if the engine holds other weights afterwards.
            EngineError: if the engine could not load the weights; it keeps the old ones.
        """
        if self._paused is not None and self._paused is not mode:
            raise EngineError(
                f"engine {self.base_url} is paused with mode {self._paused}, so version "
                f"{weights.version} cannot be loaded with mode {mode}; pause and load alike"
            )
        with self._named():
            await asyncio.to_thread(check_folder, weights)
        async with self._pause_for(mode):
            return await self._load(weights, mode)

    async def took_weights(self, version: Version, mode: PauseMode) -> None:
        """Note weights that the trainer sent to the engine itself, and compared.

        Raises:
            VersionMismatch: if the engine holds another version.
        """
        self._held.loaded(in_place=mode is PauseMode.IN_PLACE)
        self._held.digest = None  # of weights that it no longer has
        found = await self.version()
        if found != version:
            raise VersionMismatch(
                f"engine {self.base_url} was sent version {version} but holds {found}"
            )

    async def version(self) -> Version:
        """Version the engine reports now."""
        with self._named():
            version = self.api.held_version(await self._call(self.api.held))
        self._held.version = version
        return version

    async def digest(self) -> str | None:
        """A digest of the weights that the engine really has, if it can tell; every engine has its
        own kind, which is equal for equal weights."""
        return self.api.read_digest(await self._call(self.api.digest))

    # --- about the server ---

    async def ready(self) -> bool:
        """Whether the server answers and its model is loaded; never raises for a silent server."""
        call = self.api.ready
        try:
            answer = await self._http.request(call.method, call.path, timeout=_CONNECT_S)
        except httpx.TransportError:
            return False
        # SGLang is not ready for requests while it is paused; when we paused it, that is no fault.
        return answer.status_code == httpx.codes.OK or self._paused is not None

    async def engine_version(self) -> str:
        """Version of the server's package."""
        return self.api.engine_version(await self._call(self.api.info))

    async def info(self) -> dict[str, Any]:
        """What the server says about its weights."""
        return dict(await self._call(self.api.held))

    async def statistics(self) -> dict[str, Any]:
        """What the server says about itself; the embedded engine counts requests and tokens."""
        return dict(await self._call(self.api.info))

    async def spans(self, since: int = 0) -> tuple[list[dict[str, Any]], int]:
        """What the embedded engine did from span `since` on, and the next `since`.

        The first span of an answer replaces the last one of the answer before: it may have grown.
        """
        answer = await self._call(Call("GET", f"/spans?since={since}"))
        return answer["spans"], answer["next"]

    async def close(self) -> None:
        """Release the connections; the server is stopped by whoever started it."""
        await self._http.aclose()

    # --- below the surface: generating ---

    async def _generate(self, requests: list[GenerateRequest]) -> list[Generated]:
        pauses = self._abort_pauses
        arriving = [
            Arriving(request.request_id, self._unused_name(request)) for request in requests
        ]
        await self._receive(requests, arriving)
        results = [one.generated() for one in arriving]
        pausing = pauses % 2 == 1
        if self._abort_pauses == pauses and not pausing:
            return results
        again = [
            index
            for index, result in enumerate(results)
            if result.finish_reason == "abort" and result.request_id not in self._aborted
        ]
        if again:
            more = [continuation(requests[index], results[index]) for index in again]
            try:
                rest = await self._generate(more)
            except EngineUnreachable as error:
                raise EngineUnreachable(str(error), _all_partial(results, error)) from error
            for index, one in zip(again, rest, strict=True):
                results[index] = merge(results[index], one)
        return results

    async def _receive(
        self, requests: Sequence[GenerateRequest], arriving: Sequence[Arriving]
    ) -> None:
        """Send the requests and take in what comes, until all samples have ended."""
        if self._held.version is None and not self.api.tells_interruptions:
            await self.version()
        options = GenerateOptions(
            stream=self._stream,
            stream_interval=self._stream_interval,
            cache_name=self._held.cache_name,
        )
        self._arriving.update((one.request_id, one) for one in arriving)
        try:
            sent = [
                replace(request, request_id=one.sent_as)
                for request, one in zip(requests, arriving, strict=True)
            ]
            if self.api.together:
                await self._exchange(self.api.generate(sent, options), arriving)
            else:
                await _all_or_none(
                    self._exchange(self.api.generate([request], options), [one])
                    for request, one in zip(sent, arriving, strict=True)
                )
        except EngineUnreachable as error:
            partial = {one.request_id: one.generated() for one in arriving if len(one)}
            raise EngineUnreachable(str(error), partial) from error
        finally:
            for one in arriving:
                del self._arriving[one.request_id]

    def _unused_name(self, request: GenerateRequest) -> str:
        """SGLang aborts, two seconds after a streamed answer has ended, whatever has its id then:
        also what was sent again meanwhile, so no id is used twice."""
        return f"{request.request_id}#{self._name}-{next(self._sent)}"

    async def _exchange(self, call: Call, arriving: Sequence[Arriving]) -> None:
        """One HTTP request and its answer, whole or in messages."""
        silent_s = self._patience.limit_s
        try:
            async with (
                self._patience.wait() as watch,
                self._http.stream(
                    call.method,
                    call.path,
                    json=call.body,
                    timeout=httpx.Timeout(None, connect=_CONNECT_S),
                ) as answer,
            ):
                if answer.is_error:
                    await answer.aread()
                    raise self._refused(call, answer)
                async for message in _messages(answer):
                    watch.heard()
                    with self._named():
                        chunk = self.api.read(message)
                        arriving[chunk.index].add(chunk, self._held.version or 0)
        except TimeoutError as error:
            what = f"silent for {silent_s:g} s"
            raise self._unreachable(call, what) from error
        except httpx.TransportError as error:
            raise self._unreachable(call, str(error) or type(error).__name__) from error
        if any(one.finish_reason is None for one in arriving):
            raise self._unreachable(call, "the answer ended early")

    # --- below the surface: weights ---

    @asynccontextmanager
    async def _pause_for(self, mode: PauseMode) -> AsyncIterator[None]:
        if self._paused is not None:
            yield
            return
        await self.pause(mode)
        try:
            yield
        except VersionMismatch:
            raise  # what it would generate now has no name
        except BaseException:
            await self.resume()
            raise
        await self.resume()

    async def _load(self, weights: WeightsFolder, mode: PauseMode) -> Version:
        what = f"engine {self.base_url} did not load version {weights.version}"
        try:
            for call in self.api.load(weights, mode):
                refusal = self.api.refusal(await self._call(call))
                if refusal is not None:
                    raise EngineError(refusal)
        except EngineUnreachable:
            raise
        except EngineError as error:
            await self._check_unchanged(f"{what}: {error}")
            raise EngineError(f"{what}: {error}") from error
        self._held.loaded(in_place=mode is PauseMode.IN_PLACE)
        if mode is PauseMode.RETRACT and not self.api.tells_interruptions:
            for one in self._arriving.values():
                one.lost_caches += len(one) > 0
        version = await self.version()
        if version != weights.version:
            raise VersionMismatch(
                f"engine {self.base_url} was sent version {weights.version} but holds {version}"
            )
        wrong = self._held.compare(weights.checksum, await self.digest())
        if wrong is not None:
            raise VersionMismatch(
                f"engine {self.base_url} was sent version {weights.version} with checksum "
                f"{weights.checksum} but {wrong}"
            )
        return version

    async def _check_unchanged(self, what: str) -> None:
        """A server may refuse and have changed its weights all the same, under the old name."""
        if self._held.digest is not None and await self.digest() != self._held.digest:
            raise VersionMismatch(f"{what}; its weights have changed under the old version")

    # --- below the surface: HTTP ---

    async def _call(self, call: Call) -> Any:
        try:
            answer = await self._http.request(
                call.method,
                call.path,
                json=call.body,
                timeout=httpx.Timeout(self._control_timeout_s, connect=_CONNECT_S),
            )
        except httpx.TransportError as error:
            raise self._unreachable(call, str(error) or type(error).__name__) from error
        if answer.is_error:
            raise self._refused(call, answer)
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        return answer.json() if is_json else {}

    def _unreachable(self, call: Call, what: str) -> EngineUnreachable:
        return EngineUnreachable(
            f"engine {self.base_url} is unreachable ({call.method} {call.path}: {what})"
        )

    def _refused(self, call: Call, answer: httpx.Response) -> EngineError:
        return EngineError(
            f"engine {self.base_url} refused {call.method} {call.path} "
            f"({answer.status_code}): {_error_message(answer)}"
        )

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Say which engine it was."""
        try:
            yield
        except EngineError as error:
            raise type(error)(f"engine {self.base_url}: {error}") from error


async def _messages(answer: httpx.Response) -> AsyncIterator[Any]:
    """The messages of an answer: events of a stream, or the one or several of a whole answer."""
    if not answer.headers.get("content-type", "").startswith("text/event-stream"):
        whole = json.loads(await answer.aread())
        for index, one in enumerate(whole if isinstance(whole, list) else [whole]):
            yield {**one, "index": index} if isinstance(one, dict) else one
        return
    rest = b""
    async for part in answer.aiter_bytes():
        *events, rest = (rest + part).split(b"\n\n")
        for event in events:
            data = event.removeprefix(_EVENT)
            if data != _LAST_EVENT:
                yield json.loads(data)


async def _all_or_none(exchanges: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Wait for all; the first error ends the others."""
    tasks = [asyncio.ensure_future(one) for one in exchanges]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _all_partial(before: Sequence[Generated], error: EngineUnreachable) -> dict[str, Generated]:
    """What there is of each sample: of those sent again, both parts."""
    partial = {one.request_id: one for one in before if one.segments}
    for name, more in error.partial.items():
        partial[name] = merge(partial[name], more) if name in partial else more
    return partial


def _error_message(answer: httpx.Response) -> str:
    try:
        body = answer.json()
    except ValueError:
        return " ".join(answer.text.split())[:500]
    candidates: Iterable[object] = (
        (body.get("error"), body.get("message"), body.get("detail"))
        if isinstance(body, dict)
        else (body,)
    )
    for found in candidates:
        message = found.get("message") if isinstance(found, dict) else found
        if message:
            return str(message)
    return str(body)[:500]
