"""Read a run folder: its log, metrics and summary, also of a run that was killed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_lab.runlog.file import read_log_file
from areal_lab.runlog.lags import TrainedBatch, trained_batches
from areal_lab.runlog.records import Log
from areal_lab.runlog.summary import run_status


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """The content of a run folder."""

    folder: Path
    log: Log
    metrics: tuple[dict[str, Any], ...]
    """One object per step, in order."""
    summary: dict[str, Any]
    """Empty if the run was killed before it wrote one."""

    @property
    def batches(self) -> list[TrainedBatch]:
        """The finished steps, from the log."""
        return list(trained_batches(self.log))

    @property
    def title(self) -> str:
        """The run in one line."""
        limits = self.log.header.limits
        batches = self.batches
        eta = limits.get("eta")
        eta_text = f"{eta:g}" if isinstance(eta, int | float) else str(eta)
        parts = [
            self.folder.name,
            f"{limits.get('schedule')}, eta {eta_text}",
            f"{len(batches)} steps of {limits.get('batch_groups')} groups",
        ]
        if "backend" in self.summary:
            parts.append(str(self.summary["backend"]))
        parts.append(f"{self.log.end_s:.0f} s")
        if (status := run_status(self.log)) != "complete":
            parts.append(status)
        return "  |  ".join(parts)


def read_run(folder: Path) -> RecordedRun:
    """Read a run folder; an incomplete last line is skipped.

    Raises:
        FileNotFoundError: if it is not a run folder: there is no events.jsonl.
        ValueError: if a file is damaged other than at its end.
    """
    events = folder / "events.jsonl"
    if not events.is_file():
        raise FileNotFoundError(f"{folder} is no run folder: it has no events.jsonl")
    return RecordedRun(
        folder.resolve(),
        read_log_file(events),
        tuple(_json_lines(folder / "metrics.jsonl")),
        _json_object(folder / "summary.json"),
    )


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
