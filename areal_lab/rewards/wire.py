"""The messages between the reward service and its workers: pickles preceded by their length.

service --(function)-----> worker --(Ready | Failed)--> service
service --(ScoreRequest)-> worker --(Scored, one per completion, as each ends)--> service
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Status: TypeAlias = Literal["ok", "timeout", "error"]
"""The result of one call of the reward function."""

LENGTH = struct.Struct("<Q")
"""Size in bytes of the pickle that follows."""


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
    """Completions of one problem to score."""

    completions: tuple[str, ...]
    example: Mapping[str, Any]
    together: bool
    """Whether an async function scores all of them concurrently, or one after the other."""
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Scored:
    """The result of one completion."""

    index: int
    status: Status
    """`timeout` occurs with async functions only; a sync one is stopped from outside."""
    reward: float = float("nan")
    rewards: dict[str, float] = field(default_factory=dict)
    detail: str = ""
    """Traceback of an error."""
