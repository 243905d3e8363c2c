"""Wait for a process that may be hung: with patience while it computes, or waits for a CPU."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, TypeVar

from areal_lab.host.process_groups import members

Result = TypeVar("Result")

_LOOK_S: Final = 0.5
"""Between two looks at a process that says nothing."""
_BUSY_SHARE: Final = 0.05
"""Of a time: threads that only wait now and then whether there is work use less of a CPU."""
_STARVED_SHARE: Final = 0.5


async def unless_silent(
    work: Coroutine[Any, Any, Result],
    over: Callable[[float, float, bool], bool],
    busy: Callable[[], bool] = lambda: False,
    *,
    limit_s: float,
) -> Result:
    """What `work` returns or raises, unless the process that it waits for is silent for too long.

    Args:
        over: returns whether a silence is over its limit (`control.liveness.Silence.passed`).

    Raises:
        TimeoutError: the silence is over its limit; `work` was canceled.
    """
    loop = asyncio.get_running_loop()
    working = asyncio.create_task(work)
    look_s = limit_s / math.ceil(limit_s / _LOOK_S)
    began_s = loop.time()
    try:
        while not (await asyncio.wait({working}, timeout=look_s))[0]:
            now_s = loop.time()
            if over(now_s - began_s, look_s, busy()):
                raise TimeoutError
            began_s = now_s
        return working.result()
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


def computes(group: int) -> Callable[[], bool]:
    """Tells whether a process group has computed, or waited for a CPU, since it was last asked."""
    return _since(group, lambda computed, waited: computed + waited >= _BUSY_SHARE)


def starves(group: int) -> Callable[[], bool]:
    """Tells whether a process group has mostly waited for a CPU since it was last asked."""
    return _since(group, lambda _, waited: waited >= _STARVED_SHARE)


def _since(group: int, true: Callable[[float, float], bool]) -> Callable[[], bool]:
    """Tells whether something is true of the shares of the time since it was last asked.

    Not the first time: most waits end before, and need not read what takes half a millisecond.
    """
    seen: tuple[float, float, float] | None = None

    def look() -> bool:
        nonlocal seen
        before, seen = seen, (time.monotonic(), *_cpu_s(group))
        if before is None:
            return False
        passed_s, computed_s, waited_s = (b - a for a, b in zip(before, seen, strict=True))
        return passed_s > 0 and true(computed_s / passed_s, waited_s / passed_s)

    return look


def _cpu_s(group: int) -> tuple[float, float]:
    """Seconds that the threads of a process group have computed, and have waited for a CPU.

    Zeros where the kernel does not say (`CONFIG_SCHED_INFO`).
    """
    computed_ns = waited_ns = 0
    for process in members(group):
        for file in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
            try:
                computed, waited, _ = file.read_text().split()
            except (OSError, ValueError):
                continue  # it has ended
            computed_ns, waited_ns = computed_ns + int(computed), waited_ns + int(waited)
    return computed_ns / 1e9, waited_ns / 1e9
