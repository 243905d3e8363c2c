"""The writer and reader of events.jsonl; every line is written before the run continues.

    with EventLog(path, header, clock=time.time) as log: log.event(e); log.action(a); ...

Arguments are in seconds since the epoch, as processes measure them; lines are in seconds since
`header.started_at`. Lines are unbuffered: a killed process loses at most the line it was writing,
which `read_log_file` skips and reports.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from areal_lab.control.events import Action, EngineId, Event, GroupId
from areal_lab.host.claim import Claim
from areal_lab.runlog.activity import PAUSED, TRAINERS_TURN
from areal_lab.runlog.records import (
    ActionRecord,
    EventRecord,
    GroupRecord,
    Log,
    MetricRecord,
    Record,
    RunHeader,
    SpanRecord,
    TurnTimes,
    encode,
    read_log,
)

SPAN_CAUSES = {"paused": PAUSED, "released": TRAINERS_TURN}
"""Names of spans that are idle time, with the cause that they stand for."""
UNEXPLAINED = "idle"
"""Spans of this name are not written: the cause of idleness follows from events and actions."""


class EventLog:
    """Appends records to one file; closes it at the end of a `with` block.

    Everything that writes raises `RunTaken` once the run is another process's.
    """

    def __init__(
        self,
        path: Path,
        header: RunHeader,
        *,
        clock: Callable[[], float],
        claim: Claim | None = None,
    ) -> None:
        """Create the file and write its header.

        Args:
            clock: seconds since the epoch; called for events and actions.
            claim: of this process to the run's folder.

        Raises:
            FileExistsError: if there is a log already; one file holds one run.
        """
        self._started_at = header.started_at
        self._clock, self._claim = clock, claim
        self._last_s = 0.0
        self._file: BinaryIO = path.open("xb", buffering=0)
        self._write(header)

    @classmethod
    def continued(
        cls, path: Path, *, clock: Callable[[], float], claim: Claim | None = None
    ) -> EventLog:
        """Append to the log of a run that continues.

        Its time continues where the log ends, so that it has no gap in which nothing ran.

        Raises:
            OSError, ValueError: if the log cannot be read.
        """
        log = object.__new__(cls)
        log._last_s = read_log_file(path).end_s
        log._started_at = clock() - log._last_s
        log._clock, log._claim = clock, claim
        log._file = path.open("ab", buffering=0)
        return log

    def event(self, event: Event) -> None:
        """Record that the coordinator receives `event` now."""
        self._write(EventRecord(self._now_s(), event))

    def action(self, action: Action) -> None:
        """Record that the coordinator returned `action` now."""
        self._write(ActionRecord(self._now_s(), action))

    def span(
        self,
        process: str,
        name: str,
        start_s: float,
        end_s: float,
        args: Mapping[str, float] | None = None,
        *,
        cause: str | None = None,
    ) -> None:
        """Record an activity of a process from `start_s` to `end_s`, in seconds since the epoch.

        Args:
            name: of the activity; `load_weights` is written as `load weights`.
            cause: why the process was idle in this time; None takes it from `SPAN_CAUSES`.
        """
        if name == UNEXPLAINED:
            return
        begin_s = self._since_start(start_s)
        self._write(
            SpanRecord(
                process=process,
                name=name.replace("_", " "),
                t_s=begin_s,
                end_s=max(begin_s, self._since_start(end_s)),
                cause=SPAN_CAUSES.get(name, "") if cause is None else cause,
                args=args or {},
            )
        )

    def group(
        self,
        *,
        group: GroupId,
        engine: EngineId,
        start_s: float,
        generated_s: float,
        end_s: float,
        samples: Sequence[Mapping[str, Any]],
        turns: Sequence[TurnTimes] = (),
    ) -> None:
        """Record a group that ended, trained on or not; times are seconds since the epoch.

        Args:
            group: its number.
            engine: on which it started.
            start_s: when it started.
            generated_s: when its last sample ended on an engine.
            end_s: when it was scored.
            samples: one mapping per sample with `segments` ([version, tokens] pairs), `reward` and
                `finish_reason`, and perhaps its `outcome`.
            turns: of samples with several.
        """
        begin_s = self._since_start(start_s)
        done_s = max(begin_s, self._since_start(generated_s))
        self._write(
            GroupRecord(
                group=group,
                engine=engine,
                t_s=begin_s,
                generated_s=done_s,
                end_s=max(done_s, self._since_start(end_s)),
                rewards=tuple(float(sample["reward"]) for sample in samples),
                segments=tuple(
                    tuple((version, tokens) for version, tokens in sample["segments"])
                    for sample in samples
                ),
                finish_reasons=tuple(str(sample["finish_reason"]) for sample in samples),
                turns=tuple(
                    turn._replace(
                        start_s=self._since_start(turn.start_s),
                        end_s=self._since_start(turn.end_s),
                    )
                    for turn in turns
                ),
                outcomes=tuple(str(one["outcome"]) for one in samples if "outcome" in one),
            )
        )

    def metric(self, process: str, name: str, value: float) -> None:
        """Record one number, such as `peak_rss_bytes` of a process."""
        self._write(MetricRecord(process=process, name=name, t_s=self._now_s(), value=value))

    def close(self) -> None:
        """Close the file; nothing can be recorded afterwards."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _write(self, record: Record) -> None:
        if self._claim is not None:
            self._claim.check()
        # One write call per line, so that readers never see parts of two lines mixed.
        self._file.write(encode(record).encode() + b"\n")

    def _now_s(self) -> float:
        # The wall clock may be set back; times in the log must not decrease.
        self._last_s = max(self._last_s, self._since_start(self._clock()))
        return self._last_s

    def _since_start(self, epoch_s: float) -> float:
        # Microseconds: the resolution of the trace viewer, and half the digits of a float.
        return round(max(0.0, epoch_s - self._started_at), 6)


def read_log_file(path: Path) -> Log:
    """Read a log, also one that is still being written or whose writer was killed.

    Raises:
        ValueError: naming the line that cannot be read.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8", errors="replace") as file:
        return read_log(file)
