"""HTTP connections to host agents that read bodies into buffers of the caller.

    Connections.call(Call)         --> the reply, decoded from JSON
    Connections.read(Call, range)  --> bytes into a buffer

`http.client` reads from the socket into the buffer: a quarter of the seconds that clients take that
collect a body first. Idle connections are used again. Blocks; safe in several threads.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any, Final
from urllib.parse import urlsplit

from areal_lab.cluster.folders.replies import (
    CHECKSUM,
    INCARNATION,
    STATUS,
    Damaged,
    DataPlaneError,
    OtherIncarnation,
    Refused,
    Unreachable,
)
from areal_lab.engines.keys import authorization

CONNECT_S: Final = 5.0
"""Longest wait for a connection."""
SILENCE_S: Final = 30.0
"""Longest wait for the next bytes."""
STREAMS: Final = 4
"""Connections at once for one folder."""

_KEEP_ALIVE_S: Final = 3.0
"""Shorter than the 5 s after which uvicorn closes an idle connection."""
_ERRORS: Final = {status: error for error, status in STATUS.items()}


@dataclass(frozen=True, slots=True)
class Agent:
    """The host agent that a request is meant for."""

    address: str
    """`HOST:PORT`."""
    incarnation: str = ""
    """Empty accepts any: for people who look."""

    def __post_init__(self) -> None:
        parts = urlsplit(f"//{self.address}")
        try:
            complete = bool(parts.hostname and parts.port)
        except ValueError:
            complete = False
        if not complete or parts.path or parts.username:
            raise ValueError(f"the address of a host agent is {self.address!r}, but is HOST:PORT")


@dataclass(frozen=True, slots=True)
class Call:
    """One request."""

    agent: Agent
    method: str
    path: str
    what: str
    """What it is about, for messages: `folder http://...`."""
    headers: Mapping[str, str] = field(default_factory=dict)
    silence_s: float | None = None
    """Longest wait for the next bytes, if another than the connections'."""


