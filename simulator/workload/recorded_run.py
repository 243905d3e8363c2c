"""Work of a recorded run, measured in its log: responses, training steps, updates.

Records of the coordinator and of groups suffice, spans add detail. Seconds are since the start of
the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from areal_lab.control.events import GroupId, Interrupt, PushWeights, WeightsPushed
from areal_lab.runlog.lags import TrainedBatch
from areal_lab.runlog.read_run import RecordedRun
from areal_lab.runlog.records import TRAINER, ActionRecord, EventRecord, Log, SpanRecord

EXPORT: Final = "export weights"
_SWITCHES: Final = ("onload", "offload")
"""Moves of the trainer's state between main memory and its devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPoint:
    """One training step: its batch, and its duration without the export of weights."""

    step: int
    """From 1."""
    tokens: int
    """Of the responses."""
    samples: int
    seconds: float
    export_s: float
    """Seconds of the export; 0 if the log has no span of it."""


def response_tokens(log: Log) -> dict[GroupId, list[int]]:
    """Tokens of each response, by group; aborted groups are left out."""
    return {
        record.group: [max(1, sum(tokens for _, tokens in sample)) for sample in record.segments]
        for record in log.groups
        if record.segments and "abort" not in record.finish_reasons
    }


def training_points(run: RecordedRun) -> list[TrainingPoint]:
    """Batch and duration of each training step.

    The duration is from the trainer's start to its end, minus the export of the weights, the wait
    for engines that had not yet loaded the previous ones, and changing turns on shared devices.
    """
    spans = [span for span in run.log.spans if span.process == TRAINER]
    return [
        _training_point(batch, [s for s in spans if batch.begun_s <= s.t_s < batch.done_s])
        for batch in run.batches
    ]


def update_seconds(log: Log) -> list[float]:
    """Seconds of each update, from its start until all engines had the weights."""
    begun_s, found = None, []
    for record in log.records:
        match record:
            case ActionRecord(t_s, PushWeights()):
                begun_s = t_s
            case EventRecord(t_s, WeightsPushed()) if begun_s is not None:
                found.append(t_s - begun_s)
                begun_s = None
            case _:
                pass
    return found


def scoring_seconds(log: Log) -> list[float]:
    """Seconds of each group from the end of its last response until all were scored."""
    return [record.end_s - record.generated_s for record in log.groups]


def updates(log: Log) -> Iterator[tuple[float, float]]:
    """Start and end of each weight update: from interruption or push until it was loaded."""
    since_s = None
    for record in log.records:
        match record:
            case ActionRecord(t_s, Interrupt(by_hand=False) | PushWeights()) if since_s is None:
                since_s = t_s
            case EventRecord(t_s, WeightsPushed()) if since_s is not None:
                yield since_s, t_s
                since_s = None
            case _:
                pass


def _training_point(batch: TrainedBatch, spans: list[SpanRecord]) -> TrainingPoint:
    exports = [span for span in spans if span.name == EXPORT]
    # On shared devices: a simulation has seconds of its own for these.
    switches = [span for span in spans if span.cause or span.name in _SWITCHES]
    work = [span for span in spans if span.name != EXPORT and span not in switches]
    work_end_s = max((span.end_s for span in work), default=None)
    export_s, switch_s = (sum(s.end_s - s.t_s for s in of) for of in (exports, switches))
    waited_s = 0.0
    if exports and work_end_s is not None:
        waited_s = max(0.0, exports[0].t_s - work_end_s)
    return TrainingPoint(
        step=batch.version,
        tokens=batch.tokens,
        samples=batch.samples,
        seconds=batch.done_s - batch.begun_s - export_s - waited_s - switch_s,
        export_s=export_s,
    )
