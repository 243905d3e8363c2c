"""alarms.jsonl: alarms of a run as they begin and end; and the alarms of any recorded run.

a line per change: {"kind": "begun", "time_s": 31.2, "name": "drift", "since_step": 12, ...}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from areal_lab.config.schema import TrainConfig
from areal_lab.config.watching import AlarmsConfig
from areal_lab.metrics.alarm import Alarm, Bounds, Change, Facts
from areal_lab.metrics.alarms import Alarms, alarms_of, changes_of
from areal_lab.runlog.appended import read_appended

FILE: Final = "alarms.jsonl"


def bounds_of(config: AlarmsConfig) -> Bounds:
    """The bounds of the settings."""
    return Bounds(**config.model_dump(exclude={"off"}))


class AlarmLog:
    """The alarms of a run that continues: follows its metrics and writes the changes."""

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        self._alarms = Alarms(bounds_of(config.alarms), config.alarms.off)
        self._file = folder / FILE
        self._eta = 0.0

    def add(self, step: int, time_s: float, metrics: Mapping[str, float], eta: float) -> list[str]:
        """The next step; returns a line of text for each alarm that begins or ends.

        Args:
            time_s: end of the step, since training began.
            metrics: of the step.
            eta: the staleness bound in force.
        """
        self._eta = max(self._eta, eta)  # groups that were admitted under a higher one stay
        changes = self._alarms.add({**metrics, "step": step}, Facts(eta=self._eta))
        for change in changes:
            line = {"kind": change.kind, "time_s": time_s, **asdict(change.alarm)}
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        return [str(change) for change in changes]

    def follow(self, metrics: Sequence[Mapping[str, float]], eta: float) -> None:
        """The steps before a recovery, whose alarms the file has."""
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
    """The alarms of a recorded run: those that it wrote, else those that its metrics raise.

    Args:
        folder: of the run.
        metrics: lines of metrics.jsonl.
        settings: of config.yaml, by dotted name.
        eta: the staleness bound of the run.

    Raises:
        ValueError: if alarms.jsonl cannot be read.
    """
    file = folder / FILE
    if file.is_file():
        lines = [json.loads(line) for line in read_appended(file).lines]
        return alarms_of(Change(line["kind"], Alarm.of_fields(line)) for line in lines)
    config = AlarmsConfig().with_settings(
        {
            name: settings[f"alarms.{name}"]
            for name in AlarmsConfig.model_fields
            if f"alarms.{name}" in settings
        }
    )
    return alarms_of(changes_of(metrics, Facts(eta=eta), bounds_of(config), config.off))
