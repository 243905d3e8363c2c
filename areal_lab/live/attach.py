"""A live run as an object, in any process: inspect it, pause it, change eta, stop it.

    run = attach_run("runs/arithmetic-20261101-120000")
    print(run.snapshot())                 training; step 7 of 30; waits for 3 of 8 groups for step 8
    run.pause(), run.set_eta(4), run.resume(), run.stop()
    run.read().steps                      everything recorded so far, as frames

Several processes may attach to one run; it handles requests in the order in which they reach its
folder.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from areal_lab.config.given import given_path
from areal_lab.control.events import (
    EtaRequested,
    PauseRequested,
    Request,
    ResumeRequested,
    StopRequested,
)
from areal_lab.host.foreign import parse_json
from areal_lab.host.processes import last_lines
from areal_lab.live.mailbox import Exchange, RunEnded, ask, exchanges
from areal_lab.live.presence import FILE, Presence, read_presence
from areal_lab.live.snapshot import Follower, Snapshot
from areal_lab.runlog.appended import read_appended
from areal_lab.runlog.read_run import METRICS, RecordedRun, events_file, read_run, read_summary
from areal_lab.runlog.records import Log

REPLY_S: Final = 10.0
"""Longest wait for the reply to a request; a run replies within half a second, except while it
loads a model."""
_LOOK_FOR_END_S: Final = 0.1
OUTPUT: Final = Path("logs/run.log")
"""Standard output and error of a run that was started in a separate process."""


class AttachedRun:
    """A run that another process may have started. Methods may be called from any thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._follower = Follower(folder / "events.jsonl")
        self._recorded: RecordedRun | None = None
        self._lock = threading.Lock()

    @property
    def alive(self) -> bool | None:
        """True if the run's process is running; None if its machine cannot be seen from this one.

        Determined by its process (id and start time), not by a file that a killed run leaves
        behind.
        """
        presence = read_presence(self.folder)
        return False if presence is None else presence.alive

    def snapshot(self) -> Snapshot:
        """Return the current state of the run and the reason why it waits."""
        presence = read_presence(self.folder)
        with self._lock:
            self._follower.refresh()
            return self._snapshot(presence)

    def pause(self, *, timeout_s: float = REPLY_S) -> str:
        """Start nothing new, and interrupt generation, until `resume`; nothing is lost.

        A running training step ends first. Returns the run's reply once it has accepted the
        request.

        Args:
            timeout_s: longest wait for the reply.

        Raises:
            RequestRefused: the run cannot pause now, for example while it ends; it continues.
            RunEnded: the run has ended.
            TimeoutError: no reply in time; the run may still pause later.
        """
        return self._ask(PauseRequested(), timeout_s)

    def resume(self, *, timeout_s: float = REPLY_S) -> str:
        """Continue after `pause`, which describes arguments and errors."""
        return self._ask(ResumeRequested(), timeout_s)

    def set_eta(self, eta: float, *, timeout_s: float = REPLY_S) -> str:
        """Admit groups under another staleness bound from now on; see `pause`.

        Groups that were admitted under a higher bound stay, so a lower bound limits the lag once
        these are trained on. Refused for schedules with a fixed eta, and above the `max_lag` of a
        waiting batch order.

        Args:
            eta: in versions, >= 0; infinity is unbounded.
            timeout_s: longest wait for the reply.
        """
        return self._ask(EtaRequested(float(eta)), timeout_s)

    def stop(self, *, timeout_s: float = REPLY_S) -> str:
        """End after the running step, which is saved, even if the run is paused; see `pause`."""
        return self._ask(StopRequested(), timeout_s)

    def read(self) -> RecordedRun:
        """Everything recorded so far; only new records are read again.

        Raises:
            ValueError: there is no log yet, or it cannot be read.
        """
        with self._lock:
            recorded = self._recorded
            self._recorded = read_run(self.folder) if recorded is None else recorded.refresh()
            return self._recorded

    def log_until_now(self) -> Log:
        """The log so far; if the run is alive, it lasts until now.

        Raises:
            ValueError: there is no log yet, or it cannot be read.
        """
        log = self.read().log
        if self.alive is False:
            return log
        # Not since its start: the time between a kill and its continuation is in no log.
        written_s = events_file(self.folder).stat().st_mtime
        return log.lasting(log.end_s + max(0.0, time.time() - written_s))

    def asked(self) -> list[Exchange]:
        """Return the requests to the run so far: by whom, when, and the replies."""
        return exchanges(self.folder)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the run has ended; returns whether it has.

        Args:
            timeout_s: None waits without a limit.
        """
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while self.alive is not False:
            if until_s is not None and time.monotonic() >= until_s:
                return False
            time.sleep(_LOOK_FOR_END_S)
        return True

    def __repr__(self) -> str:
        return f"<run {self.folder.name}: {self.snapshot()}>"

    def _ask(self, request: Request, timeout_s: float) -> str:
        presence = read_presence(self.folder)
        if presence is None:
            raise RunEnded(f"{self.folder} has no {FILE}: the run is older than requests to runs")
        return ask(
            self.folder, presence.key, request, timeout_s=timeout_s, alive=lambda: self.alive
        )

    def _snapshot(self, presence: Presence | None) -> Snapshot:
        alive = False if presence is None else presence.alive
        summary = _summary(self.folder)
        ended = bool(summary) or (presence is not None and presence.ended)
        error = str(summary.get("error") or "")
        if alive is False and not (error or ended) and (self.folder / OUTPUT).is_file():
            error = last_lines(self.folder / OUTPUT, 1).strip()  # it was killed
        return self._follower.snapshot(
            alive=alive,
            ended=ended,
            phase="" if presence is None else presence.phase,
            status=str(summary.get("status", "")),
            error=error,
            step=_last_step(self.folder),
        )


def _last_step(folder: Path) -> int | None:
    """Step of the last line of metrics of a run without an event log; None before the first one."""
    file = folder / METRICS
    if (folder / "events.jsonl").exists() or not file.is_file():
        return None
    with suppress(OSError, ValueError, LookupError, TypeError):  # somebody else's file
        return int(parse_json(read_appended(file).lines[-1])["step"])
    return None


def attach_run(folder: str | Path) -> AttachedRun:
    """Attach to a run that may run in another process, or has ended.

    Raises:
        ValueError: in one line: the folder does not exist, or is not a run folder.
    """
    path = given_path(folder, "folder")
    if not path.is_dir():
        raise ValueError(f"{folder} is not a folder (looked in {Path.cwd()})")
    if not ((path / FILE).is_file() or (path / "events.jsonl").is_file()):
        raise ValueError(f"{folder} is not a run folder: it has no {FILE} and no events.jsonl")
    return AttachedRun(path.resolve())


def live_runs(parent: str | Path = "runs") -> list[AttachedRun]:
    """Runs below `parent` that are alive, or may be alive on another machine; newest first.

    Args:
        parent: the `run_dir` of the runs; a missing folder has none.
    """
    found: list[tuple[float, AttachedRun]] = []
    for file in given_path(parent, "parent").glob(f"*/{FILE}"):
        try:
            presence = read_presence(file.parent)
        except ValueError:
            continue
        if presence is not None and presence.alive is not False:
            found.append((presence.started_s, AttachedRun(file.parent.resolve())))
    return [run for _, run in sorted(found, key=lambda item: -item[0])]


def _summary(folder: Path) -> dict[str, Any]:
    try:
        return read_summary(folder)
    except ValueError:
        return {}
