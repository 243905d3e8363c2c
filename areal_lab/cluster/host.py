"""A host from the run's point of view: requests to its agent, and its known state.

    call --> agent --> reply
         \\-> the host is lost meanwhile --> HostLost

No call waits for a lost host, and a reply of an earlier incarnation is refused. The run numbers the
processes, so it can stop one whose start was canceled or got no reply.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TypeVar

import httpx2

from areal_lab.cluster.folders.replies import INCARNATION
from areal_lab.cluster.records import (
    RECEIVED,
    FetchFolder,
    HostFacts,
    HostHealth,
    Place,
    ProcessEnd,
    Refused,
    SeenFolder,
    ServeFolder,
    Shapes,
    StartedEngine,
    StartedModule,
    StartEngine,
    StartModule,
    from_json,
    to_json,
)
from areal_lab.control.liveness import HostLiveness
from areal_lab.engines.keys import authorization
from areal_lab.engines.protocol import WeightsFolder
from areal_lab.host.certificates import certificates_for
from areal_lab.host.ports import connect_s
from areal_lab.host.processes import ChildDied

Reply = TypeVar("Reply")
Started = TypeVar("Started", StartedEngine, StartedModule)
_CONNECT_S = 5.0
_CONTROL_S = 60.0
"""Longest wait for the reply to anything but the start of an engine."""
_STOP_S = 30.0
"""Longest wait for the end of a process."""
_FETCH_S = 3600.0
"""Longest wait for a folder: the loss of a host ends the wait earlier."""
_START_MARGIN_S = 30.0


class HostLost(ChildDied):
    """A host of the run is lost, with all its processes."""


class HostRefused(RuntimeError):
    """A host refused a request; the message is the agent's."""


class _NoReply(HostRefused):
    """A host did not reply to a request."""


