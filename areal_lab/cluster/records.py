"""What a host agent and the run tell each other, as JSON.

agent --HostFacts--> run        POST /join
agent <--Welcome---- run
run   --HEARTBEAT--> agent      GET /health: HostHealth; RECEIVED is the number of the newest one
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Final, TypeVar

from pydantic import TypeAdapter

from areal_lab.engines.launch.backends import Build, ServerOptions
from areal_lab.host.gpus import visible_gpus
from areal_lab.host.memory import memory_bytes

TOKEN_VARIABLE: Final = "AREAL_LAB_CLUSTER_TOKEN"
"""Environment variable with the secret of a run's hosts."""
RECEIVED: Final = "areal-lab-received"
"""Header of a heartbeat with the number of the newest reply that the run has received."""
Message = TypeVar("Message")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """A host that joins."""

    name: str
    incarnation: str
    """A new one each time that it joins."""
    address: str
    """Of the host, as others reach it."""
    port: int
    """Of the agent."""
    folder: str
    """Of the agent's files: logs, and what it fetched."""
    gpus: tuple[str, ...]
    cores: int
    memory_bytes: int
    python: str
    areal_lab: str

    @property
    def url(self) -> str:
        """Of the agent."""
        return f"http://{self.address}:{self.port}"


def facts_of_this_host(
    *, name: str, incarnation: str, address: str, port: int, folder: str
) -> HostFacts:
    """What this host tells of itself."""
    return HostFacts(
        name=name,
        incarnation=incarnation,
        address=address,
        port=port,
        folder=folder,
        gpus=visible_gpus(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=memory_bytes(),
        python=platform.python_version(),
        areal_lab=version("areal_lab"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The run takes a host."""

    lease_s: float
    """Without a heartbeat for this long, the agent ends its processes."""
    silent_after_s: float
    """Without one for this long, it counts the run as silent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The run or an agent refuses; `reason` is one sentence."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostHealth:
    """The reply to a heartbeat."""

    incarnation: str
    """Empty between two runs."""
    ended: tuple[int, ...] = ()
    """Processes that have ended."""
    number: int = 0
    """Of this reply."""
    silent_s: float = 0.0
    """For how long it has not heard the run; 0 unless it counts the run as silent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEngine:
    """Start an engine and reply when it is ready."""

    backend: str
    options: ServerOptions
    """Of which `host` and `port` are the agent's choice."""
    index: int
    """Number of the engine in the run."""
    place: int
    """Number of the engine on its host, which selects its GPUs."""
    ready_timeout_s: float
    request_timeout_s: float | None

    @property
    def name(self) -> str:
        """Of its process, in messages."""
        return f"engine {self.index}"

    @property
    def log(self) -> str:
        """Name of its log file."""
        return f"engine-{self.index}.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedEngine:
    """An engine that is ready."""

    pid: int
    base_url: str
    key: str = field(repr=False)
    version: str
    build: Build


@dataclass(frozen=True, slots=True, kw_only=True)
class StartModule:
    """Start `python -m module arguments...` (`host.processes.start_child`)."""

    name: str
    module: str
    arguments: tuple[str, ...]
    log: str
    """Name of its log file."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedModule:
    """A process that was started."""

    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnd:
    """How a process ended, or that it still runs."""

    how: str
    """In words, with the end of its output; empty while it runs."""
    peak_memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenFile:
    """A file as a host sees it."""

    name: str
    size: int
    time_ns: int
    """Of its last change: the same on all hosts that share the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenFolder:
    """The files of a folder as a host sees them."""

    files: tuple[SeenFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchFolder:
    """Fetch a folder that another host serves."""

    url: str
    incarnation: str
    name: str
    weights_bytes: int = 0
    """Size of one version of the weights, if it is one: these are kept in shared memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeFolder:
    """Serve a folder to other hosts."""

    name: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A path on a host."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Shape of each tensor of a folder, by name."""

    shapes: dict[str, tuple[int, ...]]


def to_json(message: object) -> bytes:
    """A record as JSON."""
    return TypeAdapter(type(message)).dump_json(message)


def from_json(kind: type[Message], content: bytes) -> Message:
    """Inverse of `to_json`.

    Raises:
        ValueError: if the content is no such record.
    """
    return TypeAdapter(kind).validate_json(content)
