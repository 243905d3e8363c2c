"""What the run and its Ray driver tell each other: one JSON record a line.

run --Begin, then Order, Order, ...--> driver
run <--Report, Report, ...------------ driver        each has everything; the last one counts
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """The hosts that are wanted."""

    address: str
    """Of the Ray cluster: `auto`, `local` or `HOST:PORT`."""
    hosts: int
    gpus: int
    """Of each host; 0 takes what they have."""
    resources: Mapping[str, float]
    """More that each host must have."""
    named: int
    """Hosts that were named before: the next one is h(named + 1)."""
    logs: str
    """Folder for the agents' logs."""
    run: str
    """`ADDRESS:PORT` of the run."""
    token: str = field(repr=False)
    """Of the run's hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the driver is to do."""

    replace: str = ""
    """Name of a host that is lost."""
    stop: bool = False
    """End all hosts, and exit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How things are."""

    connected: bool = False
    impossible: str = ""
    """Why there can be no hosts, in one sentence; the driver exits after it."""
    state: str = ""
    """What is waited for."""
    named: int = 0
    """Hosts that have been named."""
