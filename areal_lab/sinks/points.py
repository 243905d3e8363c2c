"""The points of a run folder, as they are written: what a sink gets.

    metrics.jsonl, held_out.jsonl --new lines--> Point(step, time_s, values)

The files are the queue: a sink that is slow or hangs holds nothing back, and memory stays bounded
by one reading.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from areal_lab.metrics.glossary import GLOSSARY
from areal_lab.runlog import held_out
from areal_lab.runlog.appended import Appended, read_appended
from areal_lab.runlog.read_run import METRICS

_GROUPS: Final = {one.name: one.group.lower() for one in GLOSSARY}
CUSTOM: Final = "custom"
"""Group of metrics that the glossary does not have, as those of a custom loss."""
PICTURES: Final = ("reward.png", "loss.png", "timeline.png", "staleness.png")
HELD_OUT: Final = f"{_GROUPS[held_out.METRIC]}/held_out_"
"""Beginning of the names of measurements on held-out problems."""


@dataclass(frozen=True, slots=True)
class Point:
    """Values of one training step."""

    step: int
    time_s: float | None
    """Since training began; None if it is not known."""
    values: Mapping[str, float]
    """By `group/metric`."""


@dataclass(slots=True)
class Points:
    """Reads the points of a run folder."""

    folder: Path
    read_to: dict[str, int] = field(default_factory=dict)
    """Bytes of each file that were read."""

    def new(self) -> Iterator[Point]:
        """The points since the last call, in the order of each file."""
        for line in self._lines(held_out.FILE):
            step = int(line["version"])
            yield Point(step, None, dict(_held_out(line)))
        for line in self._lines(METRICS):
            values = {
                named(name): float(value)
                for name, value in line.items()
                if isinstance(value, int | float) and name not in ("step", "version")
            }
            yield Point(int(line["step"]), float(line["time_s"]), values)

    def left(self) -> int:
        """Points that are written and were not read."""
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
    """The name of a metric in a sink, with its group in front: these tools sort by it."""
    return f"{_GROUPS.get(metric, CUSTOM)}/{metric}"
