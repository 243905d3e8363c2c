"""What a person asked of a run while it continued, from its log: pauses, changes of eta, a stop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never, get_args

from areal_lab.control.events import (
    EtaRequested,
    Finish,
    PauseRequested,
    Request,
    ResumeRequested,
    RunStarted,
    StopRequested,
)
from areal_lab.runlog.records import Log


def requests(log: Log) -> Iterator[tuple[float, Request]]:
    """Each request, with its time in seconds since the start of the log."""
    return ((r.t_s, r.event) for r in log.events if isinstance(r.event, get_args(Request)))


def in_words(request: Request) -> str:
    """A request in a word or two: `pause`, `resume`, `stop`, `eta 4`."""
    match request:
        case PauseRequested():
            return "pause"
        case ResumeRequested():
            return "resume"
        case StopRequested():
            return "stop"
        case EtaRequested(eta):
            return f"eta {eta:g}"
        case _ as never:
            assert_never(never)


def pauses(log: Log) -> list[tuple[float, float]]:
    """Start and end of each pause, in seconds since the start of the log.

    A pause without an end yet lasts until the log ends. A training step that ran when the pause was
    requested ends within it. A run that was killed in a pause continues without it.
    """
    found: list[tuple[float, float]] = []
    since_s: float | None = None
    for t_s, event in ((record.t_s, record.event) for record in log.events):
        match event:
            case PauseRequested() if since_s is None:
                since_s = t_s
            case ResumeRequested() | StopRequested() | RunStarted() if since_s is not None:
                found.append((since_s, t_s))
                since_s = None
            case _:
                pass
    if since_s is not None:  # it is paused now, or lost its engines
        finished = [record.t_s for record in log.actions if isinstance(record.action, Finish)]
        found.append((since_s, finished[-1] if finished else max(since_s, log.end_s)))
    return found


def eta_changes(log: Log) -> list[tuple[float, float]]:
    """When eta was changed, in seconds since the start of the log, and to what."""
    return [(t_s, asked.eta) for t_s, asked in requests(log) if isinstance(asked, EtaRequested)]
