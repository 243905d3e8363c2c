"""Calls that block, in daemon threads: one each, so that one that hangs holds back no other."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any, Final

from areal_lab.agents.tools.box import ToolBroken

MOST_LEFT_BEHIND: Final = 32
"""Calls that may still run after their time limit."""


class Threads:
    """Daemon threads, one a call: one that hangs holds back neither others nor the end of a run."""

    def __init__(self, what: str) -> None:
        """Make none yet.

        Args:
            what: is called, for errors.
        """
        self._what = what
        self._left_behind: set[concurrent.futures.Future[Any]] = set()

    async def run(self, work: Callable[[], Any]) -> Any:
        """Perform a call in a thread of its own; cancelling leaves the thread behind.

        Raises:
            ToolBroken: too many calls before are still running.
            Exception: of the call.
        """
        if len(self._left_behind) >= MOST_LEFT_BEHIND:
            raise ToolBroken(
                f"{len(self._left_behind)} calls of {self._what} still run after their time limit; "
                "give it a time limit of its own, or make it async"
            )
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()
        done.set_running_or_notify_cancel()  # so that a caller that gives up does not cancel it
        threading.Thread(target=_perform, args=(done, work), name=self._what, daemon=True).start()
        waits = asyncio.wrap_future(done)
        try:
            return await waits
        except asyncio.CancelledError:
            if not done.done():
                self._left_behind.add(done)
                done.add_done_callback(self._left_behind.discard)
            raise


def _perform(done: concurrent.futures.Future[Any], work: Callable[[], Any]) -> None:
    try:
        value = work()
    except StopIteration as error:  # an awaiting coroutine cannot raise it
        done.set_exception(RuntimeError(repr(error)))
    except Exception as error:
        done.set_exception(error)
    except BaseException as error:  # SystemExit, too: it is not meant for the run
        done.set_exception(RuntimeError(f"it ended with {error!r}"))
    else:
        done.set_result(value)
