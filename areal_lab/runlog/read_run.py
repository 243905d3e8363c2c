"""Read a recorded run: its log, metrics, settings and samples, also of a run that still runs.

    RUN/events.jsonl                      --> log --> steps, groups, spans
    RUN/metrics.jsonl, summary.json, config.yaml  --> those that exist
    RUN/trajectories/                     --> samples, tokens, at their first use

    run = read_run(folder)
    run.steps                             a pandas frame; also groups, spans, samples
    run.tokens["versions"]                a numpy array, one value per response token
    run = run.refresh()                   reads only what was appended

Only the log is needed. Files of lines may be compressed (.gz), as recorded runs keep them. Seconds
are since the start of the run.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from areal_lab.control.events import RunStarted
from areal_lab.extras import require
from areal_lab.runlog.appended import Appended, read_appended
from areal_lab.runlog.file import read_log_file
from areal_lab.runlog.lags import TrainedBatch, trained_batches
from areal_lab.runlog.records import Log, read_log
from areal_lab.runlog.summary import run_status

if TYPE_CHECKING:
    import pandas as pd

    from areal_lab.runlog.tokens.columns import Tokens
    from areal_lab.runlog.tokens.files import Samples

EVENTS: Final = ("events.jsonl", "events.jsonl.gz")
METRICS: Final = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class ReadTo:
    """Bytes of the growing files that were read."""

    events: int = 0
    metrics: int = 0
    inode: int = 0
    """Of the log: a run that continued has put another file into its place."""


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """The content of a recorded run."""

    source: Path
    """The run folder, or the file of its log."""
    log: Log
    metrics: tuple[dict[str, Any], ...] = ()
    """One object per step, in order."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """Empty if the run was killed before it wrote one."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Content of config.yaml, from any version; empty if there is none."""
    read_to: ReadTo = field(default_factory=ReadTo, compare=False)
    """Where the next reading starts."""
    _made: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """Frames and samples, made at their first use."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings of config.yaml by dotted name."""
        return dict(_flat(self.config))

    @property
    def folder(self) -> Path:
        """The run folder."""
        return _folder(self.source).resolve()

    @property
    def batches(self) -> list[TrainedBatch]:
        """The finished training steps, in order."""
        return list(trained_batches(self.log))

    @property
    def began_s(self) -> float:
        """When training started, possibly after a held-out evaluation."""
        return next((r.t_s for r in self.log.events if isinstance(r.event, RunStarted)), 0.0)

    @property
    def engines(self) -> int:
        """Engines at the start of the run."""
        return next(
            (len(r.event.engines) for r in self.log.events if isinstance(r.event, RunStarted)), 0
        )

    @property
    def title(self) -> str:
        """The run in one line."""
        limits = self.log.header.limits
        eta = limits.get("eta")
        eta_text = f"{eta:g}" if isinstance(eta, int | float) else str(eta)
        parts = [
            self.folder.name,
            f"{limits.get('schedule')}, eta {eta_text}",
            f"{len(self.batches)} steps of {limits.get('batch_groups')} groups",
        ]
        if "backend" in self.summary:
            parts.append(str(self.summary["backend"]))
        parts.append(f"{self.log.end_s:.0f} s")
        if (status := run_status(self.log)) != "complete":
            parts.append(status)
        return "  |  ".join(parts)

    def refresh(self) -> RecordedRun:
        """The run as it is now: reads what was appended since; this one stays as it is.

        If the run was continued from a checkpoint meanwhile, all of it is read again.

        Returns:
            This object if nothing was appended.

        Raises:
            ValueError: in one line: a file cannot be read, or was cut.
        """
        events = events_file(self.source)
        if events.stat().st_ino != self.read_to.inode:
            return read_run(self.source)
        log, events_end = _log(events, self.log, self.read_to.events)
        metrics, metrics_end = _metrics(self.folder / METRICS, self.metrics, self.read_to.metrics)
        summary = _json_object(self.folder / "summary.json")
        samples = self._made.get("samples")
        made = {} if samples is None else {"samples": _read_samples(self.folder, samples)}
        read_to = ReadTo(events_end, metrics_end, self.read_to.inode)
        unchanged = read_to == self.read_to and summary == self.summary
        if unchanged and made.get("samples") is samples:
            return self
        return replace(self, log=log, metrics=metrics, summary=summary, read_to=read_to, _made=made)

    @property
    def steps(self) -> pd.DataFrame:
        """One row per training step (index `step`, from 1): lags from the log, and its metrics.

        `begun_s` and `done_s` are seconds since the start of the run; `time_s`, a metric, since the
        start of training.
        """
        return self._frame("steps")

    @property
    def groups(self) -> pd.DataFrame:
        """One row per group that was started (index `group`).

        `outcome` is trained, training, dropped or filtered, the latter two with their `reason`; or
        finished, or running, for groups that wait or run at the end of the log.
        """
        return self._frame("groups")

    @property
    def spans(self) -> pd.DataFrame:
        """One row per activity of a process, with a column per argument."""
        return self._frame("spans")

    @property
    def samples(self) -> pd.DataFrame:
        """One row per sample of every step that began, in the order of `tokens`.

        A run without trajectories has what its log says: no texts, no tokens.
        """
        return self._frame("samples")

    @property
    def tokens(self) -> Tokens:
        """Every response token, as columns; empty for a run without trajectories.

        Raises:
            ValueError: naming the file and line that cannot be read.
        """
        return self._samples().tokens

    def _samples(self) -> Samples:
        if "samples" not in self._made:
            self._made["samples"] = _read_samples(self.folder)
        samples: Samples = self._made["samples"]
        return samples

    def _frame(self, name: str) -> pd.DataFrame:
        require(f"RecordedRun.{name}", "notebooks", "pandas")
        from areal_lab.runlog import frames

        key = f"frame of {name}"
        if key not in self._made:
            match name:
                case "steps":
                    self._made[key] = frames.steps_frame(self.log, self.metrics)
                case "groups":
                    self._made[key] = frames.groups_frame(self.log)
                case "spans":
                    self._made[key] = frames.spans_frame(self.log)
                case _:
                    self._made[key] = frames.samples_frame(self.log, self._samples())
        return self._made[key]