@dataclass(slots=True, kw_only=True, eq=False)
class Host:
    """One incarnation of a host. A host that joins again is another `Host`."""

    facts: HostFacts
    liveness: HostLiveness
    token: str = field(repr=False)
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    on_lost: list[Callable[[], None]] = field(default_factory=list)
    """Called once, when the host is lost."""
    processes: dict[int, RemoteProcess] = field(default_factory=dict)
    """Processes that are not known to have ended."""
    _numbers: count[int] = field(default_factory=lambda: count(1))
    """Numbers of new processes."""
    _insisting: set[asyncio.Task[None]] = field(default_factory=set)
    """Kept because the event loop has only weak references."""
    _received: int = 0
    """Number of the newest reply to a heartbeat."""
    _replied: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by each heartbeat with a reply."""
    _http: httpx2.AsyncClient = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._http = httpx2.AsyncClient(
            base_url=self.facts.url,
            headers={
                **authorization(self.token),
                INCARNATION: self.facts.incarnation,
            },
            timeout=httpx2.Timeout(_CONTROL_S, connect=connect_s(self.facts.url, _CONNECT_S)),
            trust_env=False,
            verify=certificates_for(self.facts.url),
        )

    @property
    def name(self) -> str:
        """Name in messages."""
        return self.facts.name

    @property
    def replies(self) -> bool:
        """True if it replied to the last heartbeat, with the same incarnation."""
        return not (self.liveness.missed or self.liveness.lost)

    @property
    def error(self) -> HostLost:
        """Reason of its loss."""
        where = f"host {self.name} ({self.facts.address})"
        return HostLost(f"{where} is lost: {self.liveness.lost or 'unknown'}")

    async def heartbeat(self, timeout_s: float) -> None:
        """Send one heartbeat, and record the reply; `liveness` interprets it."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            reply = await self._http.get(
                "/health", headers={RECEIVED: str(self._received)}, timeout=timeout_s
            )
            health = from_json(HostHealth, reply.raise_for_status().content)
        except (httpx2.HTTPError, ValueError) as error:
            why = str(error) or type(error).__name__
            self.liveness.silent(why, waited_s=loop.time() - began_s, meant_s=timeout_s)
            return
        self.liveness.replied(health.incarnation)
        self._received = max(self._received, health.number)
        self._replied.set()
        for number in health.ended:
            if (process := self.processes.get(number)) is not None:
                process.ended_event.set()

    async def is_there(self) -> bool:
        """Wait until heartbeats decide: it replies to the next one, or it is lost. A broken
        connection proves neither.
        """
        self._replied.clear()
        await _first(self._replied, self.lost)
        return not self.lost.is_set()

    def mark_lost(self) -> None:
        """Fail every call, and run the `on_lost` callbacks. Idempotent."""
        if self.lost.is_set():
            return
        self.lost.set()
        for tell in self.on_lost:
            tell()

    async def start_engine(self, request: StartEngine) -> tuple[RemoteProcess, StartedEngine]:
        """Start an engine; returns when it is ready.

        Raises HostRefused if the agent reports an error, or HostLost.
        """
        timeout_s = request.ready_timeout_s + _START_MARGIN_S
        return await self._start("/engines", request, StartedEngine, timeout_s)

    async def start_module(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        *,
        log: str,
        environment: Mapping[str, str],
    ) -> RemoteProcess:
        """Start `python -m module arguments...`; raises as `start_engine`."""
        request = StartModule(
            name=name,
            module=module,
            arguments=tuple(arguments),
            log=log,
            environment=environment,
        )
        return (await self._start("/modules", request, StartedModule, _CONTROL_S))[0]

    async def stop(self, number: int, *, at_once: bool = False) -> None:
        """Stop a process, including one that is starting, and wait; insists later, if that takes
        long. Processes of a lost host end with its lease.
        """
        flag = "?at_once=1" if at_once else ""
        await asyncio.wait({self.insist(f"/processes/{number}/stop{flag}")}, timeout=_STOP_S)

    def insist(self, path: str) -> asyncio.Task[None]:
        """Repeat a request until the agent replies, or the host is lost."""

        async def ask() -> None:
            with suppress(HostRefused, HostLost):
                while not self.lost.is_set():
                    with suppress(_NoReply):  # a heartbeat got a reply since
                        await self.call("POST", path, timeout_s=_STOP_S)
                        return

        asking = asyncio.create_task(ask())
        self._insisting.add(asking)
        asking.add_done_callback(self._insisting.discard)
        return asking

    async def end_of(self, number: int) -> ProcessEnd:
        """Exit status of a process; raises as `start_engine`."""
        reply = await self.call("GET", f"/processes/{number}")
        return from_json(ProcessEnd, reply)

    async def last_lines(self, log: str, lines: int = 20) -> str:
        """The end of a log file; raises as `start_engine`."""
        return (await self.call("GET", f"/logs/{log}?lines={lines}")).decode()

    async def logs(self) -> list[str]:
        """Names of the log files of its processes; raises as `start_engine`."""
        return list(json.loads(await self.call("GET", "/logs")))

    async def free_port(self) -> int:
        """A port on which nothing listens now; raises as `start_engine`."""
        return int(await self.call("GET", "/free-port"))

    async def seen(self, path: Path) -> SeenFolder:
        """Files of a folder as the host sees them; raises as `start_engine`."""
        return await self._post("/files/seen", Place(path=str(path)), SeenFolder, _CONTROL_S)

    async def serve(self, name: str, path: Path) -> None:
        """Make it serve a folder to others; raises as `start_engine`."""
        await self.call("POST", "/files/serve", to_json(ServeFolder(name=name, path=str(path))))

    async def fetch(self, request: FetchFolder) -> Path:
        """Make it fetch a folder; returns the path there. Raises as `start_engine`."""
        found = await self._post("/files/fetch", request, Place, _FETCH_S)
        return Path(found.path)

    async def check(self, weights: WeightsFolder) -> Mapping[str, Sequence[int]]:
        """Compare weights there with their checksum; returns their shapes. Raises as
        `start_engine`.
        """
        return (await self._post("/files/check", weights, Shapes, _FETCH_S)).shapes

    async def put_file(self, name: str, content: bytes) -> Path:
        """Write a file there; returns its path. Raises as `start_engine`."""
        reply = await self.call("POST", f"/files/put/{name}", content)
        return Path(from_json(Place, reply).path)

    async def remove(self, path: Path) -> None:
        """Remove a folder of its agent; raises as `start_engine`."""
        await self.call("POST", "/files/remove", to_json(Place(path=str(path))))

    async def weights_root(self, size_bytes: int) -> Path:
        """Create a folder there for weights of this size; raises as `start_engine`."""
        reply = await self.call("POST", f"/files/weights-root/{size_bytes}")
        return Path(from_json(Place, reply).path)

    async def dismiss(self) -> None:
        """Tell the agent that the run no longer needs the host, unless it is lost."""
        if not self.lost.is_set():
            with suppress(HostRefused):  # no heartbeat would detect its loss
                await self._ask("POST", "/dismiss", b"", _CONNECT_S)
        await self.close()

    async def close(self) -> None:
        """Close the connections to its agent."""
        for asking in self._insisting:
            asking.cancel()
        await self._http.aclose()

    async def call(
        self, method: str, path: str, content: bytes = b"", *, timeout_s: float = _CONTROL_S
    ) -> bytes:
        """Send a request; returns the content of the reply.

        A broken connection may be the first sign of a loss: the next heartbeats decide. Raises
        HostRefused with the agent's sentence, or HostLost.
        """
        asking = asyncio.create_task(self._reply_or_verdict(method, path, content, timeout_s))
        losing = asyncio.create_task(self.lost.wait())
        try:
            await asyncio.wait({asking, losing}, return_when=asyncio.FIRST_COMPLETED)
            if self.lost.is_set():
                raise self.error
            return asking.result()
        finally:
            for task in (asking, losing):
                task.cancel()
            await asyncio.gather(asking, losing, return_exceptions=True)

    async def _reply_or_verdict(
        self, method: str, path: str, content: bytes, timeout_s: float
    ) -> bytes:
        """As `_ask`; without a reply, raises once a heartbeat has found the host alive."""
        try:
            return await self._ask(method, path, content, timeout_s)
        except _NoReply:
            self._replied.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._replied.wait(), _CONTROL_S)
            raise

    async def _ask(self, method: str, path: str, content: bytes, timeout_s: float) -> bytes:
        timeout = httpx2.Timeout(timeout_s, connect=connect_s(self.facts.url, _CONNECT_S))
        try:
            reply = await self._http.request(method, path, content=content, timeout=timeout)
        except httpx2.TransportError as error:
            what = str(error) or type(error).__name__
            raise _NoReply(f"host {self.name} did not reply to {path} ({what})") from error
        if reply.status_code == httpx2.codes.OK:
            return reply.content
        try:
            reason = from_json(Refused, reply.content).reason
        except ValueError:
            reason = f"{path}: status {reply.status_code}"
        raise HostRefused(f"host {self.name}: {reason}")

    async def _post(self, path: str, message: object, kind: type[Reply], timeout_s: float) -> Reply:
        content = await self.call("POST", path, to_json(message), timeout_s=timeout_s)
        return from_json(kind, content)

    async def _start(
        self, path: str, request: StartEngine | StartModule, kind: type[Started], timeout_s: float
    ) -> tuple[RemoteProcess, Started]:
        number = next(self._numbers)
        try:
            started = await self._post(f"{path}/{number}", request, kind, timeout_s)
        except BaseException:
            await self.stop(number, at_once=True)  # it may have started
            raise
        process = RemoteProcess(request.name, started.pid, self, number, request.log)
        self.processes[number] = process
        return process, started