class Connections:
    """Connections to all hosts of a run."""

    def __init__(
        self,
        key: str,
        *,
        connect_s: float = CONNECT_S,
        silence_s: float = SILENCE_S,
        streams: int = STREAMS,
    ) -> None:
        self._authorization = authorization(key)
        self._connect_s = connect_s
        self._silence_s = silence_s
        self.streams = streams
        """Connections at once for one folder."""
        self._lock = threading.Lock()
        self._idle: dict[str, list[tuple[float, HTTPConnection]]] = defaultdict(list)
        self._used: dict[HTTPConnection, tuple[str, socket.socket]] = {}
        """Of running requests, with the address of the agent."""
        self._closed = False

    def drop(self, address: str) -> None:
        """End the running requests to an agent, which is lost: they would wait for its silence."""
        with self._lock:
            self._drop([one for one, (agent, _) in self._used.items() if agent == address])

    def close(self) -> None:
        """End running requests, and close idle connections."""
        with self._lock:
            self._closed = True
            self._drop(list(self._used))
            for idle in self._idle.values():
                for _, connection in idle:
                    connection.close()
            self._idle.clear()

    def call(self, call: Call) -> Any:
        """Send a request and decode its reply from JSON.

        Raises:
            DataPlaneError: as the host says, or because it cannot be reached.
        """
        with self._reply(call) as reply:
            text = reply.read()
        try:
            return json.loads(text)
        except ValueError as error:
            raise Damaged(f"{_name(call)}: the reply is no JSON") from error

    def read(self, call: Call, start: int, target: memoryview) -> str:
        """Read bytes of a file from `start` on until the target is full.

        Returns:
            The checksum of the whole file, as the host says; empty if nothing was read.

        Raises:
            DataPlaneError: as the host says, or because it cannot be reached.
        """
        wanted = len(target)
        if not wanted:
            return ""
        headers = {**call.headers, "range": f"bytes={start}-{start + wanted - 1}"}
        asked = replace(call, headers=headers)
        with self._reply(asked) as reply:
            announced = _announced(asked, reply, start)
            if announced != wanted:
                raise Damaged(f"{_name(call)}: {announced:,} bytes instead of {wanted:,}")
            at = 0
            while at < wanted:
                count = reply.readinto(target[at:])
                if not count:
                    raise Unreachable(
                        f"{_name(call)}: the connection closed after {at:,} of {wanted:,} bytes; "
                        "the agent ended, or its host was lost"
                    )
                at += count
            checksum: str = reply.headers.get(CHECKSUM, "")
        return checksum

    @contextmanager
    def _reply(self, call: Call) -> Iterator[HTTPResponse]:
        """The reply of a request, with a status of success; the body is for the caller to read."""
        connection = None
        try:
            connection, reply = self._sent(call)
            if reply.status >= 300:
                raise _refusal(call, reply)
            self._check_incarnation(call, reply)
            yield reply
            if reply.isclosed() and not reply.will_close:
                with self._lock:
                    self._used.pop(connection, None)
                    self._idle[call.agent.address].append((time.monotonic(), connection))
                connection = None
        except TimeoutError as error:
            raise Unreachable(
                f"{_name(call)}: silent for {call.silence_s or self._silence_s:g} s (or no "
                f"connection in {self._connect_s:g} s); check that the agent runs and the network "
                "reaches it"
            ) from error
        except (OSError, HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise Unreachable(
                f"{_name(call)}: {reason}; check that the agent runs and its address is right"
            ) from error
        finally:
            if connection is not None:
                self._end(connection)

    def _sent(self, call: Call) -> tuple[HTTPConnection, HTTPResponse]:
        """Send a request, once more if an idle connection turns out to be closed."""
        headers = {**self._authorization, **call.headers}
        if call.agent.incarnation:
            headers[INCARNATION] = call.agent.incarnation
        while True:
            connection, used = self._connection(call.agent.address)
            connection.sock.settimeout(call.silence_s or self._silence_s)
            try:
                connection.request(call.method, call.path, headers=headers)
                return connection, connection.getresponse()
            except BaseException as error:
                dropped = not self._end(connection)
                broken = isinstance(error, ConnectionError | HTTPException)
                if dropped or not (broken and used):
                    raise

    def _connection(self, address: str) -> tuple[HTTPConnection, bool]:
        """A connection, and whether it was used before."""
        now_s = time.monotonic()
        with self._lock:
            idle = self._idle[address]
            while idle:
                since_s, connection = idle.pop()
                if now_s - since_s < _KEEP_ALIVE_S:
                    self._used[connection] = address, connection.sock
                    return connection, True
                connection.close()
        parts = urlsplit(f"//{address}")
        assert parts.hostname is not None
        connection = HTTPConnection(parts.hostname, parts.port, timeout=self._connect_s)
        connection.connect()
        with self._lock:
            if self._closed:
                connection.close()
                raise ConnectionAbortedError("connections to hosts were closed")
            self._used[connection] = address, connection.sock
        return connection, False

    def _end(self, connection: HTTPConnection) -> bool:
        """Close a connection; returns whether it was not dropped."""
        with self._lock:
            ours = self._used.pop(connection, None) is not None
        connection.close()
        return ours

    def _drop(self, connections: Sequence[HTTPConnection]) -> None:
        """End the reads of other threads."""
        for one in connections:
            _, opened = self._used.pop(one)
            with suppress(OSError):  # it has ended
                opened.shutdown(socket.SHUT_RDWR)

    def _check_incarnation(self, call: Call, reply: HTTPResponse) -> None:
        replied = reply.headers.get(INCARNATION)
        if call.agent.incarnation not in ("", replied):
            raise OtherIncarnation(
                f"{_name(call)}: incarnation {replied} replied instead of "
                f"{call.agent.incarnation}; its bytes are discarded"
            )


def _announced(call: Call, reply: HTTPResponse, start: int) -> int:
    """Bytes in this reply."""
    announced = reply.length
    content_range = reply.headers.get("content-range", "")
    first, _, whole = content_range.removeprefix("bytes ").partition("-")
    whole = whole.partition("/")[2]
    if announced is None or reply.status != 206 or first != str(start) or not whole.isdigit():
        raise Damaged(f"{_name(call)}: the reply is not the range that was asked for")
    return announced


def _refusal(call: Call, reply: HTTPResponse) -> DataPlaneError:
    text = reply.read(1 << 16).decode(errors="replace")
    try:
        text = json.loads(text)["error"]["message"]
    except (KeyError, TypeError, ValueError):
        pass  # not ours: shown as it is
    kind = _ERRORS.get(reply.status, Refused)
    return kind(f"{_name(call)}: {text[:500]} (HTTP {reply.status})")


def _name(call: Call) -> str:
    return f"{call.method} {call.what} at {call.agent.address}"
