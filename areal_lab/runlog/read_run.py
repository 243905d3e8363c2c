"""Read a recorded run: its log, metrics, summary and settings, also of a run that was killed.

    RUN/events.jsonl (or .gz) --read_events--> Log --> training steps, engines
    RUN/metrics.jsonl, summary.json, config.yaml   --> those that exist

Only the log is needed. Seconds are since the start of the run.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from areal_lab.control.events import RunStarted
from areal_lab.runlog.file import read_log_file
from areal_lab.runlog.lags import TrainedBatch, trained_batches
from areal_lab.runlog.records import Log
from areal_lab.runlog.summary import run_status

EVENTS: Final = ("events.jsonl", "events.jsonl.gz")


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
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of config.yaml by dotted name, from any version; empty if there is none."""

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


def read_run(path: Path) -> RecordedRun:
    """Read a run folder, or its events.jsonl; an incomplete last line is skipped.

    Raises:
        ValueError: in one line: there is no log, or a file cannot be read.
    """
    log, folder = read_events(path), _folder(path)
    return RecordedRun(
        path,
        log,
        tuple(_json_lines(folder / "metrics.jsonl")),
        _json_object(folder / "summary.json"),
        _settings(folder / "config.yaml"),
    )


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


def _json_lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    lines = path.read_text(errors="replace").splitlines()
    values = []
    for number, line in enumerate(lines, start=1):
        try:
            values.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ValueError(f"line {number} of {path} is not JSON: {error}") from error
    return values


def _json_object(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def _settings(path: Path) -> dict[str, Any]:
    # Imported here, because a replay of a log does not need it.
    yaml: Any = importlib.import_module("yaml")  # by name, because it has no types

    if not path.is_file():
        return {}
    try:
        read = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise _unreadable(path, error) from error
    return dict(_flat(read)) if isinstance(read, dict) else {}


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
