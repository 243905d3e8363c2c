"""JSON messages between a host agent and the run.

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
from typing import Annotated, Any, Final, TypeAlias, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from areal_lab.engines.launch.backends import Build, ServerOptions
from areal_lab.host.machine import visible_gpus
from areal_lab.host.memory import memory_bytes

TOKEN_VARIABLE: Final = "AREAL_LAB_CLUSTER_TOKEN"
"""Environment variable with the secret of a run's hosts."""
RECEIVED: Final = "areal-lab-received"
"""Header of a heartbeat with the number of the newest reply that the run has received."""
Message = TypeVar("Message")
Word: TypeAlias = Annotated[str, Field(pattern=r"^[^\s\p{Cc}/\\]+$", max_length=255)]
"""Text that is valid in a line of a message, a header, an address and a file's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """A joining host."""

    name: Word
    incarnation: Word
    """A new one for each join."""
    address: Word
    """Address of the host for others."""
    port: Annotated[int, Field(ge=1, le=65535)]
    """Port of the agent."""
    folder: str
    """Folder of the agent's files: logs, and fetched folders."""
    gpus: tuple[str, ...]
    cores: int
    memory_bytes: int
    python: Word
    areal_lab: Word

    @property
    def url(self) -> str:
        """Base URL of the agent."""
        return f"http://{self.address}:{self.port}"


def facts_of_this_host(
    *, name: str, incarnation: str, address: str, port: int, folder: str
) -> HostFacts:
    """Facts about this host."""
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
    """The run accepts a host."""

    lease_s: float
    """Heartbeat timeout after which the agent ends its processes."""
    silent_after_s: float
    """Heartbeat timeout after which it counts the run as silent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The run or an agent refuses; `reason` is one sentence."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostHealth:
    """Reply to a heartbeat."""

    incarnation: str
    """Empty between two runs."""
    ended: tuple[int, ...] = ()
    """Processes that have ended."""
    number: int = 0
    """Number of this reply."""
    silent_s: float = 0.0
    """Seconds since the last heartbeat; 0 unless it counts the run as silent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEngine:
    """Start an engine and reply when it is ready."""

    backend: str
    options: ServerOptions
    """Options except `host` and `port`, which the agent chooses."""
    index: int
    """Number of the engine in the run."""
    place: int
    """Number of the engine on its host, which selects its GPUs."""
    ready_timeout_s: float
    request_timeout_s: float | None

    @property
    def name(self) -> str:
        """Name of its process, in messages."""
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
    """Exit status of a process, or that it is still running."""

    how: str
    """Description, with the end of its output; empty while it runs."""
    peak_memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenFile:
    """A file as a host sees it."""

    name: str
    size: int
    time_ns: int
    """Time of its last change: the same on all hosts that share the file."""


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
    """Size of the weights, if the folder is a version of them: these are kept in shared memory."""


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


def _adapter(kind: type[Message]) -> TypeAdapter[Message]:
    """Cached, because creating one takes milliseconds."""
    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]


_adapters: Final[dict[type[Any], TypeAdapter[Any]]] = {}


def to_json(message: object) -> bytes:
    """Encode a record as JSON."""
    return _adapter(type(message)).dump_json(message)


def from_json(kind: type[Message], content: bytes) -> Message:
    """Inverse of `to_json`; ValueError for other content."""
    try:
        return _adapter(kind).validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(
            f"this is no {kind.__name__}: {where and f'{where}: '}{first['msg']:.200}"
        ) from error
