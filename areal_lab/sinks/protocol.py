"""Protocol of a sink, its input at the start, and the points that it reads of a run.

The points of a run folder, as they are written: what a sink gets.

    metrics.jsonl, held_out.jsonl --new lines--> Point(step, time_s, values)

The files are the queue: a sink that is slow or hangs holds nothing back, and memory stays bounded
by one reading.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from areal_lab.metrics.glossary import ENVIRONMENT, GLOSSARY
from areal_lab.runlog import held_out
from areal_lab.runlog.appended import Appended, read_appended
from areal_lab.runlog.read_run import METRICS


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The run that a sink follows."""

    folder: Path
    config: Mapping[str, Any]
    """Content of config.yaml."""
    options: Mapping[str, Any]
    """Options of this sink, from `stats_logger`."""
    began_s: float
    """Start of the run, in seconds since the epoch."""

    @property
    def name(self) -> str:
        """Name of the run."""
        return str(self.options.get("name") or self.folder.name)

    def option(self, name: str) -> Any:
        """Value of an option; None if it is empty, which is how these tools mark an unset one."""
        return self.options.get(name) or None


class Sink(Protocol):
    """Receives a run; each method may raise, block or fail, in a separate process."""

    where: str
    """Where to view it, or how to upload it: one line."""

    def log(self, point: Point) -> None:
        """Log one point; steps do not decrease."""

    def picture(self, name: str, file: Path, step: int) -> None:
        """Log one picture, a PNG."""

    def close(self, summary: Mapping[str, Any], *, failed: bool) -> None:
        """End the run.

        `summary` is the content of summary.json; empty if the run was killed. `failed` is True if
        an error ended the run early.
        """


_GROUPS: Final = {one.name: one.group.lower() for one in GLOSSARY}
CUSTOM: Final = "custom"
"""Group of metrics outside of the glossary, such as those of a custom loss."""
PICTURES: Final = ("reward.png", "loss.png", "timeline.png", "staleness.png")
HELD_OUT: Final = f"{_GROUPS[held_out.METRIC]}/held_out_"
"""Prefix of the names of measurements on held-out problems."""


@dataclass(frozen=True, slots=True)
class Point:
    """Values of one training step."""

    step: int
    time_s: float | None
    """Seconds since training began; None if unknown."""
    values: Mapping[str, float]
    """Values by `group/metric`."""


@dataclass(slots=True)
class Points:
    """Read the points of a run folder."""

    folder: Path
    read_to: dict[str, int] = field(default_factory=dict)
    """Bytes of each file that were read."""

    def new(self) -> Iterator[Point]:
        """Points since the last call, in the order of each file."""
        for line in self._lines(held_out.FILE):
            step = int(line["version"])
            yield Point(step, None, dict(_held_out(line)))
        for line in self._lines(METRICS):
            values = {
                named(name): float(value)
                for name, value in line.items()
                if isinstance(value, int | float) and name not in ("step", "version")
            }
            time_s = line.get("time_s")  # an imported log may have none
            yield Point(int(line["step"]), None if time_s is None else float(time_s), values)

    def left(self) -> int:
        """Points that are written but not read yet."""
        return sum(len(self._appended(name).lines) for name in (held_out.FILE, METRICS))

    def _lines(self, name: str) -> Iterator[dict[str, Any]]:
        found = self._appended(name)
        self.read_to[name] = found.end
        for line in found.lines:
            yield json.loads(line)

    def _appended(self, name: str) -> Appended:
        start = self.read_to.get(name, 0)
        try:
            return read_appended(self.folder / name, start)
        except FileNotFoundError:
            return Appended((), start)


def _held_out(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The values of a measurement on held-out problems."""
    yield named(held_out.METRIC), float(line["reward"])
    if "later_tokens" in line:
        yield f"{HELD_OUT}later_tokens", float(line["later_tokens"])
    for k, value in line.get("pass_at", {}).items():
        yield f"{HELD_OUT}pass_at_{k}", float(value)


def named(metric: str) -> str:
    """Name of a metric in a sink, prefixed with its group: these tools sort by it."""
    if metric.startswith(ENVIRONMENT):
        return metric
    return f"{_GROUPS.get(metric, CUSTOM)}/{metric}"
