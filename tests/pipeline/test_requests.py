"""What is asked before, during and after training, and what the run replies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

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
from areal_lab.pipeline.drive import UserRequest
from areal_lab.pipeline.requests import ControlChannel
from areal_lab.shell.display import Silent
from areal_lab.shell.recorded import entered
from areal_lab.shell.requests import Reply, make_reachable, replying
from areal_lab.shell.stop import StopSignal


def limits(schedule: Any = None) -> Limits:
    return Limits(batch_groups=2, max_in_flight=4, schedule=schedule or asynchronous(1))


async def training(channel: ControlChannel) -> None:
    """A run that handles what it is asked, and does nothing else."""
    events: asyncio.Queue[Event | UserRequest] = asyncio.Queue()
    channel.coordinator.handle(RunStarted((0,)))
    channel.begin(events)
    while True:
        asked = await events.get()
        assert isinstance(asked, UserRequest)
        reason = channel.coordinator.refusal(asked.request)
        asked.reply(reason)
        if reason is None:
            channel.coordinator.handle(asked.request)


def in_a_loop(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(main())


def test_the_reply_says_what_the_run_does() -> None:
    async def main() -> None:
        channel = ControlChannel(Coordinator(limits()), StopSignal())
        run = asyncio.create_task(training(channel))
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
            assert await channel.submit(request) == Reply(done, text)
        refused = await channel.submit(EtaRequested(-1.0))
        assert (refused.done, "eta is -1" in refused.text) == (False, True)
        assert channel.stop.requested
        run.cancel()

    in_a_loop(main)


def test_what_is_asked_before_training_is_done_when_it_begins() -> None:
    async def main() -> None:
        channel = ControlChannel(Coordinator(limits()), StopSignal())
        later = Reply(True, "queued until training starts")
        for request in (EtaRequested(3.0), PauseRequested()):
            assert await channel.submit(request) == later
        assert not (await channel.submit(EtaRequested(float("nan")))).done
        run = asyncio.create_task(training(channel))
        await asyncio.sleep(0)  # it begins
        assert await channel.submit(PauseRequested()) == Reply(True, "the run is paused already")
        assert channel.coordinator.limits.schedule.eta == 3
        run.cancel()

    in_a_loop(main)


def test_what_will_be_refused_is_refused_before_training() -> None:
    async def main() -> None:
        reply = await ControlChannel(Coordinator(limits(synchronous())), StopSignal()).submit(
            EtaRequested(1.0)
        )
        assert not reply.done
        assert "synchronous is eta 0" in reply.text

    in_a_loop(main)


def test_after_training_only_a_stop_is_accepted_and_nobody_waits_for_ever() -> None:
    async def main() -> None:
        channel = ControlChannel(Coordinator(limits()), StopSignal())
        channel.begin(asyncio.Queue())  # nothing reads it: the run has just ended
        waiting = asyncio.create_task(channel.submit(PauseRequested()))
        await asyncio.sleep(0)
        channel.end()
        assert await waiting == Reply(False, "training is over")
        assert await channel.submit(ResumeRequested()) == Reply(False, "training is over")
        assert await channel.submit(StopRequested()) == Reply(True, "the run stops now")

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
        channel = ControlChannel(Coordinator(limits()), StopSignal())
        with entered(tmp_path, Notes()) as (display, present):
            async with replying(tmp_path, present.key, channel.submit, display.note):
                display.phase("loading the model")
                replies.append(await asking)
                presence = read_presence(tmp_path)
                assert presence is not None
                assert (presence.alive, presence.phase) == (True, "loading the model")

    in_a_loop(main)
    assert replies == ["queued until training starts"]
    (note,) = notes
    assert note.startswith("request of ")
    assert note.endswith(": pause (queued until training starts)")
    assert run.alive is False


def test_a_mailbox_that_cannot_be_read_does_not_end_the_run(tmp_path: Path) -> None:
    notes: list[str] = []

    class Notes(Silent):
        def note(self, text: str) -> None:
            notes.append(text)

    make_reachable(tmp_path)
    run = attach_run(tmp_path)

    async def main() -> None:
        channel = ControlChannel(Coordinator(limits()), StopSignal())
        with entered(tmp_path, Notes()) as (display, present):
            async with replying(tmp_path, present.key, channel.submit, display.note):
                kept = (tmp_path / REQUESTS).rename(tmp_path / "kept")
                while not notes:
                    await asyncio.sleep(0)
                kept.rename(tmp_path / REQUESTS)
                assert await asyncio.to_thread(run.stop) == "the run stops after the running step"
                assert channel.stop.requested

    in_a_loop(main)
    assert notes[0].startswith("requests to this run cannot be read")
    assert len(notes) == 2
