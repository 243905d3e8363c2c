"""The scheduler: the one thread that owns the model, running steps and requests of HTTP handlers.

    handler --call(function)--> queue --> thread: function() | step() | load  --> future --> handler

An error in a step ends the process, with the traceback in its log: an engine that cannot compute
must not look busy.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from areal_lab.engines.embedded.activity import ActivityLog, ActivityName
from areal_lab.engines.embedded.batcher import Batcher, Refused, Sample
from areal_lab.engines.protocol import GenerateRequest, PauseMode
from areal_lab.engines.weights.folder import CorruptWeights, read_weights

T = TypeVar("T")


@dataclass(slots=True)
class Stream:
    """A streamed reply."""

    interval: int
    """Steps between two messages; a running request gets one token per step."""
    progress: Callable[[], None]
    """Called by the scheduler's thread when there is something to send."""
    steps: int = 0


@dataclass(slots=True)
class _Batch:
    """Requests of one HTTP call, which share one reply."""

    samples: list[Sample]
    unfinished: int
    future: Future[list[Sample]]
    """Set when the last one ended; for a stream, when all are admitted."""
    stream: Stream | None


@dataclass(slots=True)
class _Update:
    """A weight update that waits for running requests to end."""

    read: Callable[[], Mapping[str, Tensor]]
    version: str | None
    """`None` keeps the current version, as in SGLang."""
    flush: bool
    future: Future[str]


class Scheduler:
    """Start the thread with `start`; every other method may be called from any thread."""

    def __init__(self, load: Callable[[], Batcher], *, threads: int) -> None:
        self.activity = ActivityLog()
        self.ready = threading.Event()
        """Set when the model is loaded."""
        self._load = load
        self._threads = threads
        self._tasks: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._updates: deque[_Update] = deque()
        self._batch_of: dict[str, _Batch] = {}
        self._streams: list[Stream] = []

    @property
    def version(self) -> str:
        """Version of the weights in the model."""
        return self._batcher.version

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self._batcher.model.device

    def start(self) -> None:
        """Start the thread, which loads the model and then runs requests."""
        threading.Thread(target=self._run, name="scheduler", daemon=True).start()

    def call(self, function: Callable[[Batcher], T]) -> Future[T]:
        """Run `function` between two steps; calls run in order of arrival."""
        future: Future[T] = _new_future()

        def task() -> None:
            try:
                result = function(self._batcher)
            except Refused as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._put(task)
        return future

    def generate(
        self, requests: Sequence[GenerateRequest], stream: Stream | None = None
    ) -> Future[list[Sample]]:
        """Queue these requests; the future is set when the last one has ended.

        With a `stream` it is set once they are queued: the samples then grow until each has a
        finish reason.
        """
        future: Future[list[Sample]] = _new_future()

        def task() -> None:
            try:
                self._admit(requests, future, stream)
            except Refused as error:
                future.set_exception(error)

        self._put(task)
        return future

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stop decoding."""
        return self.call(lambda batcher: self._finish(batcher.pause(mode)))

    def abort(self, request_ids: Sequence[str] | None) -> Future[None]:
        """End these requests, or all."""
        return self.call(lambda batcher: self._finish(batcher.abort(request_ids)))

    def load_weights(self, folder: Path, version: str | None, *, flush: bool) -> Future[str]:
        """Load new weights: now if paused, otherwise when the running requests have ended.

        No request is admitted meanwhile. The result is a message for the log. The future raises
        `Refused` or `CorruptWeights` if the old weights stay.
        """
        return self._update_soon(lambda: read_weights(folder), version, flush)

    def load_tensors(
        self, tensors: Mapping[str, Tensor], version: str | None, *, flush: bool
    ) -> Future[str]:
        """As `load_weights`, with tensors that were received already."""
        return self._update_soon(lambda: tensors, version, flush)

    def _update_soon(
        self, read: Callable[[], Mapping[str, Tensor]], version: str | None, flush: bool
    ) -> Future[str]:
        update = _Update(read, version, flush, _new_future())
        self._put(lambda: self._updates.append(update))
        return update.future

    # --- the thread ---

    def _run(self) -> None:
        try:
            torch.set_num_threads(self._threads)
            self._batcher = self._load()
            self.ready.set()
            while True:
                self._run_once()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    def _run_once(self) -> None:
        batcher = self._batcher
        while self._tasks:
            self._tasks.popleft()()
        start_s = time.time()
        name: ActivityName
        counts: dict[str, float] = {}
        if self._updates and (batcher.paused or not batcher.running):
            self._update(self._updates.popleft())
            name = "load_weights"
        elif not batcher.paused and (batcher.running or (batcher.waiting and not self._updates)):
            before, decoding = _totals(batcher), len(batcher.running)
            ended = batcher.step(admit=not self._updates)
            self._finish(ended)
            self._notify_streams()
            counts = {what: total - before[what] for what, total in _totals(batcher).items()}
            counts["steps"] = 1
            if not counts["prompt_tokens"]:
                name = "decode"
            else:
                name = "prefill_and_decode" if decoding else "prefill"
        else:
            released = bool(batcher.released)
            with self._wake:
                while not self._tasks:
                    self._wake.wait()
            name = "paused" if batcher.paused else "idle"
            if released:
                name = "released"
        self.activity.add(name, start_s, time.time(), counts)

    def _put(self, task: Callable[[], None]) -> None:
        with self._wake:
            self._tasks.append(task)
            self._wake.notify()

    def _admit(
        self,
        requests: Sequence[GenerateRequest],
        future: Future[list[Sample]],
        stream: Stream | None,
    ) -> None:
        seen = set(self._batch_of)
        for request in requests:
            self._batcher.check(request)
            if request.request_id in seen:
                raise Refused(f"request id {request.request_id!r} is already in use")
            seen.add(request.request_id)
        samples = [self._batcher.add(request) for request in requests]
        batch = _Batch(samples, len(samples), future, stream)
        if stream is not None:
            self._streams.append(stream)
            future.set_result(samples)
        for request in requests:
            self._batch_of[request.request_id] = batch

    def _finish(self, ended: Sequence[Sample]) -> None:
        for sample in ended:
            batch = self._batch_of.pop(sample.request.request_id)
            batch.unfinished -= 1
            if batch.stream is not None:
                batch.stream.progress()
                if batch.unfinished == 0:
                    self._streams.remove(batch.stream)
            elif batch.unfinished == 0:
                batch.future.set_result(batch.samples)

    def _notify_streams(self) -> None:
        for stream in self._streams:
            stream.steps += 1
            if stream.steps == 1 or stream.steps % stream.interval == 0:
                stream.progress()

    def _update(self, update: _Update) -> None:
        try:
            if update.flush:
                self._batcher.flush()  # refused before anything is read
            tensors = update.read()
            version = update.version or self._batcher.version
            self._batcher.replace_weights(tensors, version, flush=update.flush)
        except (Refused, CorruptWeights) as error:
            update.future.set_exception(error)
        else:
            update.future.set_result(f"weights of version {version} are in force")


def _totals(batcher: Batcher) -> dict[str, float]:
    """Counts since the start, by the names of `areal_lab.engines.embedded.activity`."""
    return {
        "sequences": batcher.generated_tokens,
        "context_tokens": batcher.context_tokens,
        "prompt_tokens": batcher.prompt_tokens,
        "prompt_pairs": batcher.prompt_pairs,
    }


def _new_future() -> Future[Any]:
    """A future that a waiter cannot cancel: if the client disconnects, the result is discarded."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future
