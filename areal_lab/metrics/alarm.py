"""The records of alarms: what a rule is told, what it finds, what begins and ends.

metrics of a step + Facts + Bounds --rule--> Reading | None --Alarms--> Change: begun, ended
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

AlarmName: TypeAlias = Literal[
    "ratio",
    "drift",
    "entropy",
    "truncated",
    "stale_weights",
    "sampler_gap",
    "equal_rewards",
    "reward_drop",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The bounds of all alarms; `config.watching.AlarmsConfig` has the same fields."""

    steps: int = 5
    """Training steps in a row beyond a bound that raise an alarm, and within it that end it."""
    ratio: float = 0.1
    drift: float = 0.2
    entropy: float = 0.1
    truncated: float = 0.5
    lag: float = 0.0
    sampler_gap: float = 0.05
    equal_rewards: float = 0.9
    reward_drop: float = 0.12
    solved: float = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a rule knows of a run besides its metrics."""

    eta: float
    """The largest staleness bound that was in force so far, in versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a rule finds in one step."""

    metric: str
    """The metric that decides."""
    value: float
    bound: float
    beyond: bool
    """Whether the value is on the wrong side of the bound."""
    what: str
    """The value and the bound in words."""
    cause: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """An alarm that was raised."""

    name: AlarmName
    since_step: int
    """The first of the steps beyond the bound that raised it."""
    raised_step: int
    """The step after which it was raised."""
    metric: str
    value: float
    """Of the step that raised it."""
    bound: float
    what: str
    cause: str
    remedy: str
    ended_step: int | None = None
    """The step after which it ended; None while it lasts."""

    def __str__(self) -> str:
        """The alarm in one line."""
        return (
            f"{self.name.replace('_', ' ')} since step {self.since_step}: {self.what}. "
            f"{self.cause} {self.remedy}"
        )

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> Alarm:
        """The alarm of `dataclasses.asdict`, as a line of alarms.jsonl has it."""
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__ if name in fields})


@dataclass(frozen=True, slots=True)
class Change:
    """An alarm that began or ended with this step."""

    kind: Literal["begun", "ended"]
    alarm: Alarm

    def __str__(self) -> str:
        """The change in one line."""
        if self.kind == "begun":
            return f"alarm: {self.alarm}"
        name = self.alarm.name.replace("_", " ")
        return f"alarm over at step {self.alarm.ended_step}: {name} (since {self.alarm.since_step})"
