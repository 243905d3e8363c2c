"""The messages between the reward service and one of its workers: pickles with their length first.

service --(function)--> worker --(Ready | Failed)--> service
service --(Judge)-----> worker --(Judged, one per completion, as each ends)--> service
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Status: TypeAlias = Literal["ok", "timeout", "error"]
"""What became of one call of the reward function."""

LENGTH = struct.Struct("<Q")
"""Bytes of the pickle that follows."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The function is loaded."""

    is_async: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """The function could not be loaded."""

    traceback: str


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Judge these completions of one problem."""

    completions: tuple[str, ...]
    example: Mapping[str, Any]
    together: bool
    """Await an async function for all of them at once; otherwise one after the other."""
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Scored:
    """What became of one completion."""

    index: int
    status: Status
    """`timeout` only of async functions; a sync one is stopped from outside."""
    reward: float = float("nan")
    rewards: dict[str, float] = field(default_factory=dict)
    detail: str = ""
    """Traceback of an error."""
