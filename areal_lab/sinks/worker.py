"""The process of one sink: follows a run folder until the run ends, then closes the sink.

    python -m areal_lab.sinks.worker RUN wandb 20

The end of standard input, by `close` or by the death of the run's process, is the end of the run.
The process then has the given seconds to send the rest; then it ends itself, with all processes
that the tool has started. It reports on standard output, one JSON object a line; the tool's output
goes to standard error, which is a log file.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from areal_lab.config.sections import SinkName
from areal_lab.host.claim import claim_of
from areal_lab.sinks.protocol import PICTURES, Points, RunFacts, Sink

_LOOK_S: Final = 0.5
_NICE: Final = 10
CLASSES: Final[Mapping[SinkName, str]] = {
    "tensorboard": "TensorBoardSink",
    "wandb": "WandbSink",
    "swanlab": "SwanLabSink",
    "trackio": "TrackioSink",
}


@dataclass(slots=True)
class Status:
    """Report of a worker."""

    where: str = ""
    points: int = 0
    """Points that the tool accepted."""
    failures: int = 0
    """Failed calls of the tool."""
    error: str = ""
    """First error."""
    closed: bool = False


class Following:
    """Pass a run to a sink; failures are counted, and never stop it.

    `open_sink` creates the sink; `report` receives each status.
    """

    def __init__(
        self, points: Points, open_sink: Callable[[], Sink], report: Callable[[Status], None]
    ) -> None:
        self.status = Status()
        self._points = points
        self._report = report
        self._last_step = 0
        self._sink: Sink | None = None
        self._tried(partial(self._open, open_sink))
        report(self.status)

    def _open(self, open_sink: Callable[[], Sink]) -> None:
        self._sink = open_sink()
        self.status.where = self._sink.where

    def send(self) -> None:
        """Send new points."""
        sink = self._sink
        if sink is None:
            return
        before = self.status.points
        for point in self._points.new():
            self._last_step = max(self._last_step, point.step)
            self.status.points += self._tried(partial(sink.log, point))
        if self.status.points != before:
            self._report(self.status)

    def end(self, folder: Path) -> None:
        """Send the rest, the pictures and the summary, and close the sink."""
        self.send()
        sink = self._sink
        if sink is None:
            return
        for name in PICTURES:
            if (file := folder / name).is_file():
                self._tried(partial(sink.picture, file.stem, file, self._last_step))
        summary: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            summary = json.loads((folder / "summary.json").read_text())
        failed = not summary or "error" in summary
        self.status.closed = self._tried(lambda: sink.close(summary, failed=failed))
        self._report(self.status)

    def _tried(self, call: Callable[[], object]) -> bool:
        try:
            call()
        except BaseException as error:  # SystemExit, too: some tools raise it
            self.status.failures += 1
            if not self.status.error:
                reason = str(error).strip().split("\n", 1)[0]
                self.status.error = f"{type(error).__name__}: {reason}"[:300]
                self._report(self.status)
            return False
        return True


def facts_of(folder: Path, sink: SinkName) -> RunFacts:
    """The run of a folder, with the options of a sink."""
    yaml: Any = importlib.import_module("yaml")  # by name, because it has no types
    file = folder / "config.yaml"
    config: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return RunFacts(
        folder=folder,
        config=config,
        options=config["stats_logger"][sink],
        began_s=file.stat().st_mtime,
    )


def _open(facts: RunFacts, sink: SinkName) -> Sink:
    module = importlib.import_module(f"areal_lab.sinks.{sink}")
    opened: Sink = getattr(module, CLASSES[sink])(facts)
    return opened


def _end_after(seconds: float) -> None:
    """End this process and all that it started."""

    def end() -> None:
        os.killpg(os.getpgid(0), signal.SIGKILL)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def main(folder: Path, sink: SinkName, close_s: float) -> None:
    """Follow the run; see the module's docstring."""
    os.nice(_NICE)
    reports = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    run_ended = threading.Event()

    def watch_run() -> None:
        with suppress(OSError):
            sys.stdin.buffer.read()
        run_ended.set()
        _end_after(close_s)

    threading.Thread(target=watch_run, name="run", daemon=True).start()

    def report(status: Status) -> None:
        with suppress(OSError, ValueError):  # the run is gone
            print(json.dumps(asdict(status)), file=reports, flush=True)

    facts = facts_of(folder, sink)
    points = Points(folder)
    following = Following(points, lambda: _open(facts, sink), report)
    claim = claim_of(folder)
    while not run_ended.wait(_LOOK_S) and not claim.taken:
        following.send()
    run_ended.wait()
    if not claim.taken:  # else the sink of the process that continued the run sends the rest
        following.end(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))  # type: ignore[arg-type]
