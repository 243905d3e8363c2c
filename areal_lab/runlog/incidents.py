"""Incidents of a run (lost engines, wrong versions) and their cost, counted from its log.

The pipeline writes its counts as metrics of the process `pipeline`; the newest of each name counts.
Losses and returns of engines are also events, which every log has.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from areal_lab.control.events import EngineId, EngineJoined, EngineLost
from areal_lab.runlog.records import PIPELINE, Log, MetricRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Incidents:
    """Counts of one run."""

    host_losses: int = 0
    """Hosts that did not reply to heartbeats, or that started again."""
    engine_losses: int = 0
    """Servers that died, hung, or held other weights than they were given."""
    engine_restarts: int = 0
    """Servers that came back."""
    engines_added: int = 0
    """Servers that joined while the run continued (`rollout.scaling`)."""
    engines_retired: int = 0
    """Servers that left because they were not needed; their groups kept their tokens."""
    engine_start_failures: int = 0
    """Servers that were to join and did not start."""
    resubmitted_samples: int = 0
    """Samples that continued on another server, or started over, when their server was lost."""
    kept_tokens: int = 0
    """Tokens of these samples that were kept and not generated again."""
    discarded_tokens: int = 0
    """Tokens generated and used for nothing: the weights behind them are unknown, the workflow that
    asked for them raised, or asks for others after a checkpoint."""
    recomputed_tokens: int = 0
    """Tokens, prompts included, whose keys and values were computed again: after an interruption,
    and when a sample continued on another server."""
    version_mismatches: int = 0
    """Servers that reported another version or checksum than that of the weights they were sent."""


COUNTED = tuple(field.name for field in fields(Incidents))
"""Names of the counts, and of the metrics that carry them."""
_METRICS = frozenset((PIPELINE, name) for name in COUNTED)


def incidents(log: Log) -> Incidents:
    """The counts of a log, which may be incomplete."""
    counts = dict.fromkeys(COUNTED, 0)
    for record in log.records:
        if isinstance(record, MetricRecord) and (record.process, record.name) in _METRICS:
            counts[record.name] = int(record.value)
    losses, returns = _count_logged_losses(log)
    # Metrics also count incidents before and after training, which are not events.
    counts["engine_losses"] = max(counts["engine_losses"], losses)
    counts["engine_restarts"] = max(counts["engine_restarts"], returns)
    return Incidents(**counts)


def _count_logged_losses(log: Log) -> tuple[int, int]:
    losses = returns = 0
    lost: set[EngineId] = set()
    for record in log.events:
        match record.event:
            case EngineLost(engine=engine):
                losses += engine not in lost  # the event comes again when it is given up
                lost.add(engine)
            case EngineJoined(engine=engine):
                returns += engine in lost
                lost.discard(engine)
            case _:
                pass
    return losses, returns
