"""Incidents of a run besides its steps, from its log, and requests of a user."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import assert_never, get_args

from areal_lab.control import events as ev
from areal_lab.runlog.records import PIPELINE, Log, MetricRecord, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Incidents:
    """Counts of one run."""

    host_losses: int = 0
    """Hosts that did not reply to heartbeats, or that were restarted."""
    engine_losses: int = 0
    """Servers that died, hung, or had other weights than they were sent."""
    engine_restarts: int = 0
    """Servers that came back."""
    engines_added: int = 0
    """Servers that joined while the run continued (`rollout.scaling`)."""
    engines_retired: int = 0
    """Servers that left because they were not needed; their groups kept their tokens."""
    engine_start_failures: int = 0
    """Servers that were added but did not start."""
    resubmitted_samples: int = 0
    """Samples that continued on another server, or started over, after the loss of their server."""
    kept_tokens: int = 0
    """Tokens of these samples that were kept and not generated again."""
    discarded_tokens: int = 0
    """Tokens generated for nothing: the weights behind them are unknown, the workflow that
    requested them raised, or it requests others after a checkpoint."""
    recomputed_tokens: int = 0
    """Tokens, prompts included, whose keys and values were recomputed: after an interruption,
    and when a sample continued on another server."""
    version_mismatches: int = 0
    """Servers that reported another version or checksum than that of the weights they were sent."""


COUNTED = tuple(field.name for field in fields(Incidents))
"""Names of the counts, and of the metrics that carry them."""
_METRICS = frozenset((PIPELINE, name) for name in COUNTED)


def incidents(log: Log) -> Incidents:
    """Counts of a log, which may be incomplete."""
    counts = dict.fromkeys(COUNTED, 0)
    for record in log.records:
        if isinstance(record, MetricRecord) and (record.process, record.name) in _METRICS:
            counts[record.name] = whole(record.value)
    losses, returns = _count_logged_losses(log)
    # Metrics also count incidents before and after training, which are not events.
    counts["engine_losses"] = max(counts["engine_losses"], losses)
    counts["engine_restarts"] = max(counts["engine_restarts"], returns)
    return Incidents(**counts)


def _count_logged_losses(log: Log) -> tuple[int, int]:
    losses = returns = 0
    lost: set[ev.EngineId] = set()
    for record in log.events:
        match record.event:
            case ev.EngineLost(engine=engine):
                losses += engine not in lost  # the event comes again when it is given up
                lost.add(engine)
            case ev.EngineJoined(engine=engine):
                returns += engine in lost
                lost.discard(engine)
            case _:
                pass
    return losses, returns


def requests(log: Log) -> Iterator[tuple[float, ev.Request]]:
    """Each request, with its time in seconds since the start of the log."""
    return ((r.t_s, r.event) for r in log.events if isinstance(r.event, get_args(ev.Request)))


def in_words(request: ev.Request) -> str:
    """Short form of a request: `pause`, `resume`, `stop`, `eta 4`."""
    match request:
        case ev.PauseRequested():
            return "pause"
        case ev.ResumeRequested():
            return "resume"
        case ev.StopRequested():
            return "stop"
        case ev.EtaRequested(eta):
            return f"eta {eta:g}"
        case _ as never:
            assert_never(never)


def pauses(log: Log) -> list[tuple[float, float]]:
    """Start and end of each pause, in seconds since the start of the log.

    A pause without an end lasts until the log ends. A training step that ran when the pause was
    requested ends within it. A run that was killed in a pause continues without it.
    """
    found: list[tuple[float, float]] = []
    since_s: float | None = None
    for t_s, event in ((record.t_s, record.event) for record in log.events):
        match event:
            case ev.PauseRequested() if since_s is None:
                since_s = t_s
            case ev.ResumeRequested() | ev.StopRequested() | ev.RunStarted() if since_s is not None:
                found.append((since_s, t_s))
                since_s = None
            case _:
                pass
    if since_s is not None:  # it is paused now, or lost its engines
        finished = [record.t_s for record in log.actions if isinstance(record.action, ev.Finish)]
        found.append((since_s, finished[-1] if finished else max(since_s, log.end_s)))
    return found
