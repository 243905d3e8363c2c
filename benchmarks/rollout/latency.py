"""From "weights ready" to the first token under them, for each transfer and pause mode.

    requests run --> ready --pause, send, resume--> first token of the new version has arrived

Ready means that the trainer has exported them, to a folder or, for transfers from memory, to its
own memory; this process takes the place of the trainer.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from areal_lab.control.events import Version
from areal_lab.engines.client.dialect import Chunk, Dialect, Reply
from areal_lab.engines.client.engine_client import EngineClient
from areal_lab.engines.protocol import ALL_LINEAR, GenerateRequest, PauseMode, WeightsFolder
from areal_lab.engines.weights.broadcast import BroadcastSender
from areal_lab.engines.weights.folder import deduplicated_state, write_weights
from areal_lab.engines.weights.push import Pusher
from areal_lab.engines.weights.records import EngineTarget, Transfer
from areal_lab.engines.weights.tensor import TensorSender
from areal_lab.training.lora import add_lora, target_modules, write_adapter_folder

RUNNING_TOKENS = 16
"""Tokens of each request when the weights are ready."""
TIMEOUT_S = 30.0
ADAPTER_RANK = 8


@dataclass(slots=True)
class Ear:
    """Sees every message of the engine before the client."""

    told: Callable[[], None] = lambda: None
    """Called with each message."""
    first_s: list[float] = field(default_factory=list)
    """Seconds until the first token of each version that was expected."""
    _expected: tuple[Version, float] | None = None
    _brought: bool = False
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def dialect(self, api: Dialect) -> Dialect:
        """`api`, with every message observed."""

        def read(reply: Reply) -> Chunk:
            chunk = api.read(reply)
            self._hear(chunk)
            return chunk

        return replace(api, read=read)

    def expect(self, version: Version, since_s: float) -> None:
        """Start waiting for the first token of this version."""
        self._expected = (version, since_s)
        self._brought = False
        self._arrived.clear()

    def brought(self) -> None:
        """The engine holds this version: later messages without a version (vLLM) are of it."""
        self._brought = True

    async def arrived(self) -> None:
        """Wait for its first token."""
        await self._arrived.wait()

    def _hear(self, chunk: Chunk) -> None:
        self.told()
        if self._expected is None or not chunk.tokens:
            return
        version, since_s = self._expected
        newest = chunk.spans[-1].version if chunk.spans else chunk.version
        if newest == version or (newest is None and self._brought):
            self.first_s.append(asyncio.get_running_loop().time() - since_s)
            self._expected = None
            self._arrived.set()


class Ways:
    """Sends two sets of weights to an engine in turns, by every transfer it supports."""

    def __init__(self, models: Sequence[PreTrainedModel], root: Path) -> None:
        self._folders: list[WeightsFolder] = [
            write_weights(model, root, version, dtype=torch.float32)
            for version, model in enumerate(models)
        ]
        self._adapters = [_adapter(models[0], root / "adapters", version) for version in (0, 1)]
        self._tensors = [deduplicated_state(model) for model in models]
        self._closing = ExitStack()
        self._pushers: Mapping[Transfer, Pusher] = {
            Transfer.HTTP_TENSOR: Pusher(TensorSender(), timeout_s=TIMEOUT_S, kept_versions=2),
            Transfer.DISTRIBUTED: Pusher(
                BroadcastSender(timeout_s=TIMEOUT_S), timeout_s=TIMEOUT_S + 5, kept_versions=2
            ),
        }
        for pusher in self._pushers.values():
            self._closing.callback(pusher.close)
            for version, tensors in enumerate(self._tensors):
                pusher.hold(tensors, version, dtype=torch.float32)
        self.version: Version = 0
        """Version that the engine holds."""

    @property
    def first(self) -> WeightsFolder:
        """The folder that an engine is started with."""
        return self._folders[0]

    @property
    def first_for_adapters(self) -> WeightsFolder:
        """The same for adapters."""
        return replace(self.first, adapter=self._adapters[0].adapter)

    def begin_again(self) -> None:
        """The same weights for another engine."""
        self.version = 0

    @property
    def next(self) -> Version:
        """The version to send next."""
        return 1 - self.version

    async def bring(self, client: EngineClient, transfer: Transfer, mode: PauseMode) -> None:
        """Send the next version to an engine, paused or idle, and check that it holds it."""
        version = self.next
        if transfer is Transfer.FOLDER:
            await client.load_weights(self._folders[version], mode)
        elif transfer is Transfer.ADAPTER:
            await client.load_weights(self._adapters[version], mode)
        else:
            outcome = await asyncio.to_thread(
                self._pushers[transfer].push,
                version,
                [EngineTarget(client.base_url, key=client.key)],
                flush_cache=mode is not PauseMode.IN_PLACE,
            )
            for failure in outcome.failures:
                raise RuntimeError(failure.message)
            await client.confirm_push(version, mode)
        self.version = version

    def close(self) -> None:
        """Release groups and memory."""
        self._closing.close()


def _adapter(model: PreTrainedModel, root: Path, version: Version) -> WeightsFolder:
    adapted = copy.deepcopy(model)
    targets = target_modules(adapted, [ALL_LINEAR])
    torch.manual_seed(version)
    add_lora(adapted, rank=ADAPTER_RANK, alpha=ADAPTER_RANK, targets=targets)
    return write_adapter_folder(adapted, root, version, dtype=torch.float32)


async def first_token_s(
    client: EngineClient,
    ear: Ear,
    requests: Sequence[GenerateRequest],
    *,
    version: Version,
    bring: Callable[[], Awaitable[None]],
    mode: PauseMode,
) -> float:
    """Interrupt these requests for new weights once; seconds from ready to the first new token.

    Args:
        requests: long enough that they still run then; they are ended afterwards.
        version: that `bring` brings.
    """
    clock = asyncio.get_running_loop().time
    names = [request.request_id for request in requests]
    running = asyncio.create_task(client.generate(requests))
    under_way = asyncio.Event()

    def look() -> None:
        if min(map(client.received_tokens, names)) >= RUNNING_TOKENS:
            under_way.set()

    ear.told = look
    try:
        await _unless_ended(running, under_way.wait())
        ear.expect(version, clock())
        await client.pause(mode)
        await bring()
        ear.brought()
        await client.resume()
        await _unless_ended(running, ear.arrived())
        await client.abort(names)
        await running
    finally:
        ear.told = lambda: None
        running.cancel()
    return ear.first_s[-1]


async def _unless_ended(running: asyncio.Task[Any], waiting: Coroutine[Any, Any, object]) -> None:
    """Wait for an event while requests run.

    Raises:
        RuntimeError: if they end before.
    """
    happening = asyncio.create_task(waiting)
    try:
        await asyncio.wait({running, happening}, return_when=asyncio.FIRST_COMPLETED)
        if not happening.done():
            running.result()
            raise RuntimeError("the requests ended before the engine had new weights")
    finally:
        happening.cancel()
