"""alarms.jsonl: start and end of the alarms of a run; and the alarms of any recorded run.

a line per change: {"kind": "begun", "time_s": 31.2, "name": "drift", "since_step": 12, ...}
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Literal

from typing_extensions import TypedDict

from areal_lab.config.schema import TrainConfig
from areal_lab.config.sections import AlarmsConfig
from areal_lab.host.durable import append_lines
from areal_lab.host.foreign import Parsed, parse_json
from areal_lab.metrics.alarm import Alarm, Change, Facts
from areal_lab.runlog.alarms import Alarms, alarms_of, changes_of
from areal_lab.runlog.appended import read_appended

FILE: Final = "alarms.jsonl"


class AlarmLog:
    """Alarms of a running run: follows its metrics and writes changes."""

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        self._alarms = Alarms(config.alarms)
        self._file = folder / FILE
        self._eta = 0.0

    def add(self, step: int, time_s: float, metrics: Mapping[str, float], eta: float) -> list[str]:
        """Add the next step; returns a line of text for each alarm that begins or ends."""
        self._eta = max(self._eta, eta)  # groups that were admitted under a higher one stay
        changes = self._alarms.add({**metrics, "step": step}, Facts(eta=self._eta))
        for change in changes:
            line = {"kind": change.kind, "time_s": time_s, **asdict(change.alarm)}
            append_lines(self._file, json.dumps(line) + "\n")
        return [str(change) for change in changes]

    def follow(self, metrics: Sequence[Mapping[str, float]], eta: float) -> None:
        """Add the steps before a recovery, whose alarms are in the file."""
        self._eta = max(self._eta, eta)
        for line in metrics:
            self._alarms.add(line, Facts(eta=self._eta))

    def summary(self) -> list[dict[str, Any]]:
        """All alarms so far, for summary.json."""
        alarms = [*self._alarms.past, *self._alarms.standing]
        return [asdict(one) for one in sorted(alarms, key=lambda one: one.raised_step)]


def read_alarms(
    folder: Path,
    metrics: Sequence[Mapping[str, float]],
    settings: Mapping[str, Any],
    eta: float,
) -> list[Alarm]:
    """Alarms of a recorded run: those that it wrote, else those that its metrics raise."""
    file = folder / FILE
    if file.is_file():
        return alarms_of(_changes(file))
    config = AlarmsConfig().with_settings(
        {
            name: settings[f"alarms.{name}"]
            for name in AlarmsConfig.model_fields
            if f"alarms.{name}" in settings
        }
    )
    steps = [line for line in metrics if "step" in line]
    return alarms_of(changes_of(steps, Facts(eta=eta), config))


class _Kind(TypedDict):
    kind: Literal["begun", "ended"]


_KIND: Final = Parsed[_Kind](_Kind)
_ALARM: Final = Parsed[Alarm](Alarm)


def _changes(file: Path) -> Iterator[Change]:
    for number, line in enumerate(read_appended(file).lines, start=1):
        try:
            value = parse_json(line)
            yield Change(_KIND(value)["kind"], _ALARM(value))
        except ValueError as error:
            raise ValueError(f"line {number} of {file} cannot be read: {error}") from error
