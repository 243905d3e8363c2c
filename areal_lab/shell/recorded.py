"""Run folder during a run: pid file, replies to requests, sinks, summary.json and pictures.

    enter --> body of the run --> summary.json --> pictures --> sinks end, their reports --> leave
                    '-- error --> summary.json with the error --> sinks end at once -------> leave

A run stops writing once another process has continued it (`host.claim`).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from areal_lab.config.offline import RunConfig
from areal_lab.host.claim import RunTaken
from areal_lab.live.mailbox import open_mailbox
from areal_lab.live.presence import Present
from areal_lab.runlog.folder import RunFolder
from areal_lab.shell.display import Display
from areal_lab.shell.requests import Submit, only_stop, replying
from areal_lab.shell.step_report import StepReport
from areal_lab.shell.stop import STOPPING, StopSignal
from areal_lab.sinks.start import Sinks, add_to_summary

Failure = Callable[[float], Mapping[str, Any]]
"""Makes the summary of a run that failed after these seconds, without its status and error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Actions of a command at the end of its run."""

    draw: Callable[[Path], object]
    """Draws the pictures into the run folder."""
    pictures: str
    """Names of the pictures, for the display."""
    failure: Failure


@dataclass(slots=True)
class RecordedRun:
    """A run folder that this process writes, with the display and the sinks of the run."""

    config: RunConfig
    folder: RunFolder
    display: Display
    sinks: Sinks
    summary: dict[str, Any] = field(default_factory=dict[str, Any])
    """The content of summary.json; the body of the run sets it."""
    began_s: float = field(default_factory=time.monotonic)

    def complete(self, ending: Ending) -> None:
        """Write the summary, draw, and end the sinks."""
        try:
            self.folder.write_json("summary.json", self.summary)
            if self.config.plots:
                self.display.phase(f"drawing {ending.pictures}")
                ending.draw(self.folder.path)
        except BaseException:
            self._close_sinks(at_once=True)
            raise
        self._close_sinks()

    def fail(self, error: BaseException, ending: Ending) -> None:
        """Write the summary of a run that `error` ended, and end the sinks.

        A failure of this method is shown and does not replace the error.

        Raises:
            RunTaken: another process has continued the run; `error` may be a consequence.
        """
        cancelled = isinstance(error, asyncio.CancelledError | KeyboardInterrupt)
        try:
            self.summary = {
                **ending.failure(time.monotonic() - self.began_s),
                "status": "stopped at once" if cancelled else "failed",
                "error": str(error) or type(error).__name__,
            }
            self.folder.write_json("summary.json", self.summary)
        except RunTaken:
            pass  # raised again below, once the sinks have ended
        except Exception as problem:
            reason = str(problem) or type(problem).__name__
            self.display.note(f"summary.json was not written: {reason}")
        self._close_sinks(at_once=True)

    @property
    def taken(self) -> bool:
        """True once another process has continued the run."""
        return self.folder.claim is not None and self.folder.claim.taken

    def _close_sinks(self, *, at_once: bool = False) -> None:
        reports = self.sinks.close(at_once=at_once)
        self.folder.check_claim()
        try:
            add_to_summary(self.folder.path, reports)
        except (OSError, ValueError) as error:
            self.display.note(f"summary.json has no reports of sinks: {error}")
        if reports:
            self.summary["sinks"] = reports


@contextmanager
def entered(folder: Path, display: Display) -> Iterator[tuple[Display, Present]]:
    """Claim a run folder; yields a display that also writes phases to the pid file."""
    open_mailbox(folder)
    present = Present(folder)
    present.enter("starting")
    try:
        yield _Recorded(display, present), present
    finally:
        # Errors of a full disk or of another process's claim must not hide the reason of the end.
        with suppress(OSError, RunTaken):
            present.leave()


@asynccontextmanager
async def recorded(
    config: RunConfig,
    folder: RunFolder,
    display: Display,
    ending: Ending,
    stop: StopSignal,
    *,
    submit: Submit | None = None,
) -> AsyncIterator[RecordedRun]:
    """Record the body of a run in its folder; drawing and closing do not block the event loop.

    Args:
        config: settings of the run.
        folder: run folder.
        display: shows the progress.
        ending: actions at the end of the run.
        stop: requests an orderly end, which the body has to watch.
        submit: executes or refuses requests from other processes; None accepts only a stop.

    Raises:
        RunTaken: another process has continued the run.
        BaseException: the error of the body.
    """
    with entered(folder.path, display) as (shown, present):
        async with _attended(folder.path, present, shown, stop, submit):
            run = _record(config, folder, shown, present)
            try:
                yield run
            except BaseException as error:
                await asyncio.to_thread(run.fail, error, ending)
                raise
            await asyncio.to_thread(run.complete, ending)


@contextmanager
def recorded_here(
    config: RunConfig, folder: RunFolder, display: Display, ending: Ending, stop: StopSignal
) -> Iterator[RecordedRun]:
    """Record a run without an event loop as `recorded` does; a thread replies to requests."""
    over = StopSignal()

    async def attend() -> None:
        async with _attended(folder.path, present, shown, stop):
            await over.wait()

    with entered(folder.path, display) as (shown, present):
        attending = threading.Thread(
            target=lambda: asyncio.run(attend()), name="requests", daemon=True
        )
        attending.start()
        try:
            run = _record(config, folder, shown, present)
            try:
                yield run
            except BaseException as error:
                run.fail(error, ending)
                raise
            run.complete(ending)
        finally:
            over.request()
            attending.join()


@asynccontextmanager
async def _attended(
    folder: Path,
    present: Present,
    display: Display,
    stop: StopSignal,
    submit: Submit | None = None,
) -> AsyncIterator[None]:
    """Reply to requests, and show a stop request, during the block."""

    async def announce() -> None:
        await stop.wait()
        display.note(STOPPING)

    announcing = asyncio.create_task(announce(), name="stop")
    try:
        async with replying(folder, present.key, submit or only_stop(stop), display.note):
            yield
    finally:
        announcing.cancel()


def _record(
    config: RunConfig, folder: RunFolder, display: Display, present: Present
) -> RecordedRun:
    claimed = replace(folder, claim=present.claim)
    return RecordedRun(config, claimed, display, Sinks(config, folder.path, display.note))


@dataclass(frozen=True, slots=True)
class _Recorded:
    """Display that also writes phases to the pid file, for other processes."""

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