@dataclass(slots=True, eq=False)
class RemoteProcess:
    """A process on a host: a `RunningProcess`."""

    name: str
    pid: int
    host: Host
    number: int
    log: str
    ended_event: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by the heartbeat after its end."""
    _stopped: bool = False

    @property
    def running(self) -> bool:
        """True unless it is known to have ended, or its host to be lost."""
        return not (self._stopped or self.ended_event.is_set() or self.host.lost.is_set())

    async def ended(self) -> None:
        """Wait until it has ended, or its host is lost."""
        await _first(self.ended_event, self.host.lost)

    async def died(self) -> ChildDied:
        """Wait until it has ended, and describe how; or report the loss of its host."""
        await self.ended()
        if self.host.lost.is_set():
            return HostLost(f"{self.name} is lost with its host: {self.host.error}")
        try:
            return ChildDied(
                f"on host {self.host.name}: {(await self.host.end_of(self.number)).how}"
            )
        except (HostRefused, HostLost) as error:
            return ChildDied(f"{self.name} ended on host {self.host.name} ({error})")

    def ask_to_end(self) -> None:
        """Send SIGTERM, and do not wait."""
        if self.running:
            self.host.insist(f"/processes/{self.number}/end")

    async def stop(self, *, at_once: bool = False) -> None:
        """Stop it and wait; on a lost host its agent stops it. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        self.host.processes.pop(self.number, None)
        await self.host.stop(self.number, at_once=at_once)
        self.ended_event.set()

    async def peak_memory_bytes(self) -> int:
        """Largest resident memory of its process group so far; 0 if unknown."""
        try:
            return (await self.host.end_of(self.number)).peak_memory_bytes
        except (HostRefused, HostLost):
            return 0


async def _first(*events: asyncio.Event) -> None:
    """Wait until one of these events is set."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
