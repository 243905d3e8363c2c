"""Push weights from the trainer's memory into engines: hold, open, send, close, verify.

hold(tensors)                 the training thread, after a step
push(engines) --> failures    another thread: the next step runs meanwhile

phase       each engine at the same time            one engine's failure
open        /begin_weight_update                     leaves the others alone, in every phase
send        by the transfer: `tensor` or `broadcast`
close       /end_weight_update
verify      /model_info, /weights_checker
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from areal_lab.control.events import Version
from areal_lab.engines.weights.folder import checksum
from areal_lab.engines.weights.link import EngineLink, Expected
from areal_lab.engines.weights.records import (
    EngineFailure,
    EngineTarget,
    TransferFailed,
    WeightsInMemory,
)


@dataclass(frozen=True, slots=True)
class PushOutcome:
    """The result of a push."""

    failures: tuple[EngineFailure, ...]
    seconds: Mapping[str, float]
    """Seconds of each phase: open, send, close, verify."""


@dataclass(slots=True)
class ActivePush:
    """A push in progress: the engines still in it, and those that failed, with the reason."""

    version: Version
    tensors: Mapping[str, Tensor]
    flush_cache: bool
    links: list[EngineLink]
    failures: list[EngineFailure] = field(default_factory=list)

    def for_each(self, act: Callable[[EngineLink], object]) -> None:
        """Call `act` for all engines concurrently; drop those that fail."""
        with ThreadPoolExecutor(max_workers=max(1, len(self.links))) as pool:
            tasks = [(link, pool.submit(act, link)) for link in self.links]
        for link, task in tasks:
            error = task.exception()
            if isinstance(error, TransferFailed):
                self.drop(link, error)
            elif error is not None:
                raise error

    def drop(self, link: EngineLink, error: TransferFailed) -> None:
        """Remove an engine that failed."""
        self.links = [other for other in self.links if other is not link]
        self.failures.append(error.failure)


class Sender(Protocol):
    """Sends tensors to engines whose update is open."""

    def send(self, active: ActivePush) -> None:
        """Send all tensors to all engines; drop those that fail."""
        ...

    def close(self) -> None:
        """Release what is kept between two versions."""
        ...


class Pusher:
    """Holds the newest weights and pushes them. Threads may call it; they take turns."""

    def __init__(
        self,
        sender: Sender,
        *,
        timeout_s: float,
        kept_versions: int = 1,
        device: torch.device | str = "cpu",
        reuses_memory: bool = True,
    ) -> None:
        """Create a pusher that holds no version yet.

        Args:
            reuses_memory: False gives each version new memory, after the oldest one is freed.
        """
        self._reuses_memory = reuses_memory
        self._sender = sender
        self._device = torch.device(device)
        self._timeout_s = timeout_s
        self._kept_versions = kept_versions
        self._lock = threading.Lock()
        self._held: dict[Version, Expected] = {}

    def hold(
        self, tensors: Mapping[str, Tensor], version: Version, *, dtype: torch.dtype
    ) -> WeightsInMemory:
        """Copy a version to the sender's device, cast to `dtype`; it replaces the oldest, in the
        same memory unless `reuses_memory` is False.
        """
        with self._lock:
            oldest: Mapping[str, Tensor] = {}
            while len(self._held) >= self._kept_versions:
                dropped = self._held.pop(next(iter(self._held)))
                if self._reuses_memory:
                    oldest = dropped.tensors
                del dropped  # free before the next copy is made
            copies = {
                name: _copy(tensor, oldest.get(name), dtype, self._device)
                for name, tensor in tensors.items()
            }
            held = WeightsInMemory(
                version=version,
                checksum=checksum(copies),
                size_bytes=sum(tensor.nbytes for tensor in copies.values()),
            )
            self._held[version] = Expected(version, held.checksum, copies)
            return held

    def push(
        self, version: Version, targets: Sequence[EngineTarget], *, flush_cache: bool
    ) -> PushOutcome:
        """Push a held version into these engines and verify that they hold it.

        Engines must be paused or idle. One that failed during the transfer has a mixture of
        versions, and must not generate before another push succeeds. With `flush_cache` engines
        drop the keys and values of older weights; without it running requests keep using them.
        """
        with self._lock, ExitStack() as stack:
            expected = self._held.get(version)
            if expected is None:
                raise ValueError(f"asked to push version {version}, but held are {[*self._held]}")
            links = [
                stack.enter_context(EngineLink(target, version, timeout_s=self._timeout_s))
                for target in targets
            ]
            active = ActivePush(version, expected.tensors, flush_cache, links)
            seconds = _timed(
                ("open", lambda: active.for_each(EngineLink.open_update)),
                ("send", lambda: self._sender.send(active)),
                ("close", lambda: active.for_each(EngineLink.close_update)),
                ("verify", lambda: active.for_each(lambda link: link.verify(expected))),
            )
            return PushOutcome(tuple(active.failures), seconds)

    def release(self) -> None:
        """Release the held versions: memory that others opened by name or handle may outlive this
        process.
        """
        with self._lock:
            self._held.clear()

    def close(self) -> None:
        """Release everything."""
        self.release()
        with self._lock:
            self._sender.close()


def _copy(tensor: Tensor, kept: Tensor | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy to `device`, into the memory of `kept` if that fits."""
    if kept is None or (kept.shape, kept.dtype) != (tensor.shape, dtype):
        kept = torch.empty(tensor.shape, dtype=dtype, device=device)
    return kept.copy_(tensor.detach())


def _timed(*phases: tuple[str, Callable[[], object]]) -> dict[str, float]:
    seconds = {}
    for name, act in phases:
        start_s = time.monotonic()
        act()
        seconds[name] = time.monotonic() - start_s
    return seconds
