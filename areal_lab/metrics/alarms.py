"""Alarms of a run: raised by steps in a row beyond a bound, ended by as many within it.

beyond beyond beyond ... begun ... within within within ... ended
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from areal_lab.metrics.alarm import Alarm, AlarmName, Bounds, Change, Facts, Reading
from areal_lab.metrics.history import History
from areal_lab.metrics.rules import RULES


@dataclass(slots=True)
class _Row:
    """Readings in a row that contradict the state of an alarm."""

    steps: int = 0
    first_step: int = 0


class Alarms:
    """Follows the metrics of a run, step by step.

    Args:
        bounds: of all alarms.
        off: alarms that are never raised.
    """

    def __init__(self, bounds: Bounds | None = None, off: Collection[str] = ()) -> None:
        self._bounds = bounds or Bounds()
        self._rules = {name: rule for name, rule in RULES.items() if name not in off}
        self._history = History()
        self._rows = {name: _Row() for name in self._rules}
        self._standing: dict[AlarmName, Alarm] = {}
        self.past: list[Alarm] = []
        """Alarms that have ended, in that order."""

    @property
    def standing(self) -> list[Alarm]:
        """Alarms that last, the oldest first."""
        return list(self._standing.values())

    def add(self, metrics: Mapping[str, float], facts: Facts) -> list[Change]:
        """The metrics of the next step; returns what begins and ends with it.

        Args:
            metrics: a line of metrics.jsonl; `step` is its number.
            facts: as of this step.
        """
        step = int(metrics["step"])
        self._history.add(metrics, facts)
        changes: list[Change] = []
        for name, rule in self._rules.items():
            reading = rule(self._history, self._bounds)
            if reading is not None and (change := self._weigh(name, step, reading)) is not None:
                changes.append(change)
        return changes

    def _weigh(self, name: AlarmName, step: int, reading: Reading) -> Change | None:
        row, standing = self._rows[name], self._standing.get(name)
        if reading.beyond == (standing is not None):
            row.steps = 0
            return None
        row.first_step = row.first_step if row.steps else step
        row.steps += 1
        if row.steps < self._bounds.steps:
            return None
        row.steps = 0
        if standing is not None:
            over = replace(standing, ended_step=step)
            del self._standing[name]
            self.past.append(over)
            return Change("ended", over)
        alarm = Alarm(
            name=name,
            since_step=row.first_step,
            raised_step=step,
            metric=reading.metric,
            value=reading.value,
            bound=reading.bound,
            what=reading.what,
            cause=reading.cause,
            remedy=reading.remedy,
        )
        self._standing[name] = alarm
        return Change("begun", alarm)


def changes_of(
    lines: Iterable[Mapping[str, float]],
    facts: Facts,
    bounds: Bounds | None = None,
    off: Collection[str] = (),
) -> list[Change]:
    """All changes in the metrics of a run, in order.

    Args:
        lines: of metrics.jsonl.
        facts: of the whole run.
        bounds: of all alarms.
        off: alarms that are never raised.
    """
    alarms = Alarms(bounds, off)
    return [change for line in lines for change in alarms.add(line, facts)]


def alarms_of(changes: Iterable[Change]) -> list[Alarm]:
    """The alarms of a run in the order in which they were raised, ended ones with their end."""
    found: dict[tuple[str, int], Alarm] = {}
    for change in changes:
        found[change.alarm.name, change.alarm.since_step] = change.alarm
    return list(found.values())
