"""Serve ASGI applications: an HTTP parser with limits, in this program's event loop or a separate
one.

connections (as many as files allow) --BoundedProtocol--> head (at most 64 KiB, 256 fields, 60 s)
                                                      --> body --> application

Search for cycles of objects while a server is idle, instead of in the middle of calls.

Python searches after a number of new objects. Some hundred calls in flight trigger that
several times a second, and each search through all objects blocks all calls for up to
0.2 s, while reference counts free nearly all objects without it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Final

import uvicorn
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEAD_BYTES: Final = 64 * 1024
"""Limit of a request line with its header fields, and of headers between the parts of a body."""
MOST_FIELDS: Final = 256
"""Maximum header fields of a request."""
HEAD_S: Final = 60.0
"""Timeout from the first byte of a request, or from a connection without any, to the end of its
header."""
_MOST_FEED_BYTES: Final = 64 * 1024
_BACKLOG: Final = 4096
"""Connections that may wait to be accepted: a thousand agents connect at once."""
_ACCEPTED: Final = 16
"""Connections that are accepted before other work runs, and before any can be closed."""
_DESCRIPTORS: Final = 8192
"""Open files that a server needs: a connection takes one, and the usual 1,024 are too few."""
_SHARE: Final = 3
"""Part of them for connections of a server: its program has another port, and connects to others
for its clients."""
_MAKE_ROOM: Final = 16
"""Part of the idle connections that is closed when all descriptors are taken, so that this is
rare."""


class BoundedProtocol(HttpToolsProtocol):
    """HTTP protocol of uvicorn that closes connections whose heads are too large or too late.

    The parser has no limits: it keeps every byte of a header field until its end, and
    copies the field again for each part that arrives.
    """

    _silent_bytes = 0
    """Bytes received since the parser last completed a part of a request."""
    _in_head = False
    _late: asyncio.TimerHandle | None = None
    _used_s = 0.0
    """Start time of the last request, by the event loop's clock."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """A client has connected."""
        super().connection_made(transport)
        # asyncio does so for sockets that know that they are TCP, which those of `create_server`
        # do not. Otherwise each reply waits 40 ms for an acknowledgment.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._used_s = self.loop.time()
        self._late = self.loop.call_later(HEAD_S, self._too_late)
        if len(self.connections) > _open_files() // _SHARE:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._on_time()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read the next bytes; a limit also applies within them."""
        for start in range(0, len(data), _MOST_FEED_BYTES):
            part = data[start : start + _MOST_FEED_BYTES]  # the same object if it is all
            self._silent_bytes += len(part)
            super().data_received(part)
            if self.transport.is_closing():
                return
            if self._silent_bytes > MOST_HEAD_BYTES:
                self._refuse()
                return
        if self._in_head and self._late is None:
            self._late = self.loop.call_later(HEAD_S, self._too_late)

    def on_message_begin(self) -> None:
        """A request begins."""
        self._in_head = True
        self._used_s = self.loop.time()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Check a complete field; the parser turns an error into a 400."""
        if len(self.headers) >= MOST_FIELDS:
            raise ValueError(f"more than {MOST_FIELDS} header fields")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The body begins."""
        self._in_head, self._silent_bytes = False, 0
        self._on_time()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body has arrived."""
        self._silent_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request is complete."""
        self._silent_bytes = 0
        super().on_message_complete()

    def _refuse(self) -> None:
        """Close the connection, with a reply unless another one has started."""
        self._on_time()
        if self._has_replied():
            message = b"the header of the request is too large"
            self.transport.write(
                b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
                b"content-type: text/plain\r\nconnection: close\r\n"
                b"content-length: %d\r\n\r\n%s" % (len(message), message)
            )
        self.transport.close()

    def _has_replied(self) -> bool:
        """Return whether no client waits for a reply."""
        cycle: Any = self.cycle  # None before the first request
        return cycle is None or cycle.response_complete

    def _make_room(self) -> None:
        """Close the connections that are idle for longest; if no other one is idle, this one."""
        ours = (one for one in self.connections if isinstance(one, BoundedProtocol))
        idle = sorted((one for one in ours if one._has_replied()), key=lambda one: one._used_s)
        for one in idle[: 1 + len(idle) // _MAKE_ROOM]:
            one._on_time()
            one.transport.close()
            self.connections.discard(one)

    def _too_late(self) -> None:
        self._late = None
        self.transport.close()

    def _on_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class JsonReply(Response):
    """JSON in ASCII; half a surrogate pair, which a model's arguments may contain, is allowed."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body."""
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode("ascii")


class Server(uvicorn.Server):
    """Server that accepts few connections at a time, of many that may wait."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to serve."""
        _allow_connections()
        await super().startup(sockets)
        # asyncio has one number for both. If files run out, it logs an error for each connection
        # that it tries to accept, without a turn for anything else.
        for one in sockets or ():
            one.listen(_BACKLOG)


def _open_files() -> int:
    """Limit of open files of this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def _allow_connections() -> None:
    """Raise this process's limit of open files as far as allowed and needed."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if _open_files() < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class GuestServer(Server):
    """Server that leaves signals to its program."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield


def server_config(app: Any, **settings: Any) -> uvicorn.Config:
    """Settings of every server here for reading HTTP and closing."""
    return uvicorn.Config(
        app,
        http=BoundedProtocol,
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=1,
        backlog=_ACCEPTED,
        **settings,
    )


def guest_server(app: Any, **settings: Any) -> GuestServer:
    """Server of this application that logs only warnings, to the program's log."""
    return GuestServer(server_config(app, log_config=None, lifespan="off", **settings))


@asynccontextmanager
async def served(app: Any, listener: socket.socket) -> AsyncIterator[None]:
    """Serve until the end of the block."""
    server = guest_server(app)
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="serve")
    try:
        yield
    finally:
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)


_LOOK_S: Final = 1.0
_IDLE_OBJECTS: Final = 20_000
"""Number of new objects below which a pause is not worth a search."""
_BUSY_OBJECTS: Final = 250_000
"""Number of new objects after which a search does not wait for a pause. It bounds their number, not
their bytes."""


@asynccontextmanager
async def collected_in_pauses(idle: Callable[[], bool]) -> AsyncIterator[None]:
    """Search for cycles in pauses, until the end of the block.

    For a process that only serves: objects that other code leaves in cycles, such as
    tensors, stay longer than they would.
    """
    was_enabled = gc.isenabled()
    frozen = gc.get_freeze_count()
    gc.collect()
    gc.freeze()  # modules stay
    gc.disable()
    task = asyncio.create_task(_collect(idle, was_enabled))
    try:
        yield
    finally:
        task.cancel()
        if not frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()
        await asyncio.wait((task,))  # so that it does not enable a later block's collection


async def _collect(idle: Callable[[], bool], was_enabled: bool) -> None:
    kept = 0
    try:
        while True:
            await asyncio.sleep(_LOOK_S)
            # Those made less those freed since the last search.
            new = gc.get_count()[0]
            # What is kept is searched again when it has grown: during calls by a quarter, which is
            # Python's own rule, in a pause by a twentieth.
            if new > max(_BUSY_OBJECTS, kept // 4) or (
                new > max(_IDLE_OBJECTS, kept // 20) and idle()
            ):
                gc.collect()
                kept = len(gc.get_objects())
    finally:
        if was_enabled:  # also if it fails: nothing else would search
            gc.enable()
