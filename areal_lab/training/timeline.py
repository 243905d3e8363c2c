"""Spans of a training step in the time of its device, and their names for profilers.

    span: event | work is queued | event   ...   the step's last wait --finish--> start_s, end_s

A GPU runs what the host has queued earlier: the host's clock around a forward pass measures its
launches. So a span on a GPU is a pair of events that the device records between its kernels. They
are read after the waits that a step has anyway (`training.step`); nothing waits for a span.

The clocks of host and device are related by the events alone. The device records an event at `d`
(seconds after the first event) and not before the host has queued it at `h`, so that the first
event happened at `max(h - d)` or later; an event that an idle device records makes this exact, and
the device is idle when a step begins.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from areal_lab.training.protocol import Span

T = TypeVar("T")


class _Mark(NamedTuple):
    """One end of a span."""

    host_s: float
    """Time at which the host queued the event, in seconds since the epoch."""
    event: Any = None
    """Event of the device; None takes the host's time."""


class _Queued(NamedTuple):
    """A span whose times are not read yet."""

    name: str
    start: _Mark
    end: _Mark
    args: dict[str, float]


@dataclass(slots=True)
class Timeline:
    """Spans of one step, in the order in which they ended."""

    device: torch.device
    profiled: bool = False
    """True if a torch profiler records, which then shows the spans, too."""
    _queued: list[_Queued] = field(default_factory=list[_Queued])

    @contextmanager
    def span(self, name: str, **args: float) -> Iterator[None]:
        """Time what the device does for the work inside. On a GPU it is an NVTX range, too."""
        start = self._mark()
        with self._record(name), _nvtx_range(self.device, name):
            yield
        self._queued.append(_Queued(name, start, self._mark(), args))

    @contextmanager
    def host_span(self, name: str, **args: float) -> Iterator[None]:
        """Time work of the host."""
        start = _Mark(time.time())
        with self._record(name), _nvtx_range(self.device, name):
            yield
        self._queued.append(_Queued(name, start, _Mark(time.time()), args))

    def finish(self) -> tuple[Span, ...]:
        """Read the times of all spans, after the step's last wait.

        The wait for the last event returns at once after a wait for the device. Only a step
        without any record of tokens has no such wait at its end.
        """
        events = [
            mark for queued in self._queued for mark in (queued.start, queued.end) if mark.event
        ]
        first_s = 0.0
        seconds: dict[int, float] = {}
        if events:
            events[-1].event.synchronize()
            first = events[0].event
            seconds = {id(mark.event): first.elapsed_time(mark.event) / 1e3 for mark in events}
            first_s = max(mark.host_s - seconds[id(mark.event)] for mark in events)

        def time_of(mark: _Mark) -> float:
            return first_s + seconds[id(mark.event)] if mark.event else mark.host_s

        return tuple(
            Span(one.name, time_of(one.start), time_of(one.end), one.args) for one in self._queued
        )

    def _mark(self) -> _Mark:
        if self.device.type == "cpu":
            return _Mark(time.time())
        event = torch.get_device_module(self.device).Event(enable_timing=True)
        host_s = time.time()
        event.record()
        return _Mark(host_s, event)

    def _record(self, name: str) -> AbstractContextManager[object]:
        return torch.profiler.record_function(name) if self.profiled else nullcontext()


@contextmanager
def _nvtx_range(device: torch.device, name: str) -> Iterator[None]:
    """Name the work inside in the timelines of NVIDIA's tools; nothing on other devices."""
    nvtx = None if device.type == "cpu" else getattr(torch.get_device_module(device), "nvtx", None)
    if nvtx is None:
        yield
        return
    nvtx.range_push(name)
    try:
        yield
    finally:
        nvtx.range_pop()


def record_profile(work: Callable[[], T], device: torch.device) -> tuple[T, bytes]:
    """Do some work under torch's profiler; returns its result, and the trace in Chrome's format
    (gzip), which Perfetto and `chrome://tracing` show.

    The profiler records the operations of the host and, on an NVIDIA or AMD GPU, the kernels. It
    makes the work slower, and waits for the device at the end.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        result = work()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json.gz"
        profile.export_chrome_trace(str(path))
        return result, path.read_bytes()
