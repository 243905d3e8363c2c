"""The client of an inference server; what is said to it is a `Dialect`'s business.

    EngineClient -- generate, abort --> Drawing    the samples on their way
                 -- pause, load, resume, ... -->   Connection    HTTP and nothing else

What the server says about versions is believed, and compared with what was sent whenever weights
are loaded; what it says about itself is not enough for that, so digests of its weights are, too.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from areal_lab.control.events import Version
from areal_lab.engines.client.connection import Connection
from areal_lab.engines.client.dialect import Dialect, Digest, get
from areal_lab.engines.client.held_weights import HeldAdapter, HeldWeights
from areal_lab.engines.client.requests import RunningRequests
from areal_lab.engines.client.sglang import SGLANG
from areal_lab.engines.client.timeouts import RequestTimeouts
from areal_lab.engines.errors import EngineError, EngineUnreachable, VersionMismatch
from areal_lab.engines.protocol import Generated, GenerateRequest, PauseMode, WeightsFolder
from areal_lab.engines.weights.verify_folder import check_fit, check_folder, folder_shapes
from areal_lab.models.folder import end_token_ids

__all__ = ["EngineClient", "EngineError", "EngineUnreachable", "VersionMismatch"]

STREAM_INTERVAL = 8
"""Tokens of a sample between two messages of the server; at most so many are lost with it."""
_CONTROL_TIMEOUT_S = 600.0
_ADAPTER = "areal_lab-"
"""With this the names begin of adapters that clients like this one have loaded."""


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
        control_timeout_s: float | None = None,
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
            control_timeout_s: longest wait for any other answer; loading weights is one. `None` is
                `request_timeout_s`, or ten minutes.
            transport: instead of the network, for tests.
        """
        self.api = api
        timeout_s = control_timeout_s or request_timeout_s or _CONTROL_TIMEOUT_S
        self._connection = Connection(base_url, timeout_s=timeout_s, transport=transport)
        self._held = HeldWeights()
        self._timeouts = RequestTimeouts(request_timeout_s)
        self._requests = RunningRequests(
            connection=self._connection,
            api=api,
            held=self._held,
            timeouts=self._timeouts,
            stream=stream,
            stream_interval=stream_interval,
        )
        self._paused: PauseMode | None = None

    @property
    def base_url(self) -> str:
        """Address of the server."""
        return self._connection.base_url

    # --- generating ---

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generated]:
        """Draw one sample per request.

        What an `abort` pause of this client ended is sent again, with the tokens it has.

        Raises:
            EngineUnreachable: if the connection is lost, the server is silent for too long, or it
                no longer has the adapter that draws; with what had arrived.
            EngineError: if the server refuses, or its answer contradicts itself.
        """
        return await self._requests.generate(requests)

    def received_tokens(self, request_id: str) -> int:
        """Tokens of a running sample that have arrived since it was sent, or sent again."""
        return self._requests.received_tokens(request_id)

    def confirmed_tokens(self, request_id: str) -> int:
        """Of these, those that are kept if the engine is lost now: new weights that came just
        before leave it open which weights drew the others."""
        return self._requests.confirmed_tokens(request_id)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests now; their `generate` returns what they have."""
        await self._requests.abort(request_ids)

    # --- pauses and weights ---

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding; requests sent meanwhile are held by the server.

        To `abort`, requests are ended before, and held here: SGLang, where its pause is to do that,
        looks only once a second whether they have ended. Where versions are adapters, the server
        goes on, as nothing of it changes.
        """
        by_adapter = self._held.adapter is not None
        if by_adapter:
            self._check_adapter_mode(mode)
        if mode is PauseMode.ABORT:
            await self._requests.hold_requests()
        if not by_adapter:
            try:
                await self._connection.call(self.api.pause(mode))
            except BaseException:
                self._requests.may_send.set()
                raise
        self._paused = mode
        if mode is PauseMode.IN_PLACE:
            # From here on: what is held until after the update shares nothing older either.
            self._held.retire_cache()
        self._timeouts.pause()

    async def resume(self) -> None:
        """Go on, with the held requests too."""
        if self._held.adapter is None:
            await self._connection.call(self.api.resume)
        self._requests.may_send.set()
        self._paused = None
        self._timeouts.resume()

    async def load_weights(self, weights: WeightsFolder, mode: PauseMode) -> Version:
        """Load a folder and compare what the engine then holds with it.

        An adapter is loaded beside the one before; requests name it from then on. Only `abort`
        lets running ones go on with it.

        An engine that is not paused is paused for it: left running, it would first let every
        running request end. What was computed with other weights is dropped, unless running
        requests live on in it (`in_place`).

        Raises:
            VersionMismatch: if the engine holds other weights afterwards; it stays paused.
            EngineError: if the engine could not load the weights; it keeps the old ones.
        """
        if self._paused is not None and self._paused is not mode:
            raise EngineError(
                f"engine {self.base_url} is paused with mode {self._paused}, so version "
                f"{weights.version} cannot be loaded with mode {mode}; pause and load alike"
            )
        if weights.adapter is not None:
            self._check_adapter_mode(mode)
        with self._connection.named():
            await asyncio.to_thread(check_folder, weights)
        if weights.adapter is not None:
            async with self._pause_for(mode):
                return await self._load_adapter(weights)
        with self._connection.named():
            if self._held.shapes:
                await asyncio.to_thread(check_fit, weights, self._held.shapes)
        if self._held.digest is None:  # to tell a refusal from a change behind it
            self._held.digest = await self.digest()
        async with self._pause_for(mode):
            version = await self._load(weights, mode)
        if self._held.shapes is None:
            self._held.shapes = await asyncio.to_thread(folder_shapes, weights.path)
        return version

    def note_model(self, folder: Path) -> None:
        """Note which model the server has: weights of other shapes are refused, and its end tokens
        end a sample that an `abort` pause cut off just then."""
        self._held.shapes = folder_shapes(folder)
        self._requests.end_tokens = end_token_ids(folder)

    async def supports_adapters(self) -> bool:
        """Whether the server was started for LoRA adapters."""
        reply = await self._connection.call(self.api.adapter_support)
        return self.api.supports_adapters(reply)

    def use_adapters(self, version: Version) -> None:
        """Note that versions will be adapters, to the weights that the server has now.

        Args:
            version: of these weights alone.
        """
        self._held.adapter = HeldAdapter("", version)

    async def confirm_push(self, version: Version, mode: PauseMode) -> None:
        """Note weights that the trainer sent to the engine itself, and compared.

        Raises:
            VersionMismatch: if the engine holds another version.
        """
        if mode is PauseMode.IN_PLACE and self._paused is None:
            self._held.retire_cache()
        self._held.digest = None  # of weights that it no longer has
        found = await self.version()
        if found != version:
            raise VersionMismatch(
                f"engine {self.base_url} was sent version {version} but holds {found}"
            )

    async def version(self) -> Version:
        """Version the engine reports now."""
        reply = await self._connection.call(self.api.held)
        with self._connection.named():
            self._held.version = self.api.held_version(reply)
        return self._held.version

    async def digest(self) -> Digest | None:
        """A digest of the weights that the engine really has, if it can tell; every engine has its
        own kind."""
        return self.api.read_digest(await self._connection.call(self.api.digest))

    # --- about the server ---

    async def ready(self) -> bool:
        """Whether the server answers and its model is loaded; never raises for a silent server."""
        status = await self._connection.status(self.api.ready)
        # SGLang is not ready for requests while it is paused; when we paused it, that is no fault.
        return status == httpx.codes.OK or (status is not None and self._paused is not None)

    async def ping_compute(self) -> None:
        """Return when what computes behind the server has answered.

        Raises:
            EngineUnreachable: if there is no answer in time.
        """
        await self._connection.call(self.api.ping_compute)

    async def engine_name(self) -> str:
        """Which of `backends.BACKENDS` the server is."""
        return self.api.engine_name(await self._connection.call(self.api.info))

    async def engine_version(self) -> str:
        """Version of the server's package."""
        return self.api.engine_version(await self._connection.call(self.api.info))

    async def info(self) -> dict[str, Any]:
        """What the server says about its weights."""
        return dict(await self._connection.call(self.api.held))

    async def statistics(self) -> dict[str, Any]:
        """What the server says about itself; the embedded engine counts requests and tokens."""
        return dict(await self._connection.call(self.api.info))

    async def spans(self, since: int = 0) -> tuple[list[dict[str, Any]], int]:
        """What the embedded engine did from span `since` on, and the next `since`.

        The first span of an answer replaces the last one of the answer before: it may have grown.
        """
        reply = await self._connection.call(get(f"/spans?since={since}"))
        return reply["spans"], reply["next"]

    async def close(self) -> None:
        """Release the connections; the server is stopped by whoever started it."""
        try:
            await self._connection.close()
        finally:
            self._requests.may_send.set()  # whoever waits to send finds out

    # --- below the surface ---

    @asynccontextmanager
    async def _pause_for(self, mode: PauseMode) -> AsyncIterator[None]:
        """Paused inside. It stays so after anything but success and a refusal that changed
        nothing: what it would generate then has no name."""
        if self._paused is not None:
            yield
            return
        await self.pause(mode)
        try:
            yield
        except (VersionMismatch, EngineUnreachable):
            raise
        except EngineError:
            await self.resume()
            raise
        await self.resume()

    async def _load(self, weights: WeightsFolder, mode: PauseMode) -> Version:
        what = f"engine {self.base_url} did not load version {weights.version}"
        try:
            for call in self.api.load(weights, mode):
                refusal = self.api.refusal(await self._connection.call(call))
                if refusal is not None:
                    raise EngineError(refusal)
        except EngineUnreachable:
            raise
        except EngineError as error:
            await self._check_unchanged(f"{what}: {error}")
            raise EngineError(f"{what}: {error}") from error
        if mode is PauseMode.RETRACT and not self.api.tells_interruptions:
            self._requests.count_lost_caches()
        version = await self.version()
        if version != weights.version:
            raise VersionMismatch(
                f"engine {self.base_url} was sent version {weights.version} but holds {version}"
            )
        if self._held.adapter is not None:
            self._held.adapter = HeldAdapter("", version)
        wrong = self._held.compare(weights.checksum, await self.digest())
        if wrong is not None:
            raise VersionMismatch(
                f"engine {self.base_url} was sent version {weights.version} with checksum "
                f"{weights.checksum} but {wrong}"
            )
        return version

    def _check_adapter_mode(self, mode: PauseMode) -> None:
        if self._held.adapter is None or mode is not PauseMode.ABORT:
            raise EngineError(
                f"engine {self.base_url} was to change adapters with mode {mode}; that needs a "
                f"server started for adapters, and mode {PauseMode.ABORT}"
            )

    async def _load_adapter(self, weights: WeightsFolder) -> Version:
        """No request of ours runs that names another. The adapter before this one stays: a server
        may still be about to end a request that names it."""
        name = f"{_ADAPTER}{secrets.token_hex(4)}-v{weights.version}"
        kept = {name, "" if self._held.adapter is None else self._held.adapter.name}
        try:
            await self._connection.call(self.api.load_adapter(name, weights))
            for old in await self._requests.adapters():
                if old.startswith(_ADAPTER) and old not in kept:
                    await self._connection.call(self.api.unload_adapter(old))
            await self._connection.call(self.api.name_version(weights.version))
        except EngineUnreachable:
            raise
        except EngineError as error:
            raise EngineError(
                f"engine {self.base_url} did not load the adapter of version {weights.version}: "
                f"{error}; a server is started for adapters by areal-lab engine serve --lora-rank"
            ) from error
        version, there = await self.version(), await self._requests.adapters()
        if version != weights.version or name not in there:
            raise VersionMismatch(
                f"engine {self.base_url} was sent the adapter {name} but holds version {version} "
                f"and the adapters {', '.join(there) or '(none)'}"
            )
        self._held.adapter = HeldAdapter(name, version)
        return version

    async def _check_unchanged(self, what: str) -> None:
        """A server may refuse and have changed its weights all the same, under the old name."""
        before = self._held.digest
        if before is None:
            return
        if await self.digest() != before:
            raise VersionMismatch(f"{what}; its weights have changed under the old version")
        if not before.whole:
            raise VersionMismatch(f"{what}; it cannot tell whether some have changed")
