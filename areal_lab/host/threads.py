"""Wait for something that blocks for long, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

Result = TypeVar("Result")


async def in_own_thread(work: Callable[[], Result]) -> Result:
    """What `work` returns or raises.

    The threads of `asyncio.to_thread` are few: waits of hours, one for each process, would leave
    none for what is quick. If the caller is cancelled, the thread continues, and keeps no program
    from ending.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def tell(result: Result | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # of `work`

    def run() -> None:
        try:
            told: tuple[Result | None, BaseException | None] = work(), None
        except BaseException as raised:  # the caller's
            told = None, raised
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, *told)

    threading.Thread(target=run, name="wait", daemon=True).start()
    return await future
