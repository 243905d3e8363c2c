"""An asyncio event loop whose clock jumps: waiting takes no time, and a deadlock is an error."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class JumpingSelector(selectors.SelectSelector):
    """Instead of sleeping until the next timer, sets the clock to it."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("everybody waits, and nothing is left that could happen")
            self.now_s += timeout
        return ready


def run_virtually(main: Coroutine[Any, Any, Result]) -> Result:
    """Run `main` from 0 s on; it may take hours."""
    selector = JumpingSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now_s  # type: ignore[method-assign]
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main)
