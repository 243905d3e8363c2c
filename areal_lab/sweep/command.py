"""What a sweep needs to know of a command that it runs: settings, checks, what it prints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from areal_lab.config.record import Record

Prints: TypeAlias = Literal["run folder", "json"]
"""What ends a command's output: the path of a run folder, or one JSON object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command that makes one run: `areal-lab NAME CONFIG.yaml`."""

    name: str
    settings: type[Record]
    aliases: Mapping[str, str]
    """Other names of settings, mapped to their dotted name."""
    load: Callable[[str | None], Record]
    """Settings of a file or shipped config; None takes the defaults. Raises ValueError."""
    check: Callable[[Any], object]
    """Raises `ConfigError` if a run with these settings cannot work."""
    prints: Prints
    options: tuple[str, ...] = ()
    """What follows the config."""
    placed: Callable[[Path], Mapping[str, Any]] = lambda _: MappingProxyType({})
    """Settings that name a run and put it into a folder; they change no result."""
    needs: Callable[[Any], int | None] = lambda _: 1
    """Cores that one run keeps busy; None for all of the machine."""
    alone: Callable[[Any], str] = lambda _: ""
    """The setting that two runs at the same time cannot both have; empty if there is none."""
    shares_seeds: Callable[[Any], bool] = lambda _: False
    """Whether a run has several seeds in itself, from its setting `seed` on."""
    metric: str = "reward_after"
    """The figure that is drawn unless a study names another one."""
