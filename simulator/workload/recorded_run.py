"""A recorded run of `areal-lab train`: its log, its settings, and the work measured in them.

    RUN/events.jsonl (or .gz) --read_events--> Log --> responses, training steps, updates
    RUN/config.yaml           --> settings, if there is one

Only the log is needed: records of the coordinator and of groups suffice, spans add detail. Seconds
are since the start of the run.
"""

from __future__ import annotations

import gzip
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from areal_lab.control.events import GroupId, Interrupt, PushWeights, RunStarted, WeightsPushed
from areal_lab.runlog.lags import TrainedBatch, trained_batches
from areal_lab.runlog.records import (
    TRAINER,
    ActionRecord,
    EventRecord,
    Log,
    SpanRecord,
    read_log,
)

EXPORT: Final = "export weights"
EVENTS: Final = ("events.jsonl", "events.jsonl.gz")


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """Log and settings of a run."""

    source: Path
    log: Log
    settings: Mapping[str, Any]
    """From its config.yaml, by dotted name, of any version; empty if there is none."""

    @property
    def steps(self) -> list[TrainedBatch]:
        """The finished training steps, in order."""
        return list(trained_batches(self.log))

    @property
    def began_s(self) -> float:
        """When training began; an evaluation may have come before."""
        return next((r.t_s for r in self.log.events if isinstance(r.event, RunStarted)), 0.0)

    @property
    def engines(self) -> int:
        """Number of engines at the start of the run."""
        return next(
            (len(r.event.engines) for r in self.log.events if isinstance(r.event, RunStarted)), 0
        )


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


def read_recorded_run(path: Path) -> RecordedRun:
    """Read a run folder or its events.jsonl.

    Raises:
        ValueError: one line: there is no log, or it cannot be read.
    """
    log = read_events(path)
    folder = path if path.is_dir() else path.parent
    return RecordedRun(path, log, _read_settings(folder / "config.yaml"))


def read_events(path: Path) -> Log:
    """The log of a run folder or of a file.

    Raises:
        ValueError: one line: there is none, or it cannot be read.
    """
    file = events_file(path)
    try:
        if file.suffix == ".gz":
            with gzip.open(file, "rt", encoding="utf-8") as lines:
                return read_log(lines)
        with file.open(encoding="utf-8", errors="replace") as lines:
            return read_log(lines)
    except (OSError, EOFError, ValueError) as error:
        reason = str(error).split("\n", 1)[0]
        raise ValueError(f"{file} cannot be read: {reason}") from error


def events_file(path: Path) -> Path:
    """Path of the log of a run folder; `path` itself if it is a file.

    Raises:
        ValueError: one line: there is none.
    """
    if path.is_file():
        return path
    if not path.exists():
        raise ValueError(f"{path} does not exist (looked in {Path.cwd()})")
    found = [path / name for name in EVENTS if (path / name).is_file()]
    if not found:
        raise ValueError(f"{path} is not a run folder: it has no events.jsonl")
    return found[0]


def response_tokens(log: Log) -> dict[GroupId, list[int]]:
    """Tokens of each response, by group; aborted groups are left out."""
    return {
        record.group: [max(1, sum(tokens for _, tokens in sample)) for sample in record.segments]
        for record in log.groups
        if record.segments and "abort" not in record.finish_reasons
    }


def training_points(run: RecordedRun) -> list[TrainingPoint]:
    """Batch and duration of each training step.

    The duration is from the trainer's start to its end, minus the export of the weights and the
    wait for engines that had not yet loaded the previous ones.
    """
    spans = [span for span in run.log.spans if span.process == TRAINER]
    return [
        _training_point(batch, [s for s in spans if batch.begun_s <= s.t_s < batch.done_s])
        for batch in run.steps
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
            case ActionRecord(t_s, Interrupt() | PushWeights()) if since_s is None:
                since_s = t_s
            case EventRecord(t_s, WeightsPushed()) if since_s is not None:
                yield since_s, t_s
                since_s = None
            case _:
                pass


def _read_settings(path: Path) -> dict[str, Any]:
    # Loaded here and not above: replaying a log alone does not need it.
    yaml: Any = importlib.import_module("yaml")  # by name: it ships no types

    if not path.is_file():
        return {}
    try:
        read = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = str(error).split("\n", 1)[0]
        raise ValueError(f"{path} cannot be read: {reason}") from error
    return dict(_flat(read)) if isinstance(read, dict) else {}


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _training_point(batch: TrainedBatch, spans: list[SpanRecord]) -> TrainingPoint:
    exports = [span for span in spans if span.name == EXPORT]
    work_end_s = max((s.end_s for s in spans if s.name != EXPORT), default=None)
    export_s = sum(span.end_s - span.t_s for span in exports)
    waited_s = 0.0
    if exports and work_end_s is not None:
        waited_s = max(0.0, exports[0].t_s - work_end_s)
    return TrainingPoint(
        step=batch.version,
        tokens=batch.tokens,
        samples=batch.samples,
        seconds=batch.done_s - batch.begun_s - export_s - waited_s,
        export_s=export_s,
    )
