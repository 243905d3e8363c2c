"""What is asked before, during and after training, and what the run replies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from areal_lab.control.coordinator import Coordinator, Limits
from areal_lab.control.events import (
    EtaRequested,
    Event,
    PauseRequested,
    Request,
    ResumeRequested,
    RunStarted,
    StopRequested,
)
from areal_lab.control.schedule import asynchronous, synchronous
from areal_lab.live.attach import attach_run
from areal_lab.live.mailbox import REQUESTS
from areal_lab.live.presence import read_presence
from areal_lab.pipeline.drive import Asked
from areal_lab.pipeline.progress import Silent
from areal_lab.pipeline.requests import Desk, Reply, make_reachable, reachable
from areal_lab.pipeline.state import StopSignal


def limits(schedule: Any = None) -> Limits:
    return Limits(batch_groups=2, max_in_flight=4, schedule=schedule or asynchronous(1))


async def training(desk: Desk) -> None:
    """A run that handles what it is asked, and does nothing else."""
    events: asyncio.Queue[Event | Asked] = asyncio.Queue()
    desk.coordinator.handle(RunStarted((0,)))
    desk.begin(events)
    while True:
        asked = await events.get()
        assert isinstance(asked, Asked)
        reason = desk.coordinator.refusal(asked.request)
        asked.answer(reason)
        if reason is None:
            desk.coordinator.handle(asked.request)


def in_a_loop(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(main())


def test_the_reply_says_what_the_run_does() -> None:
    async def main() -> None:
        desk = Desk(Coordinator(limits()), StopSignal())
        run = asyncio.create_task(training(desk))
        await asyncio.sleep(0)  # it begins
        conversation: list[tuple[Request, bool, str]] = [
            (PauseRequested(), True, "the run is paused"),
            (PauseRequested(), True, "the run is paused already"),
            (EtaRequested(4.0), True, "eta is 4 (was 1)"),
            (EtaRequested(4.0), True, "eta is 4"),
            (ResumeRequested(), True, "the run continues"),
            (ResumeRequested(), True, "the run was not paused"),
            (StopRequested(), True, "the run stops after the running step"),
            (StopRequested(), True, "the run stops already"),
        ]
        for request, done, text in conversation:
            assert await desk.ask(request) == Reply(done, text)
        refused = await desk.ask(EtaRequested(-1.0))
        assert (refused.done, "eta is -1" in refused.text) == (False, True)
        assert desk.stop.requested
        run.cancel()

    in_a_loop(main)


def test_what_is_asked_before_training_is_done_when_it_begins() -> None:
    async def main() -> None:
        desk = Desk(Coordinator(limits()), StopSignal())
        later = Reply(True, "this will be done when training begins")
        for request in (EtaRequested(3.0), PauseRequested()):
            assert await desk.ask(request) == later
        assert not (await desk.ask(EtaRequested(float("nan")))).done
        run = asyncio.create_task(training(desk))
        await asyncio.sleep(0)  # it begins
        assert await desk.ask(PauseRequested()) == Reply(True, "the run is paused already")
        assert desk.coordinator.limits.schedule.eta == 3
        run.cancel()

    in_a_loop(main)


def test_what_will_be_refused_is_refused_before_training() -> None:
    async def main() -> None:
        reply = await Desk(Coordinator(limits(synchronous())), StopSignal()).ask(EtaRequested(1.0))
        assert not reply.done
        assert "synchronous is eta 0" in reply.text

    in_a_loop(main)


def test_after_training_only_a_stop_is_accepted_and_nobody_waits_for_ever() -> None:
    async def main() -> None:
        desk = Desk(Coordinator(limits()), StopSignal())
        desk.begin(asyncio.Queue())  # nobody reads it: the run has just ended
        waiting = asyncio.create_task(desk.ask(PauseRequested()))
        await asyncio.sleep(0)
        desk.end()
        assert await waiting == Reply(False, "training is over")
        assert await desk.ask(ResumeRequested()) == Reply(False, "training is over")
        assert await desk.ask(StopRequested()) == Reply(True, "the run stops now")

    in_a_loop(main)


def test_a_request_before_the_event_loop_runs_is_answered_by_it(tmp_path: Path) -> None:
    notes: list[str] = []

    class Notes(Silent):
        def note(self, text: str) -> None:
            notes.append(text)

    make_reachable(tmp_path)
    run = attach_run(tmp_path)
    replies: list[str] = []

    async def main() -> None:
        asking = asyncio.create_task(asyncio.to_thread(run.pause))
        while not (tmp_path / REQUESTS).read_text():
            await asyncio.sleep(0)
        desk = Desk(Coordinator(limits()), StopSignal())
        async with reachable(tmp_path, desk, Notes()) as (display, _):
            display.phase("loading the model")
            replies.append(await asking)
            presence = read_presence(tmp_path)
            assert presence is not None
            assert (presence.alive, presence.phase) == (True, "loading the model")

    in_a_loop(main)
    assert replies == ["this will be done when training begins"]
    (note,) = notes
    assert note.startswith("asked by ")
    assert note.endswith(": pause (this will be done when training begins)")
    assert run.alive is False


def test_a_mailbox_that_cannot_be_read_does_not_end_the_run(tmp_path: Path) -> None:
    notes: list[str] = []

    class Notes(Silent):
        def note(self, text: str) -> None:
            notes.append(text)

    make_reachable(tmp_path)
    run = attach_run(tmp_path)

    async def main() -> None:
        desk = Desk(Coordinator(limits()), StopSignal())
        async with reachable(tmp_path, desk, Notes()):
            kept = (tmp_path / REQUESTS).rename(tmp_path / "kept")
            while not notes:
                await asyncio.sleep(0)
            kept.rename(tmp_path / REQUESTS)
            assert await asyncio.to_thread(run.stop) == "the run stops after the running step"
            assert desk.stop.requested

    in_a_loop(main)
    assert notes[0].startswith("requests to this run cannot be read")
    assert len(notes) == 2


def test_the_end_is_recorded_however_it_comes(tmp_path: Path) -> None:
    async def main() -> None:
        async with reachable(tmp_path, Desk(Coordinator(limits()), StopSignal()), Silent()):
            raise MemoryError

    with pytest.raises(MemoryError):
        in_a_loop(main)
    presence = read_presence(tmp_path)
    assert presence is not None
    assert presence.ended
