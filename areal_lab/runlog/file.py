"""Writer and reader of events.jsonl; every line is written before the run continues.

    with EventLog(path, header, clock=time.time) as log: log.event(e); log.action(a); ...

Arguments are in seconds since the epoch, as processes measure them; lines are in seconds since
`header.started_at`. Lines are unbuffered: a killed process loses at most the line it was writing,
which `read_log_file` skips and reports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from areal_lab.control.events import Action, EngineId, Event, GroupId
from areal_lab.host.claim import Claim
from areal_lab.host.durable import Lines
from areal_lab.runlog.activity import PAUSED, TRAINERS_TURN
from areal_lab.runlog.appended import read_appended
from areal_lab.runlog.lags import LoggedLedger
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
"""Names of spans that are idle time, with their causes."""
UNEXPLAINED = "idle"
"""Spans of this name are not written: the cause of idleness follows from events and actions."""


class EventLog:
    """Append records to one file; closes it at the end of a `with` block.

    Every write raises `RunTaken` once another process has the run.
    """

    def __init__(
        self,
        path: Path,
        header: RunHeader,
        *,
        clock: Callable[[], float],
        claim: Claim | None = None,
    ) -> None:
        """Create the file and write its header."""
        self._started_at = header.started_at
        self._clock, self._claim = clock, claim
        self._last_s = 0.0
        self.ledger = LoggedLedger()
        """What became of the tokens so far, and the lags of the newest batch."""
        self._file = Lines(path, new=True)
        self._write(header)

    @classmethod
    def continued(
        cls, path: Path, *, clock: Callable[[], float], claim: Claim | None = None
    ) -> EventLog:
        """Append to the log of a continued run; an incomplete last line is removed.

        Its time continues where the log ends, so the log has no gap in which nothing ran.
        """
        log = object.__new__(cls)
        before = read_log_file(path)
        log._last_s = before.end_s
        log.ledger = LoggedLedger()
        for record in before.records:
            log.ledger.add(record)
        log._started_at = clock() - log._last_s
        log._clock, log._claim = clock, claim
        log._file = Lines(path)
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

        `cause` is the reason of idle time; None takes it from `SPAN_CAUSES`.
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

        `samples` has one mapping per sample with `segments` ([version, tokens] pairs), `reward`,
        `finish_reason`, and optionally `outcome`.
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
        self._file.append(encode(record).encode() + b"\n")
        self.ledger.add(record)

    def _now_s(self) -> float:
        # The wall clock may be set back; times in the log must not decrease.
        self._last_s = max(self._last_s, self._since_start(self._clock()))
        return self._last_s

    def _since_start(self, epoch_s: float) -> float:
        # Microseconds: the resolution of the trace viewer, and half the digits of a float.
        return round(max(0.0, epoch_s - self._started_at), 6)


def read_log_file(path: Path) -> Log:
    """Read a log, also one that is still being written or whose writer was killed."""
    found = read_appended(path)
    return replace(read_log(found.lines, last_is_whole=True), cut=found.cut)
