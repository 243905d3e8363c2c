"""Search for cycles of objects while a server has nothing to do, instead of in the middle of calls.

Python searches after a number of new objects. Those of some hundred calls in flight set that off
several times a second, and each search through everything that is kept holds up all calls for up to
0.2 s, while reference counts free nearly all objects without it.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

_LOOK_S: Final = 1.0
_WORTH_IT: Final = 20_000
"""New objects below which no search is worth its time."""
_MOST: Final = 250_000
"""New objects after which it does not wait for a pause: some 50 MB if all of them are in cycles."""


@asynccontextmanager
async def collected_in_pauses(idle: Callable[[], bool]) -> AsyncIterator[None]:
    """Until the end of the block, search for cycles in pauses.

    For a process that does nothing but serve: objects that other code leaves in cycles, such as
    tensors, stay longer than they would.

    Args:
        idle: whether nothing waits for this process now.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()  # modules stay
    gc.disable()
    task = asyncio.create_task(_collect(idle))
    try:
        yield
    finally:
        task.cancel()
        if was_enabled:
            gc.enable()


async def _collect(idle: Callable[[], bool]) -> None:
    kept = 0
    while True:
        await asyncio.sleep(_LOOK_S)
        # Those made less those freed since the last search.
        new = gc.get_count()[0]
        # As Python does: what is kept is not searched again until it has grown by a quarter.
        if new > max(_MOST, kept // 4) or (new > _WORTH_IT and idle()):
            gc.collect()
            kept = len(gc.get_objects())
