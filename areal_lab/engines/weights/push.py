"""From the trainer's memory into engines: hold a version, open, send, close, verify.

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
    """What came of a push."""

    failures: tuple[EngineFailure, ...]
    seconds: Mapping[str, float]
    """By phase: open, send, close, verify."""


@dataclass(slots=True)
class ActivePush:
    """One version on its way: the engines still in it, and those that failed, with the reason."""

    version: Version
    tensors: Mapping[str, Tensor]
    flush_cache: bool
    links: list[EngineLink]
    failures: list[EngineFailure] = field(default_factory=list)

    def for_each(self, act: Callable[[EngineLink], object]) -> None:
        """Do something with every engine at the same time; who fails is out."""
        with ThreadPoolExecutor(max_workers=max(1, len(self.links))) as pool:
            tasks = [(link, pool.submit(act, link)) for link in self.links]
        for link, task in tasks:
            error = task.exception()
            if isinstance(error, TransferFailed):
                self.drop(link, error)
            elif error is not None:
                raise error

    def drop(self, link: EngineLink, error: TransferFailed) -> None:
        """This engine does not get the version."""
        self.links = [other for other in self.links if other is not link]
        self.failures.append(error.failure)


class Sender(Protocol):
    """A way of sending tensors to engines whose update is open."""

    def send(self, active: ActivePush) -> None:
        """Send all tensors to all engines; who fails is out."""
        ...

    def close(self) -> None:
        """Let go of what is kept between two versions."""
        ...


class Pusher:
    """Holds the newest weights and pushes them. Threads may call it; they take turns."""

    def __init__(self, sender: Sender, *, timeout_s: float, kept_versions: int = 1) -> None:
        """Nothing is held yet.

        Args:
            timeout_s: longest wait for one answer of an engine.
            kept_versions: sets of weights held at once; 2 where an engine may have to be given the
                version of the others after a newer one is there.
        """
        self._sender = sender
        self._timeout_s = timeout_s
        self._kept_versions = kept_versions
        self._lock = threading.Lock()
        self._held: dict[Version, Expected] = {}

    def hold(
        self, tensors: Mapping[str, Tensor], version: Version, *, dtype: torch.dtype
    ) -> WeightsInMemory:
        """Copy a version, cast to `dtype`; it replaces the oldest, in the same memory."""
        with self._lock:
            oldest: Mapping[str, Tensor] = {}
            while len(self._held) >= self._kept_versions:
                oldest = self._held.pop(next(iter(self._held))).tensors
            copies = {
                name: _copy(tensor, oldest.get(name), dtype) for name, tensor in tensors.items()
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
        """Bring a held version into these engines, and see that they hold it.

        Engines must be paused or idle. One that failed holds an unknown mixture if it failed while
        tensors were sent, and must not generate before another push succeeded.

        Args:
            flush_cache: whether engines forget the keys and values of older weights; false for
                requests that live on in them.

        Raises:
            ValueError: if it is not held.
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

    def close(self) -> None:
        """Let go of everything."""
        with self._lock:
            self._sender.close()
            self._held.clear()


def _copy(tensor: Tensor, kept: Tensor | None, dtype: torch.dtype) -> Tensor:
    tensor = tensor.detach()
    fits = (
        kept is not None
        and (kept.shape, kept.dtype, kept.device) == (tensor.shape, dtype, tensor.device)
    )  # fmt: skip
    target = kept if fits else torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    assert target is not None
    return target.copy_(tensor)


def _timed(*phases: tuple[str, Callable[[], object]]) -> dict[str, float]:
    seconds = {}
    for name, act in phases:
        start_s = time.monotonic()
        act()
        seconds[name] = time.monotonic() - start_s
    return seconds
