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
_IDLE_OBJECTS: Final = 20_000
"""New objects below which a pause is not worth a search."""
_BUSY_OBJECTS: Final = 250_000
"""New objects after which a search does not wait for a pause. It bounds their number, not the bytes
that they hold."""


@asynccontextmanager
async def collected_in_pauses(idle: Callable[[], bool]) -> AsyncIterator[None]:
    """Until the end of the block, search for cycles in pauses.

    For a process that does nothing but serve: objects that other code leaves in cycles, such as
    tensors, stay longer than they would.

    Args:
        idle: whether nothing waits for this process now.
    """
    was_enabled = gc.isenabled()
    frozen = gc.get_freeze_count()
    gc.collect()
    gc.freeze()  # modules stay
    gc.disable()
    task = asyncio.create_task(_collect(idle, was_enabled))
    try:
        yield
    finally:
        task.cancel()
        if not frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()
        await asyncio.wait((task,))  # so that it does not enable a later block's collection


async def _collect(idle: Callable[[], bool], was_enabled: bool) -> None:
    kept = 0
    try:
        while True:
            await asyncio.sleep(_LOOK_S)
            # Those made less those freed since the last search.
            new = gc.get_count()[0]
            # What is kept is searched again when it has grown: during calls by a quarter, which is
            # Python's own rule, in a pause by a twentieth.
            if new > max(_BUSY_OBJECTS, kept // 4) or (
                new > max(_IDLE_OBJECTS, kept // 20) and idle()
            ):
                gc.collect()
                kept = len(gc.get_objects())
    finally:
        if was_enabled:  # also if it fails: nothing else would search
            gc.enable()
