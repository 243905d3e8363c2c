"""Replies of a running training to requests from other processes.

mailbox --take--> submit(request) --> Reply  of train: `pipeline.requests.ControlChannel`
        <-reply-- "the run stops"            of others: `only_stop`
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from areal_lab.control.events import Request, StopRequested
from areal_lab.live.mailbox import LOOK_EVERY_S, Inbox, Letter, open_mailbox
from areal_lab.live.presence import Present
from areal_lab.runlog.incidents import in_words
from areal_lab.shell.stop import StopSignal

AFTER_STEP: Final = "after the running step"


@dataclass(frozen=True, slots=True)
class Reply:
    """Result of a request, with a text for the sender."""

    done: bool
    text: str
    """Effect of the request, or the reason of a refusal."""


Submit: TypeAlias = Callable[[Request], Awaitable[Reply]]
"""Executes or refuses a request."""


def stop_run(stop: StopSignal, when: str = AFTER_STEP) -> Reply:
    """Request the stop of a run; the reply says when it stops."""
    was = stop.requested
    stop.request()
    return Reply(True, f"the run stops {'already' if was else when}")


def only_stop(stop: StopSignal) -> Submit:
    """Make the `Submit` of a run without rollouts and staleness bound: it accepts only a stop."""

    async def submit(request: Request) -> Reply:
        if isinstance(request, StopRequested):
            return stop_run(stop)
        return Reply(False, f"this run can be stopped only; it has no {in_words(request)}")

    return submit


def make_reachable(folder: Path) -> None:
    """Make a run of this process accept requests before its event loop starts."""
    open_mailbox(folder)
    Present(folder).enter("starting")


@asynccontextmanager
async def replying(
    folder: Path, key: str, submit: Submit, note: Callable[[str], None]
) -> AsyncIterator[None]:
    """Reply to requests during the block.

    Args:
        folder: run folder.
        key: key of the running process, from its pid file.
        submit: executes or refuses requests.
        note: shows requests and replies.
    """
    letters = asyncio.create_task(
        reply_to_letters(Inbox(folder, key), submit, note), name="requests"
    )
    try:
        yield
    finally:
        letters.cancel()
        (error,) = await asyncio.gather(letters, return_exceptions=True)
        if not isinstance(error, asyncio.CancelledError):
            note(f"the run stopped replying to requests: {error!r}")


async def reply_to_letters(inbox: Inbox, submit: Submit, note: Callable[[str], None]) -> None:
    """Read and reply to requests until cancelled; a read error does not end the run."""
    readable = True
    while True:
        try:
            for letter in inbox.take():
                await _reply(letter, inbox, submit, note)
            readable = True
        except OSError as error:
            if readable:
                note(f"requests to this run cannot be read: {error}")
            readable = False
        await asyncio.sleep(LOOK_EVERY_S)


async def _reply(letter: Letter, inbox: Inbox, submit: Submit, note: Callable[[str], None]) -> None:
    reply = await submit(letter.request)
    note(f"request of {letter.sender}: {in_words(letter.request)} ({reply.text})")
    inbox.reply(letter.id, reply.text, done=reply.done)
