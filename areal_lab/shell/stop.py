"""Stop a run: after its step at the first Ctrl-C or SIGTERM, immediately at the second."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

STOPPING: Final = (
    "stopping after the running step, which is saved; press Ctrl-C again to stop at once"
)


@dataclass(slots=True)
class StopSignal:
    """Signal to finish the running step, save and end; any thread may call `request`."""

    _requested: bool = False
    _event: asyncio.Event | None = None
    _loop: asyncio.AbstractEventLoop | None = None

    def request(self) -> None:
        """Request the stop. Idempotent."""
        self._requested = True
        if self._loop is not None and self._event is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._event.set)

    @property
    def requested(self) -> bool:
        """True once a stop was requested."""
        return self._requested

    async def wait(self) -> None:
        """Return once a stop is requested."""
        if self._event is None:
            self._event, self._loop = asyncio.Event(), asyncio.get_running_loop()
        if self._requested:
            return
        await self._event.wait()


def stop_on_interrupt(
    stop: StopSignal,
    *,
    first: Callable[[], object] = lambda: None,
    again: Callable[[], object] | None = None,
) -> None:
    """Make Ctrl-C and SIGTERM stop the running task; call this on its event loop.

    Args:
        stop: requested at the first signal.
        first: called at the first signal.
        again: called at each further signal; None cancels the task.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "called from a coroutine"
    further = again or task.cancel

    def interrupt() -> None:
        repeated = stop.requested
        stop.request()
        (further if repeated else first)()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)


@contextmanager
def stopping_on_interrupt(stop: StopSignal) -> Iterator[None]:
    """Handle signals as `stop_on_interrupt` without an event loop: the second one raises
    `KeyboardInterrupt`."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        if stop.requested:
            signal.default_int_handler(number, frame)
        stop.request()

    with _handled_by(interrupt, signal.SIGINT, signal.SIGTERM):
        yield


@contextmanager
def ended_like_ctrl_c() -> Iterator[None]:
    """Handle SIGTERM as Ctrl-C during the block.

    Nothing changes outside of the main thread, or if the program handles SIGTERM itself.
    """
    if _in_main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        handler = signal.getsignal(signal.SIGINT)
        handler = handler if callable(handler) else signal.default_int_handler
        with _handled_by(handler, signal.SIGTERM):
            yield
    else:
        yield


@contextmanager
def _handled_by(
    handler: Callable[[int, FrameType | None], Any], *numbers: signal.Signals
) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, one in before.items() if _in_main_thread() else ():
            signal.signal(number, one)


def _in_main_thread() -> bool:
    """True where signals can be handled."""
    return threading.current_thread() is threading.main_thread()
