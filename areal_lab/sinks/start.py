"""Sinks of a run, from the run's side: check, start, report the first failure, close.

    start --> a process for each sink <--reads-- run folder
    close --> the end of their input --> wait, at most `stats_logger.close_timeout_s` --> reports

Nothing here waits for a sink before `close`, and no failure of a sink reaches the run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from areal_lab.config.offline import RunConfig
from areal_lab.config.problem import Kind, Problem
from areal_lab.config.sections import SinkName
from areal_lab.extras import MissingExtra, require
from areal_lab.host.durable import replace_text
from areal_lab.host.processes import inherited_environment
from areal_lab.sinks.protocol import Points
from areal_lab.sinks.worker import Status

AT_ONCE_S: Final = 5.0
"""Longest wait for the sinks of a run that is stopped immediately."""


def check_sinks(config: RunConfig) -> Iterator[Problem]:
    """Problems: sinks without their packages, and sinks that are named twice."""
    for sink in dict.fromkeys(config.sinks):
        if config.sinks.count(sink) > 1:
            yield Problem(Kind.SETTINGS, "sinks", f"sinks names {sink!r} twice; name it once")
        try:
            require(f"sinks={sink}", sink)
        except MissingExtra as error:
            yield Problem(Kind.SETTINGS, "sinks", str(error))


@dataclass(slots=True)
class _Process:
    name: SinkName
    process: subprocess.Popen[bytes]
    reader: threading.Thread
    status: Status = field(default_factory=Status)


class Sinks:
    """The sinks of one run.

    `note` reports to the user where a sink is, and its first failure; called from other threads.
    """

    def __init__(self, config: RunConfig, folder: Path, note: Callable[[str], None]) -> None:
        self._folder = folder
        self._note = note
        self._close_s = config.stats_logger.close_timeout_s
        self._failed: dict[SinkName, Status] = {}
        self._processes: list[_Process] = []
        self._closed: dict[str, dict[str, Any]] | None = None
        for sink in config.sinks:
            try:
                self._start(sink)
            except OSError as error:  # no more processes, a full disk
                self._failed[sink] = Status(failures=1, error=str(error))
                note(f"{sink} gets nothing: {error}; the run continues")

    def close(self, *, at_once: bool = False) -> dict[str, dict[str, Any]]:
        """Let the sinks send the rest and stop them; returns the report of each. Idempotent.

        Waits at most `stats_logger.close_timeout_s`, or 5 s if `at_once`, for all together.
        """
        if self._closed is not None:
            return self._closed
        until_s = time.monotonic() + (min(AT_ONCE_S, self._close_s) if at_once else self._close_s)
        for one in self._processes:
            assert one.process.stdin is not None, "a pipe"
            with suppress(OSError):
                one.process.stdin.close()
        for one in self._processes:
            with suppress(subprocess.TimeoutExpired):
                one.process.wait(max(0.0, until_s - time.monotonic()))
            _end(one.process)
            one.reader.join(timeout=1.0)
        reports: dict[str, dict[str, Any]] = {}
        reports |= {name: self._report(status) for name, status in self._failed.items()}
        reports |= {one.name: self._report(one.status) for one in self._processes}
        self._closed = reports
        return reports

    def _report(self, status: Status) -> dict[str, Any]:
        missing = max(0, Points(self._folder).left() - status.points)
        return {**asdict(status), "missing_points": missing}

    def _start(self, sink: SinkName) -> None:
        with (self._folder / "logs" / f"sink-{sink}.log").open("ab") as log:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "areal_lab.sinks.worker"),
                    *(str(self._folder), sink, str(self._close_s)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**inherited_environment(), "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C is for the run, which then closes its sinks
            )
        started = _Process(sink, process, threading.Thread(name=f"sink {sink}", daemon=True))
        started.reader = threading.Thread(
            target=self._read, args=(started,), name=f"sink {sink}", daemon=True
        )
        started.reader.start()
        self._processes.append(started)

    def _read(self, one: _Process) -> None:
        assert one.process.stdout is not None, "a pipe"
        with one.process.stdout as reports:
            self._follow(one, reports)

    def _follow(self, one: _Process, reports: IO[bytes]) -> None:
        for line in reports:
            before, one.status = one.status, Status(**json.loads(line))
            if one.status.error and not before.error:
                log = self._folder / "logs" / f"sink-{one.name}.log"
                self._note(
                    f"{one.name} failed and the run continues: {one.status.error} (see {log})"
                )
            elif one.status.where and not before.where:
                self._note(f"{one.name}: {one.status.where}")


def add_to_summary(folder: Path, reports: dict[str, dict[str, Any]]) -> None:
    """Add the reports of sinks to summary.json, if it exists."""
    file = folder / "summary.json"
    if not reports or not file.is_file():
        return
    summary = json.loads(file.read_text())
    replace_text(file, json.dumps({**summary, "sinks": reports}, indent=2) + "\n")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process group of a sink: the tool may have started processes."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
