"""Control channel of a running training: requests of users, and the replies to them.

mailbox --take--> ControlChannel.submit --UserRequest--> drive --> Coordinator: event or refusal
        <-reply-- "paused", "eta is 4 (was 2)" <-----------'

before training   valid requests are queued until training starts
during training   the coordinator decides
after training    only a stop is accepted, which skips the held-out evaluation
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
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
from areal_lab.pipeline.drive import UserRequest
from areal_lab.shell.requests import AFTER_STEP, Reply, stop_run
from areal_lab.shell.stop import StopSignal

_TRAINING_IS_OVER = "training is over"


@dataclass(slots=True)
class ControlChannel:
    """Control channel of one run, which passes requests to its coordinator.

    All methods run on the event loop of the run.
    """

    coordinator: Coordinator
    stop: StopSignal
    _events: asyncio.Queue[Event | UserRequest] | None = None
    _early: list[Request] = field(default_factory=list)
    _open: set[asyncio.Future[Reply]] = field(default_factory=set)
    _over: bool = False

    def begin(self, events: asyncio.Queue[Event | UserRequest]) -> None:
        """Start training: pass on the queued requests, and later ones immediately."""
        self._events = events
        for request in self._early:
            events.put_nowait(UserRequest(request))

    def end(self) -> None:
        """End training: refuse the open requests, because nothing reads `events` any more."""
        self._over, self._events = True, None
        for reply in self._open:
            if not reply.done():
                reply.set_result(Reply(False, _TRAINING_IS_OVER))

    async def submit(self, request: Request) -> Reply:
        """Submit a request; returns when the coordinator has accepted or refused it."""
        if isinstance(request, StopRequested):
            return stop_run(self.stop, "now" if self._over else AFTER_STEP)
        if self._over:
            return Reply(False, _TRAINING_IS_OVER)
        if self._events is None:
            return self._keep(request)
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

        def decided(reason: str | None) -> None:
            if reply.done():
                return  # the caller was cancelled
            done = _done(request, self.coordinator)
            reply.set_result(Reply(True, done) if reason is None else Reply(False, reason))

        self._open.add(reply)
        self._events.put_nowait(UserRequest(request, decided))
        try:
            return await reply
        finally:
            self._open.discard(reply)

    def _keep(self, request: Request) -> Reply:
        if (reason := self.coordinator.refusal(request)) is not None:
            return Reply(False, reason)
        self._early.append(request)
        return Reply(True, "queued until training starts")


def _done(request: Request, coordinator: Coordinator) -> str:
    """Describe the effect of a request, from the state just before the run handles it."""
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