def read_run(path: Path | str) -> RecordedRun:
    """Read a run folder, or its events.jsonl; an incomplete last line is skipped.

    Raises:
        ValueError: in one line: there is no log, or a file cannot be read.
    """
    path = Path(path)
    folder = _folder(path)
    events = events_file(path)
    inode = events.stat().st_ino  # before the reading, so that a cut meanwhile is noticed
    log, events_end = _log(events)
    metrics, metrics_end = _metrics(folder / METRICS)
    return RecordedRun(
        path,
        log,
        metrics,
        _json_object(folder / "summary.json"),
        _config(folder / "config.yaml"),
        ReadTo(events_end, metrics_end, inode),
    )


def find_runs(folder: Path | str) -> list[Path]:
    """The run folders in a folder, the last one that was written to first; none if there is none.

    A run folder has an event log; other folders are skipped.
    """
    found = {
        log.parent: log.stat().st_mtime for name in EVENTS for log in Path(folder).glob(f"*/{name}")
    }
    return sorted(found, key=lambda run: (-found[run], run.name))


def read_events(path: Path) -> Log:
    """The log of a run folder, or of a file.

    Raises:
        ValueError: in one line: there is none, or it cannot be read.
    """
    file = events_file(path)
    try:
        return read_log_file(file)
    except (OSError, EOFError, ValueError) as error:
        raise _unreadable(file, error) from error


def events_file(path: Path) -> Path:
    """The file of a run folder's log; a file is returned as it is.

    Raises:
        ValueError: in one line: there is none.
    """
    if path.is_file():
        return path
    if not path.exists():
        raise ValueError(f"{path} does not exist (looked in {Path.cwd()})")
    found = [path / name for name in EVENTS if (path / name).is_file()]
    if not found:
        raise ValueError(f"{path} is not a run folder: it has no events.jsonl")
    return found[0]


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _unreadable(path: Path, error: Exception) -> ValueError:
    reason = str(error).split("\n", 1)[0]
    return ValueError(f"{path} cannot be read: {reason}")


def _log(path: Path, before: Log | None = None, start: int = 0) -> tuple[Log, int]:
    """The log, continued from `before`, and where its next reading starts."""
    try:
        found = read_appended(path, start)
        if before is not None and found == Appended((), start, before.cut):
            return before, start
        return replace(read_log(found.lines, after=before), cut=found.cut), found.end
    except (OSError, EOFError, ValueError) as error:
        raise _unreadable(path, error) from error


def _metrics(
    path: Path, before: tuple[dict[str, Any], ...] = (), start: int = 0
) -> tuple[tuple[dict[str, Any], ...], int]:
    if not path.is_file():
        path = path.with_name(f"{path.name}.gz")
        if not path.is_file():
            return before, start
    found = read_appended(path, start)
    values = []
    for number, line in enumerate(found.lines, start=1 + len(before)):
        try:
            values.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} of {path} is not JSON: {error}") from error
    return (*before, *values), found.end


def _read_samples(folder: Path, before: Samples | None = None) -> Samples:
    from areal_lab.runlog.tokens.files import read_samples  # loads numpy

    return read_samples(folder, before)


def _json_object(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def _config(path: Path) -> dict[str, Any]:
    # Imported here, because a replay of a log does not need it.
    yaml: Any = importlib.import_module("yaml")  # by name, because it has no types

    if not path.is_file():
        return {}
    try:
        read = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise _unreadable(path, error) from error
    return read if isinstance(read, dict) else {}


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
