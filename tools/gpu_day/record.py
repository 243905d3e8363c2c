"""Record facts as JSON lines, time work on a device, and list where the host waits for it.

    check --> {"part": "train", "fact": "train step", "t_s": 31.2, ..., "step_s": 4.1}   measured
          --> {"part": "train", "fact": "train step", ..., "failed": "TypeError: ..."}   went on
          --> {"part": "train", "fact": "train step", ..., "skipped": "budget of 240 s"} not begun

`simulator.calibrate.gpu_day` reads these lines.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TextIO

import torch

PROJECT: Final = Path(__file__).parents[2]
_WAIT: Final = "synchronizing CUDA operation"
"""In torch's warning, if `torch.cuda.set_sync_debug_mode` asks for it."""
_MOST_TEXT: Final = 400


class DeviceLost(RuntimeError):
    """An error after which the device computes nothing more in this process."""


class Day:
    """The facts of one part: where it measures, how long it may, what it found."""

    def __init__(
        self,
        part: str,
        *,
        device: torch.device,
        tiny: bool,
        budget_s: float,
        out: TextIO | None = None,
    ) -> None:
        """Begin a part.

        Args:
            tiny: shapes that a CPU computes in seconds.
            budget_s: checks that would begin later are skipped.
            out: a file for the lines, besides standard output.
        """
        self.part, self.device, self.tiny, self.budget_s = part, device, tiny, budget_s
        self.facts = self.failed = self.skipped = 0
        self._out = out
        self._start_s = time.perf_counter()

    @property
    def cuda(self) -> bool:
        """True on a GPU."""
        return self.device.type == "cuda"

    @property
    def spent_s(self) -> float:
        """Seconds since the part began."""
        return time.perf_counter() - self._start_s

    def say(self, fact: str, **values: Any) -> None:
        """Write a line."""
        shared = {"part": self.part, "fact": fact, "t_s": round(self.spent_s, 1)}
        line = json.dumps({**shared, **values}, default=str)
        print(line, flush=True)
        if self._out is not None:
            self._out.write(line + "\n")
            self._out.flush()

    def check(self, fact: str, measure: Callable[[], Mapping[str, Any]], **about: Any) -> None:
        """Measure one fact; what goes wrong is written, and the part goes on.

        Raises:
            DeviceLost: the device no longer computes.
        """
        if self.spent_s > self.budget_s:
            self.skipped += 1
            self.say(fact, **about, skipped=f"budget of {self.budget_s:g} s")
            return
        named = ", ".join(f"{name} {value}" for name, value in about.items())
        print(f"[{self.spent_s:.0f} s] {self.part}: {fact} {named}", file=sys.stderr, flush=True)
        try:
            values = measure()
        except Exception as error:
            self.failed += 1
            self.say(fact, **about, failed=_one_line(error), where=project_line(error))
        else:
            self.facts += 1
            self.say(fact, **about, **values)
        self._give_back()

    def _give_back(self) -> None:
        """Free the memory of a check for the next one."""
        gc.collect()
        if not self.cuda:
            return
        try:
            self.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError as error:
            raise DeviceLost(_one_line(error)) from error

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object], *, repeats: int = 10, warmup: int = 3) -> float:
        """Median seconds of `work`: on a GPU between two events, else on the host."""
        if self.tiny:
            repeats, warmup = 2, 1
        for _ in range(warmup):
            work()
        self.synchronize()
        return statistics.median(self._once(work) for _ in range(repeats))

    def _once(self, work: Callable[[], object]) -> float:
        if not self.cuda:
            return self.wall_s(work)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        self.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def wall_s(self, work: Callable[[], object]) -> float:
        """Seconds on the host until the device has done `work`."""
        self.synchronize()
        start_s = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - start_s

    @contextmanager
    def peak(self) -> Iterator[Callable[[], int | None]]:
        """Yield a function that returns the most bytes allocated since; None on a CPU."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        yield lambda: torch.cuda.max_memory_allocated(self.device) if self.cuda else None


@contextmanager
def host_waits() -> Iterator[list[str]]:
    """Collect the lines of this project from which the host waits for a GPU.

    torch reports copies and reads of values, not `synchronize` and not what other libraries do.
    """
    found: list[str] = []

    def show(message: Warning | str, *rest: Any, **more: Any) -> None:
        if _WAIT in str(message):
            found.append(_innermost(traceback.extract_stack()))
        else:
            shown(message, *rest, **more)

    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=f".*{_WAIT}")
        shown, warnings.showwarning = warnings.showwarning, show
        before = torch.cuda.get_sync_debug_mode() if torch.cuda.is_available() else None
        if before is not None:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            if before is not None:
                torch.cuda.set_sync_debug_mode(before)


def project_line(error: BaseException) -> str:
    """The innermost line of this project on the way to an error."""
    return _innermost(traceback.extract_tb(error.__traceback__))


def _innermost(stack: traceback.StackSummary) -> str:
    for frame in reversed(stack):
        with suppress(ValueError):
            place = Path(frame.filename).relative_to(PROJECT)
            if place != Path(__file__).relative_to(PROJECT) and place.parts[0][0] != ".":
                return f"{place}:{frame.lineno}"
    return "outside of the project"


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:_MOST_TEXT]
