"""The scheduler: the one thread that owns the model, running steps and requests of HTTP handlers.

    handler --call(function)--> queue --> thread: function() | step() | load  --> future --> handler

An error that one request causes fails this request (`Batcher.step`). If nothing can be computed any
more, or weights were loaded in part, the process exits with the traceback in its log, so a broken
engine never looks busy.

Activity spans of the engine, for the timeline of a run; seconds since the epoch.

Steps are short and many, so adjacent ones of the same activity and similar batch size are merged:
hours take a few thousand spans. Their counts are added up, so that costs can be fitted to them:

    steps           forward passes
    sequences       sampled tokens: the running sequences, summed over the steps
    context_tokens  tokens whose keys and values were read, summed over sequences and steps
    prompt_tokens   tokens computed, not copied, for prompts and interrupted responses
    prompt_pairs    (query, key) pairs of their attention
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from areal_lab.engines.embedded.batcher import Batcher, Refused, Sample
from areal_lab.engines.protocol import GenerateRequest, PauseMode, described
from areal_lab.engines.weights.folder import CorruptWeights, read_weights
from areal_lab.host.processes import log_exception

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
        """Device of the model."""
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
            except Exception as error:  # for the caller
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
            except Exception as error:
                log_exception()
                future.set_exception(Refused(f"the request failed: {described(error)}"))

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
            log_exception()
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
        samples = self._batcher.add_all(requests)
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
                failed = next((one.error for one in batch.samples if one.error), None)
                if failed is None:
                    batch.future.set_result(batch.samples)
                else:
                    batch.future.set_exception(Refused(failed))

    def _notify_streams(self) -> None:
        for stream in self._streams:
            stream.steps += 1
            if stream.steps == 1 or stream.steps % stream.interval == 0:
                stream.progress()

    def _update(self, update: _Update) -> None:
        try:
            if update.flush:
                self._batcher.flush()  # refused before anything is read
            try:
                tensors = update.read()
            except CorruptWeights:
                raise
            except Exception as error:
                what = f"the weights cannot be read: {described(error)}"
                raise CorruptWeights(what) from error
            version = update.version or self._batcher.version
            self._batcher.replace_weights(tensors, version, flush=update.flush)
        except (Refused, CorruptWeights) as error:
            update.future.set_exception(error)
        else:
            update.future.set_result(f"weights of version {version} are in force")


def _totals(batcher: Batcher) -> dict[str, float]:
    """Counts since the start, by the names in this module."""
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


ActivityName: TypeAlias = Literal[
    "prefill", "decode", "prefill_and_decode", "paused", "idle", "load_weights", "released"
]

JOIN_GAP_S = 0.02
"""Adjacent spans closer than this are merged; shorter idle times are not recorded."""
KEPT_SPANS = 200_000

_NO_COUNTS: Mapping[str, float] = MappingProxyType({})


@dataclass(slots=True)
class ActivitySpan:
    """A stretch of one activity."""

    id: int
    name: ActivityName
    start_s: float
    end_s: float
    counts: dict[str, float] = field(default_factory=dict)
    """Counts by the names above."""

    def extends_with(self, name: ActivityName, counts: Mapping[str, float]) -> bool:
        """Return whether the activity extends this span instead of starting a new one: batches
        of 32 to 63 sequences count as one size, 16 to 31 as another.
        """
        return name == self.name and _batch_size(counts) == _batch_size(self.counts)


class ActivityLog:
    """Written by the scheduler's thread, read by HTTP handlers."""

    def __init__(self) -> None:
        self._spans: deque[ActivitySpan] = deque(maxlen=KEPT_SPANS)
        self._lock = threading.Lock()

    def add(
        self,
        name: ActivityName,
        start_s: float,
        end_s: float,
        counts: Mapping[str, float] = _NO_COUNTS,
    ) -> None:
        """Record a finished activity; `start_s` must not be before the end of the last one."""
        if name == "idle" and end_s - start_s < JOIN_GAP_S:
            return
        with self._lock:
            last = self._spans[-1] if self._spans else None
            near = last is not None and start_s - last.end_s < JOIN_GAP_S
            if last is not None and near and last.extends_with(name, counts):
                last.end_s = end_s
                for what, count in counts.items():
                    last.counts[what] += count
            else:
                number = last.id + 1 if last is not None else 0
                self._spans.append(ActivitySpan(number, name, start_s, end_s, dict(counts)))

    def since(self, first_id: int) -> list[ActivitySpan]:
        """Spans from this id on. The newest may still grow: request it again and replace it."""
        with self._lock:
            return [
                replace(span, counts=dict(span.counts))
                for span in self._spans
                if span.id >= first_id
            ]


def _batch_size(counts: Mapping[str, float]) -> int:
    """Sequences per step, as the exponent of a power of two."""
    return int(counts.get("sequences", 0) / counts.get("steps", 1)).bit_length()
