"""The client of an inference server; the server's HTTP protocol is in its `Dialect`.

    EngineClient -- generate, abort -->          RunningRequests    samples being generated
                 -- pause, load, resume, ... --> Connection         HTTP

Tokens get the versions that the server reports. After each load, the reported version is compared
with the one sent, and so is a digest of the server's weights where it has one.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2

from areal_lab.control.events import Version
from areal_lab.data.tokenize import TOKENIZER_FILE
from areal_lab.engines.client.connection import Connection, RequestTimeouts
from areal_lab.engines.client.dialect import (
    Dialect,
    Digest,
    HeldAdapter,
    HeldWeights,
    ScoreRequest,
    get,
)
from areal_lab.engines.client.requests import RunningRequests
from areal_lab.engines.client.sglang import SGLANG
from areal_lab.engines.protocol import (
    CannotScore,
    EngineError,
    EngineUnreachable,
    Generated,
    GenerateRequest,
    MemoryTag,
    PauseMode,
    ScoredTokens,
    VersionMismatch,
    WeightsFolder,
)
from areal_lab.engines.weights.verify_folder import (
    ReadFolder,
    check_fit,
    folder_shapes,
    read_folder_here,
)
from areal_lab.models.folder import end_token_ids

__all__ = ["EngineClient", "EngineError", "EngineUnreachable", "VersionMismatch"]

STREAM_INTERVAL = 8
"""Tokens of a sample between two messages of the server; at most this many are lost with the
server."""
_CONTROL_TIMEOUT_S = 600.0
_ADAPTER = "areal_lab-"
"""Prefix of the names of adapters that these clients load."""


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
        key: str = "",
        read_folder: ReadFolder = read_folder_here,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        """Create a client; nothing is sent yet."""
        self.api = api
        timeout_s = control_timeout_s or request_timeout_s or _CONTROL_TIMEOUT_S
        self.key = key
        """The server's key; never to be printed."""
        self._connection = Connection(base_url, timeout_s=timeout_s, key=key, transport=transport)
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
        self._read_folder = read_folder

    @property
    def base_url(self) -> str:
        """Address of the server."""
        return self._connection.base_url

    def stream_every(self, tokens: int) -> None:
        """From the next request on, have messages come after this many tokens of a sample."""
        self._requests.stream_interval = tokens

    def report_samples(self, ended: Callable[[str], None]) -> None:
        """Call `ended` with the name of each request whose sample ends, perhaps several times."""
        self._requests.sample_ended = ended

    # --- generating ---

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generated]:
        """Generate one sample per request.

        Requests that an `abort` pause of this client ended are sent again with their tokens.
        """
        return await self._requests.generate(requests)

    async def token_logprobs(
        self, tokens: Sequence[int], *, start: int = 0, top: int = 0
    ) -> ScoredTokens:
        """Score given tokens with the current weights, at temperature 1.

        Args:
            tokens: the sequence, at least one token.
            start: index of the first token to score.
            top: most likely tokens to report at each place.

        Raises:
            CannotScore: this kind of server cannot.
        """
        if self.api.score is None:
            raise CannotScore(
                f"engine {self.base_url} cannot report log-probs of prompts or of other tokens "
                f"than the sampled ones ({self.api.name}); use the embedded engine or sglang"
            )
        adapter = self._held.adapter
        request = ScoreRequest(
            request_id=f"score-{secrets.token_hex(8)}",
            tokens=tuple(tokens),
            start=start,
            top=top,
            adapter="" if adapter is None else adapter.name,
        )
        reply = await self._connection.call(self.api.score(request))
        with self._connection.named():
            found = self.api.read_scores(reply, request)
        return found if adapter is None else replace(found, version=adapter.version)

    def received_tokens(self, request_id: str) -> int:
        """Received tokens of a running sample since it was last sent."""
        return self._requests.received_tokens(request_id)

    def confirmed_tokens(self, request_id: str) -> int:
        """The received tokens that are kept if the engine is lost now. Right after a weight
        update, the version of the newest tokens is uncertain until the next message.
        """
        return self._requests.confirmed_tokens(request_id)

    def received(self, request_ids: Iterable[str]) -> dict[str, Generated]:
        """The confirmed tokens so far of running samples, by request id, for a checkpoint."""
        return self._requests.received(request_ids)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests now; their `generate` returns the tokens so far."""
        await self._requests.abort(request_ids)

    # --- pauses and weights ---

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding; requests sent meanwhile wait on the server.

        With `abort`, requests are ended first and wait here: SGLang's own abort pause checks only
        once a second whether they have ended. Where versions are adapters, the server is not
        paused, because its weights do not change.
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
            # From here on, so requests that wait for the update share no older prefix.
            self._held.retire_cache()
        self._timeouts.pause()

    async def resume(self) -> None:
        """Resume decoding, including the waiting requests."""
        if self._held.adapter is None:
            await self._connection.call(self.api.resume)
        self._requests.may_send.set()
        self._paused = None
        self._timeouts.resume()

    async def release_memory(self, tag: MemoryTag) -> None:
        """Give memory back to the device; weights are lost with it.

        The engine must be paused with `abort`: SGLang does not survive it otherwise.
        """
        if self.api.release is None or self._paused is not PauseMode.ABORT:
            raise EngineError(
                f"engine {self.base_url} cannot release its {tag}: it needs a pause with mode "
                f"{PauseMode.ABORT}, and a server other than vllm"
            )
        await self._connection.call(self.api.release(tag))

    async def resume_memory(self, tag: MemoryTag) -> None:
        """Allocate released memory again; weights must be loaded before `resume`."""
        if self.api.take is not None:
            await self._connection.call(self.api.take(tag))

    async def load_weights(self, weights: WeightsFolder, mode: PauseMode) -> Version:
        """Load a folder and check that the engine then holds its weights.

        An adapter is loaded in addition to the previous one, and requests name it from then on;
        running requests can switch to it only with `abort`.

        An engine that is not paused is paused first: a running one would wait until every running
        request ends. Its cache is dropped, unless running requests keep using it (`in_place`).
        """
        if self._paused is not None and self._paused is not mode:
            raise EngineError(
                f"engine {self.base_url} is paused with mode {self._paused}, so version "
                f"{weights.version} cannot be loaded with mode {mode}; use the same mode for both"
            )
        if weights.adapter is not None:
            self._check_adapter_mode(mode)
        with self._connection.named():
            weights, shapes = await self._read_folder(weights)
        if weights.adapter is not None:
            async with self._pause_for(mode):
                return await self._load_adapter(weights)
        with self._connection.named():
            if self._held.shapes:
                check_fit(weights, shapes, self._held.shapes)
        if self._held.digest is None:  # shows whether a refused load changed the weights anyway
            self._held.digest = await self.digest()
        async with self._pause_for(mode):
            version = await self._load(weights, mode)
        if self._held.shapes is None:
            self._held.shapes = shapes
        return version

    def note_model(self, folder: Path) -> None:
        """Set the model folder of the server: weights of other shapes are then refused, a sample
        that was aborted right after an end token counts as complete, and requests may have stop
        strings if the folder has a tokenizer.
        """
        self._held.shapes = folder_shapes(folder)
        self.note_end_tokens(folder)
        if (folder / TOKENIZER_FILE).is_file():
            self.note_tokenizer(folder)

    def note_end_tokens(self, folder: Path) -> None:
        """Set the model folder that defines the end tokens."""
        self._requests.end_tokens = end_token_ids(folder)

    def note_tokenizer(self, folder: Path) -> None:
        """Set the folder of the model's tokenizer, which is needed to find stop strings."""
        self._requests.tokenizer = folder

    async def supports_adapters(self) -> bool:
        """Return whether the server was started with support for LoRA adapters."""
        reply = await self._connection.call(self.api.adapter_support)
        return self.api.supports_adapters(reply)

    def use_adapters(self, version: Version) -> None:
        """Treat new versions as adapters on the weights that the server has now."""
        self._held.adapter = HeldAdapter("", version)

    async def confirm_push(self, version: Version, mode: PauseMode) -> None:
        """Check the version after the trainer pushed weights to the engine directly."""
        if mode is PauseMode.IN_PLACE and self._paused is None:
            self._held.retire_cache()
        self._held.digest = None  # it belongs to the previous weights
        found = await self.version()
        if found != version:
            raise VersionMismatch(
                f"engine {self.base_url} was sent version {version} but holds {found}"
            )

    async def version(self) -> Version:
        """Version that the engine reports now."""
        reply = await self._connection.call(self.api.held)
        with self._connection.named():
            self._held.version = self.api.held_version(reply)
        return self._held.version

    async def digest(self) -> Digest | None:
        """Digest of the weights in the engine's memory, if it supports one; each engine has its
        own kind.
        """
        return self.api.read_digest(await self._connection.call(self.api.digest))

    # --- about the server ---

    async def ready(self) -> bool:
        """Return whether the server replies and its model is loaded; never raises for a silent
        server.
        """
        status = await self._connection.status(self.api.ready)
        # A paused SGLang reports that it is not ready; if we paused it, that is expected.
        return status == httpx2.codes.OK or (status is not None and self._paused is not None)

    async def ping_compute(self) -> None:
        """Return when the compute process behind the server has replied."""
        await self._connection.call(self.api.ping_compute)

    async def engine_name(self) -> str:
        """Key of the server's engine in `backends.BACKENDS`."""
        return self.api.engine_name(await self._connection.call(self.api.info))

    async def engine_version(self) -> str:
        """Version of the server's package."""
        return self.api.engine_version(await self._connection.call(self.api.info))

    async def enforces_schemas(self) -> bool:
        """Return whether responses match the `json_schema` of their requests."""
        try:
            return bool((await self._connection.call(get("/json_schemas"))).get("enforced"))
        except EngineUnreachable:
            raise
        except EngineError:  # only the embedded engine has this path
            return self.api.has_grammars(await self._connection.call(self.api.info))

    async def info(self) -> dict[str, Any]:
        """Server's report about its weights."""
        return dict(await self._connection.call(self.api.held))

    async def statistics(self) -> dict[str, Any]:
        """Server's report about itself; the embedded engine counts requests and tokens."""
        return dict(await self._connection.call(self.api.info))

    async def spans(self, since: int = 0) -> tuple[list[dict[str, Any]], int]:
        """Activity spans of the embedded engine from number `since` on, and the next `since`.

        The first span of a reply replaces the last one of the previous reply: it may have grown.
        """
        reply = await self._connection.call(get(f"/spans?since={since}"))
        return reply["spans"], reply["next"]

    async def close(self) -> None:
        """Close the connections; the server keeps running."""
        try:
            await self._connection.close()
        finally:
            self._requests.may_send.set()  # waiting requests then fail on the closed connection

    # --- internal ---

    @asynccontextmanager
    async def _pause_for(self, mode: PauseMode) -> AsyncIterator[None]:
        """Pause inside the block. The engine resumes after success and after a refusal that
        changed nothing; otherwise it stays paused, because the version of its weights is
        unknown.
        """
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
                f"engine {self.base_url} cannot change adapters with pause mode {mode}; it needs a "
                f"server started with adapters, and pause mode {PauseMode.ABORT}"
            )

    async def _load_adapter(self, weights: WeightsFolder) -> Version:
        """Load an adapter while no request runs. The previous one stays loaded: the server may
        still be ending a request that names it.
        """
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
                f"{error}; start the server with areal-lab engine serve --lora-rank"
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
        """Check that a refused load left the weights as they were under the old version."""
        before = self._held.digest
        if before is None:
            return
        if await self.digest() != before:
            raise VersionMismatch(f"{what}; its weights have changed under the old version")
        if not before.whole:
            raise VersionMismatch(f"{what}; it cannot report whether some weights changed")
