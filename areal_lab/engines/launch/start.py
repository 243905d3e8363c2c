"""Start inference servers as child processes: embedded, SGLang or vLLM.

    reserve a port --> start the server --> GET /ready --> does it own the port? --> EngineProcess
          ^                                                          | no
          +---------------- another port, if port is 0 --------------+

The embedded engine inherits the bound socket, so no other process can take its port. SGLang and
vLLM open their port themselves, many seconds later. Until then a socket here reserves it, bound but
not listening, so that the system does not give it to another process as a free one. If a process
binds it explicitly, that is detected.

The temporary folder of a server, with a list of its shared memory, removed with it.

start --> create the folder, list the server's shared memory in it --> stop: remove both
this process is killed     the server removes both (`in_engine`)
both are killed at once    the next start of a server removes both
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import errno
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import httpx2

from areal_lab.engines.client.engine_client import EngineClient
from areal_lab.engines.keys import KEY_VARIABLE, authorization, new_key
from areal_lab.engines.launch.backends import EMBEDDED, Backend, Build, ServerOptions, backend_of
from areal_lab.engines.launch.detect import dialect_of
from areal_lab.engines.launch.environments import engine_version, python_of
from areal_lab.engines.launch.options import (
    HOST,
    fit_to_machine,
    server_command,
    server_environment,
)
from areal_lab.engines.weights.verify_folder import read_folder_here, read_manifest_here
from areal_lab.host.certificates import certificates_for
from areal_lab.host.owned_folders import (
    make_owned_folder,
    remove_abandoned_folders,
    remove_owned_folder,
)
from areal_lab.host.ports import Listener, listener_of, name_of, who_listens
from areal_lab.host.process_groups import SHARED_MEMORY, Segments, members, remove_segments
from areal_lab.host.processes import ChildDied, RunningProcess, last_lines, start_command

EVERYWHERE: Final = "0.0.0.0"
ATTEMPTS: Final = 3
"""Maximum number of ports tried when the port is 0."""
_POLL_S = 0.05
_GONE_S = 10.0  # a killed process may be in an uninterruptible wait
SCRATCH: Final = "AREAL_LAB_SCRATCH"
"""Environment variable of a server: a folder to remove when the parent is gone."""
_IN_USE: Final = ("address already in use", "errno 98", "port is already in use", "eaddrinuse")
"""Error messages of servers whose port is taken, in lower case."""


class PortTaken(RuntimeError):
    """Another process listens on the port of a server."""


@dataclass(frozen=True, slots=True)
class Scratch:
    """Temporary folder and shared memory to remove after a server."""

    folder: Path
    _segments: Segments = field(default_factory=Segments)
    _groups: set[int] = field(default_factory=set)
    """Process group of the server, once it is known."""

    @staticmethod
    def make() -> Scratch:
        """Create the folder before a server is started, and remove abandoned ones."""
        parent = Path(tempfile.gettempdir())
        remove_abandoned_folders(parent, _remove_listed)
        scratch = Scratch(make_owned_folder(parent, mode=0o700))
        # In case a server was killed and its `stop` was cancelled before the removal.
        atexit.register(scratch.remove_at_exit)
        return scratch

    def record_segments(self, group: int) -> None:
        """Record the shared memory of the server's processes while they are alive."""
        self._groups.add(group)
        if self._segments.record(group):
            (self.folder / _LIST).write_text("\n".join(map(str, (group, *self._segments.found))))

    def remove_at_exit(self) -> None:
        """Remove everything, though processes of the server may not have ended yet."""
        for group in self._groups or {_NO_GROUP}:
            self.remove(group)

    def remove(self, group: int) -> None:
        """Remove everything after the server's processes have ended. Idempotent."""
        remove_segments(self._segments.found, group)
        remove_owned_folder(self.folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProcess:
    """A running engine and the connection to it."""

    child: RunningProcess
    client: EngineClient
    base_url: str
    backend: str = "embedded"
    version: str = ""
    """Version of the engine's package."""
    build: Build = "cpu"
    _scratch: Scratch | None = field(default=None, repr=False)

    def record_segments(self) -> None:
        """Record its shared memory, so that it is removed even if the server dies first."""
        if self._scratch is not None:
            self._scratch.record_segments(self.child.pid)

    async def stop(self, *, at_once: bool = False) -> None:
        """Close the connection, stop the process, remove the files that it leaves behind.
        Idempotent.
        """
        try:
            await self.client.close()
        finally:
            self.record_segments()
            # SGLang checks for SIGTERM every five seconds and then waits for its requests, whose
            # clients are gone; nothing in it is worth the wait.
            await self.child.stop(at_once=at_once or self._scratch is not None)
        if self._scratch is not None:
            await _wait_until_gone(self.child.pid)
            await asyncio.to_thread(self._scratch.remove, self.child.pid)


async def launch_engine(
    backend: str,
    options: ServerOptions,
    *,
    index: int = 0,
    place: int | None = None,
    log_path: Path,
    ready_timeout_s: float = 300.0,
    request_timeout_s: float | None = None,
    key: str = "",
) -> EngineProcess:
    """Start an engine and wait until it is ready.

    The options are fitted to this machine; port 0 takes a free port, and another one if that is
    taken meanwhile. `place` is the number of the engine on this machine, which selects its GPUs;
    None is `index`. An empty `key` becomes a random one.
    """
    facts = backend_of(backend)
    options = fit_to_machine(facts, options)
    start = Start(
        backend=facts,
        python=python_of(backend),
        version=engine_version(backend),
        index=index,
        place=index if place is None else place,
        log_path=log_path,
        ready_timeout_s=ready_timeout_s,
        request_timeout_s=request_timeout_s,
        key=key,
    )
    return await start_server(start, options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Options for starting a server, in addition to its own options."""

    backend: Backend
    python: Path
    version: str = ""
    """Version of the engine's package."""
    index: int
    place: int = 0
    """Number of the engine on this machine."""
    log_path: Path
    ready_timeout_s: float
    request_timeout_s: float | None
    key: str = field(default="", repr=False)
    """The server's key; empty takes a random one."""


async def start_server(start: Start, options: ServerOptions) -> EngineProcess:
    """Start a server and wait until it is ready; with port 0, retry if its port is taken."""
    attempts = ATTEMPTS if options.port == 0 else 1
    for attempt in range(1, attempts + 1):
        try:
            return await _start_once(start, options)
        except PortTaken:
            if attempt == attempts:
                raise
    raise AssertionError("unreachable: the last attempt returns or raises")


async def _start_once(start: Start, options: ServerOptions) -> EngineProcess:
    name, key = f"engine {start.index}", start.key or new_key()
    logged = start.log_path.stat().st_size if start.log_path.exists() else 0
    with bind(options.port, options.host) as reservation, _scratch_of(start.backend) as scratch:
        options = replace(options, port=reservation.getsockname()[1])
        inherit_socket = start.backend is EMBEDDED
        child = await start_command(
            name,
            server_command(start.backend, start.python, options)
            + (["--socket-fd", str(reservation.fileno())] if inherit_socket else []),
            log_path=start.log_path,
            environment=server_environment(start.backend, start.python, options, start.place)
            | {KEY_VARIABLE: key}
            | ({} if scratch is None else dict.fromkeys(("TMPDIR", SCRATCH), str(scratch.folder))),
            pass_fds=(reservation.fileno(),) if inherit_socket else (),
        )
        # 0.0.0.0 is an address to listen on, not to connect to.
        base_url = f"http://{HOST if options.host == EVERYWHERE else options.host}:{options.port}"
        engine = EngineProcess(
            child=child,
            client=EngineClient(
                base_url,
                api=dialect_of(start.backend, options.build),
                request_timeout_s=start.request_timeout_s,
                key=key,
                read_folder=read_manifest_here
                if start.backend.verifies_folders
                else read_folder_here,
            ),
            base_url=base_url,
            backend=start.backend.name,
            version=start.version,
            build=options.build,
            _scratch=scratch,
        )
        try:
            async with asyncio.timeout(start.ready_timeout_s):
                await _wait_until_ready(engine, start.backend, options)
        except BaseException as error:
            await engine.stop()
            if isinstance(error, TimeoutError):
                raise TimeoutError(
                    f"{name} was not ready within {start.ready_timeout_s:g} s; the last lines of "
                    f"{start.log_path}:\n{last_lines(start.log_path)}"
                ) from error
            if isinstance(error, ChildDied) and _reports_port_in_use(start.log_path, logged):
                raise _taken(name, options.port) from error
            raise
    engine.client.note_model(options.model)
    if options.tokenizer is not None:
        engine.client.note_tokenizer(options.tokenizer)
    if options.lora is not None:
        engine.client.use_adapters(int(options.version))
    return engine


def check_host(host: str) -> None:
    """Refuse a host on which no server here can listen."""
    if not host:
        raise _wrong_host(host, "it is empty")
    bind(0, host).close()


def bind(port: int, host: str = HOST) -> socket.socket:
    """A TCP socket bound to this port, not listening yet; 0 takes a free port."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        # The port of a run that has just stopped counts as free, one in use does not. The server
        # may also bind the port while it is reserved here: both set this option, one listens.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError, UnicodeError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        if _is_about_host(error):
            raise _wrong_host(host, reason.lower()) from error
        raise ValueError(f"port {port} is not available for an engine: {reason}") from error
    return listener


def _is_about_host(error: Exception) -> bool:
    unknown = isinstance(error, socket.gaierror | UnicodeError)
    return unknown or getattr(error, "errno", None) == errno.EADDRNOTAVAIL


def _wrong_host(host: str, reason: str) -> ValueError:
    return ValueError(
        f"--host is {host!r}, but must be an address of this machine, such as {HOST}, "
        f"or {EVERYWHERE} for all of them ({reason})"
    )


async def _wait_until_ready(
    engine: EngineProcess, backend: Backend, options: ServerOptions
) -> None:
    died = asyncio.ensure_future(engine.child.died())
    try:
        async with httpx2.AsyncClient(
            base_url=engine.base_url,
            headers=authorization(engine.client.key),
            trust_env=False,
            verify=certificates_for(engine.base_url),
        ) as http:
            while not died.done():
                if await _is_ready(http, engine, backend, options):
                    await _check_guarded(http, engine.child.name, backend)
                    if backend.version_path:
                        body = {"new_version": options.version}
                        (await http.post(backend.version_path, json=body)).raise_for_status()
                    return
                await asyncio.wait({died}, timeout=_POLL_S)
        raise died.result()
    finally:
        died.cancel()
        with contextlib.suppress(asyncio.CancelledError, ChildDied):
            await died


async def _is_ready(
    http: httpx2.AsyncClient, engine: EngineProcess, backend: Backend, options: ServerOptions
) -> bool:
    """Return whether the server is ready."""
    who = who_listens(options.port, engine.child.pid)
    engine.record_segments()
    match who:
        case Listener.NONE:
            return False
        case Listener.OTHER:
            raise _taken(engine.child.name, options.port)
    try:
        reply = await http.get(backend.ready_path)
    except httpx2.TransportError:
        return False
    return reply.status_code == httpx2.codes.OK


async def _check_guarded(http: httpx2.AsyncClient, name: str, backend: Backend) -> None:
    """Check that a request without the key is refused."""
    request = http.build_request("GET", backend.ready_path)
    del request.headers["authorization"]
    if (await http.send(request)).status_code != httpx2.codes.UNAUTHORIZED:
        raise ValueError(
            f"{name} replies to requests without its key, so any user of this machine could use "
            "it; leave out the extra arguments of the server (rollout.engine_args)"
        )


async def _wait_until_gone(group: int) -> None:
    """Wait until the killed processes have released port and memory."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_GONE_S):
            while any(members(group)):
                await asyncio.sleep(_POLL_S)


def _taken(name: str, port: int) -> PortTaken:
    holder = listener_of(port)
    who = "another process" if holder is None else f"process {name_of(holder)}"
    return PortTaken(
        f"port {port} was taken by {who} while {name} was starting; choose another port, or 0 "
        "for a free one"
    )


def _reports_port_in_use(log_path: Path, since: int) -> bool:
    with log_path.open("rb") as log:
        log.seek(since)
        text = log.read().decode(errors="replace").lower()
    return any(words in text for words in _IN_USE)


@contextmanager
def _scratch_of(backend: Backend) -> Iterator[Scratch | None]:
    """A folder for the files of a server; removed here only on an error."""
    if not backend.own_environment:
        yield None
        return
    scratch = Scratch.make()
    try:
        yield scratch
    except BaseException:
        remove_owned_folder(scratch.folder)
        raise


_LIST = "shared_memory"
_NO_GROUP = 0
"""No exception: memory that any process maps stays."""


def _remove_listed(folder: Path) -> None:
    try:
        first, *listed = (folder / _LIST).read_text().splitlines()
        group = int(first)
    except (OSError, ValueError):
        return  # the server had no shared memory, or was killed while this was written
    paths = map(Path, listed)
    remove_segments([one for one in paths if one.parent == SHARED_MEMORY], group)
