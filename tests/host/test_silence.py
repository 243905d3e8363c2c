"""Patience with processes: one that is busy or starved is waited for, one that hangs is not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from areal_lab.control.liveness import Silence
from areal_lab.host import silence
from areal_lab.host.silence import computes, starves, unless_silent

SPIN = "while True: pass"
SLEEP = "import time; time.sleep(1000)"


@contextmanager
def group(*programs: str) -> Iterator[int]:
    """A process group of Python programs."""
    first: subprocess.Popen[bytes] | None = None
    running = []
    for program in programs:
        joined = 0 if first is None else first.pid
        process = subprocess.Popen([sys.executable, "-c", program], process_group=joined)
        first = first or process
        running.append(process)
    assert first is not None
    try:
        yield first.pid
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        for process in running:
            process.wait()


def settled(look: Callable[[], bool], wanted: bool) -> None:
    """Ask until it is so; a hang is a failure."""
    look()
    ends_s = time.monotonic() + 30
    while look() is not wanted:
        assert time.monotonic() < ends_s
        time.sleep(0.2)


def test_a_group_computes_if_one_of_its_processes_does_and_not_once_it_is_stopped() -> None:
    with group(SLEEP, SPIN) as one:
        look = computes(one)
        settled(look, True)
        os.killpg(one, signal.SIGSTOP)
        settled(look, False)
        os.killpg(one, signal.SIGCONT)
        settled(look, True)
    with group(SLEEP) as one:
        settled(computes(one), False)


def test_a_process_starves_if_others_have_its_cpu() -> None:
    cpu = min(os.sched_getaffinity(0))
    pinned = f"import os; os.sched_setaffinity(0, {{{cpu}}}); {SPIN}".replace("; while", "\nwhile")
    with group(pinned) as one, group(*[pinned] * 5):
        settled(starves(one), True)
    with group(SLEEP) as one:
        settled(starves(one), False)


def test_silence_counts_only_while_the_process_is_idle_and_somebody_listens() -> None:
    quiet = Silence(20.0)
    assert [quiet.passed(0.5, 0.5, busy=False) for _ in range(40)] == [False] * 39 + [True]
    late = Silence(20.0)
    assert not late.passed(300.0, 0.5, busy=False), "our own delay is not the process's"
    assert (late.counted_s, late.late_s, late.total_s) == (1.0, 299.0, 300.0)
    busy = Silence(20.0)
    assert not any(busy.passed(0.5, 0.5, busy=True) for _ in range(399))
    assert busy.passed(0.5, 0.5, busy=True), "but not for ever"


def test_work_is_waited_for_while_the_process_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "_LOOK_S", 0.01)

    async def scenario() -> None:
        done = asyncio.Event()

        async def work() -> str:
            await done.wait()
            return "replied"

        looks = iter([True] * 8)

        def busy() -> bool:
            more = next(looks, None)
            if more is None:
                done.set()
            return bool(more)

        assert await unless_silent(work(), Silence(0.05).passed, busy, limit_s=0.05) == "replied"
        with pytest.raises(TimeoutError):
            await unless_silent(asyncio.sleep(60), Silence(0.05).passed, limit_s=0.05)

        async def blocks_us() -> str:
            time.sleep(0.2)  # as a long computation in the event loop
            await asyncio.sleep(0)
            return "replied"

        assert await unless_silent(blocks_us(), Silence(0.1).passed, limit_s=0.1) == "replied"

    asyncio.run(scenario())
