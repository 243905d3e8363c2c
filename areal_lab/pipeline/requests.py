"""What is asked of a run while it continues, and the run's replies.

mailbox --take--> Desk.ask --Asked--> drive --> Coordinator: an event, or a reason why not
        <-reply-- "paused", "eta is 4 (was 2)" <--'

before training   requests wait for its beginning; what will be refused is refused at once
during training   the coordinator decides
after training    only a stop is accepted: it leaves out the held-out evaluation
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import assert_never

from areal_lab.control.coordinator import Coordinator
from areal_lab.control.events import (
    EtaRequested,
    Event,
    PauseRequested,
    Request,
    ResumeRequested,
    StopRequested,
)
from areal_lab.host.claim import Claim, RunTaken
from areal_lab.live.mailbox import LOOK_EVERY_S, Inbox, Letter, open_mailbox
from areal_lab.live.presence import Present
from areal_lab.pipeline.drive import Asked
from areal_lab.pipeline.progress import Display
from areal_lab.pipeline.state import StopSignal
from areal_lab.pipeline.step_report import StepReport
from areal_lab.runlog.by_hand import in_words

_TRAINING_IS_OVER = "training is over"


@dataclass(frozen=True, slots=True)
class Reply:
    """What became of a request."""

    done: bool
    text: str
    """What the run does now, or why it cannot do what was asked."""


@dataclass(slots=True)
class Desk:
    """Takes the requests of one run to its coordinator; lives on the run's event loop."""

    coordinator: Coordinator
    stop: StopSignal
    _events: asyncio.Queue[Event | Asked] | None = None
    _early: list[Request] = field(default_factory=list)
    _open: set[asyncio.Future[Reply]] = field(default_factory=set)
    _over: bool = False

    def begin(self, events: asyncio.Queue[Event | Asked]) -> None:
        """Training begins: pass on what was asked before, and then everything at once."""
        self._events = events
        for request in self._early:
            events.put_nowait(Asked(request))

    def end(self) -> None:
        """Training is over, and nobody reads `events` any more."""
        self._over, self._events = True, None
        for answer in self._open:
            if not answer.done():
                answer.set_result(Reply(False, _TRAINING_IS_OVER))

    async def ask(self, request: Request) -> Reply:
        """Have it done, or learn why not; returns when the coordinator has decided."""
        if isinstance(request, StopRequested):
            was = self.stop.requested
            self.stop.request()
            when = "already" if was else "now" if self._over else "after the running step"
            return Reply(True, f"the run stops {when}")
        if self._over:
            return Reply(False, _TRAINING_IS_OVER)
        if self._events is None:
            return self._keep(request)
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

        def decided(reason: str | None) -> None:
            if answer.done():
                return  # whoever waited was cancelled
            done = _done(request, self.coordinator)
            answer.set_result(Reply(True, done) if reason is None else Reply(False, reason))

        self._open.add(answer)
        self._events.put_nowait(Asked(request, decided))
        try:
            return await answer
        finally:
            self._open.discard(answer)

    def _keep(self, request: Request) -> Reply:
        if (reason := self.coordinator.refusal(request)) is not None:
            return Reply(False, reason)
        self._early.append(request)
        return Reply(True, "this will be done when training begins")


def make_reachable(folder: Path) -> None:
    """Let requests be sent to a run of this process before its event loop runs."""
    open_mailbox(folder)
    Present(folder).enter("starting")


@asynccontextmanager
async def reachable(
    folder: Path, desk: Desk, display: Display
) -> AsyncIterator[tuple[Display, Claim]]:
    """The run is alive and answers requests; yields a display that also records the phases, and
    the claim of this process to the folder."""
    present = Present(folder)
    open_mailbox(folder)
    present.enter("starting")
    inbox = Inbox(folder, present.key)
    letters = asyncio.create_task(answer_letters(inbox, desk, display.note), name="requests")
    try:
        yield _Recorded(display, present), present.claim
    finally:
        letters.cancel()
        (error,) = await asyncio.gather(letters, return_exceptions=True)
        if not isinstance(error, asyncio.CancelledError):
            display.note(f"requests to this run were not answered: {error!r}")
        # Neither a full disk nor another process's claim may replace the reason of the end.
        with suppress(OSError, RunTaken):
            present.leave()


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A display whose phases other processes can read."""

    display: Display
    present: Present

    def phase(self, text: str) -> None:
        with suppress(OSError):
            self.present.phase(text)
        self.display.phase(text)

    def step(self, report: StepReport) -> None:
        self.display.step(report)

    def note(self, text: str) -> None:
        self.display.note(text)


async def answer_letters(inbox: Inbox, desk: Desk, note: Callable[[str], None]) -> None:
    """Look into the mailbox until cancelled; a mailbox that cannot be read does not end the run."""
    readable = True
    while True:
        try:
            for letter in inbox.take():
                await _answer_letter(letter, inbox, desk, note)
            readable = True
        except OSError as error:
            if readable:
                note(f"requests to this run cannot be read: {error}")
            readable = False
        await asyncio.sleep(LOOK_EVERY_S)


async def _answer_letter(
    letter: Letter, inbox: Inbox, desk: Desk, note: Callable[[str], None]
) -> None:
    reply = await desk.ask(letter.request)
    note(f"asked by {letter.sender}: {in_words(letter.request)} ({reply.text})")
    inbox.reply(letter.id, reply.text, done=reply.done)


def _done(request: Request, coordinator: Coordinator) -> str:
    """What the run does, by its state just before it handles the request."""
    match request:
        case PauseRequested():
            return "the run is paused" + (" already" if coordinator.paused else "")
        case ResumeRequested():
            return "the run continues" if coordinator.paused else "the run was not paused"
        case EtaRequested(eta):
            was = coordinator.limits.schedule.eta
            return f"eta is {eta:g}" + ("" if eta == was else f" (was {was:g})")
        case StopRequested():
            return "the run stops"
        case _ as never:
            assert_never(never)
