"""What a sink does, and what it is told at its start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from areal_lab.sinks.points import Point


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The run that a sink follows."""

    folder: Path
    config: Mapping[str, Any]
    """Content of config.yaml."""
    options: Mapping[str, Any]
    """Those of this sink, from `stats_logger`."""
    began_s: float
    """Start of the run, in seconds since the epoch."""

    @property
    def name(self) -> str:
        """Name of the run."""
        return str(self.options.get("name") or self.folder.name)

    def option(self, name: str) -> Any:
        """An option; None if it is empty, which is how these tools say that it is not set."""
        return self.options.get(name) or None


class Sink(Protocol):
    """Gets a run; each method may raise, block or fail, in a process of its own."""

    where: str
    """Where to look at it, or what to do to send it: one line."""

    def log(self, point: Point) -> None:
        """One point; steps do not decrease."""

    def picture(self, name: str, file: Path, step: int) -> None:
        """One picture, a PNG."""

    def close(self, summary: Mapping[str, Any], *, failed: bool) -> None:
        """The end of the run.

        Args:
            summary: content of summary.json; empty if the run was killed.
            failed: whether the run ended early by an error.
        """
