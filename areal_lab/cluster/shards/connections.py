"""HTTP connections to host agents that read bodies into buffers of the caller.

    Connections.call(Call)         --> the reply, decoded from JSON
    Connections.read(Call, range)  --> bytes into buffers, on several connections if there are many

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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection, HTTPException, HTTPResponse
from itertools import pairwise
from typing import Any, Final
from urllib.parse import urlsplit

from areal_lab.cluster.shards.errors import (
    Damaged,
    DataPlaneError,
    OtherIncarnation,
    Refused,
    Unreachable,
)
from areal_lab.cluster.shards.replies import CHECKSUM, INCARNATION, STATUS
from areal_lab.engines.keys import authorization

CONNECT_S: Final = 5.0
"""Longest wait for a connection."""
SILENCE_S: Final = 30.0
"""Longest wait for the next bytes."""
STREAMS: Final = 4
"""Connections at once for one large read."""
LARGE_BYTES: Final = 64 << 20
"""From here on a read is cut into `STREAMS` ranges."""

_KEEP_ALIVE_S: Final = 3.0
"""Shorter than the 5 s after which uvicorn closes an idle connection."""
_PIECE_BYTES: Final = 1 << 20
_ERRORS: Final = {status: error for error, status in STATUS.items()}


@dataclass(frozen=True, slots=True)
class Agent:
    """The host agent that a request is meant for."""

    address: str
    """`HOST:PORT`."""
    incarnation: str = ""
    """Empty accepts any: for people who look, not for shards."""

    def __post_init__(self) -> None:
        parts = urlsplit(f"//{self.address}")
        try:
            complete = bool(parts.hostname and parts.port)
        except ValueError:
            complete = False
        if not complete or parts.path or parts.username:
            raise ValueError(f"the address of a host agent is {self.address!r}, but is HOST:PORT")


@dataclass(slots=True)
class Fence:
    """Which incarnation of each host is believed in; what others send is discarded.

    The failure detector calls `believe` when a host is replaced, from whatever thread: reads that
    are running then fail at their end, though their bytes arrived.
    """

    _believed: dict[str, str] = field(default_factory=dict)

    def believe(self, address: str, incarnation: str) -> None:
        """From now on, only this incarnation of the agent at this address."""
        self._believed[address] = incarnation

    def lose(self, address: str) -> None:
        """From now on, no agent at this address, until one is believed in again."""
        self._believed[address] = ""

    def check(self, agent: Agent) -> None:
        """Raise unless the agent may be believed in.

        Raises:
            OtherIncarnation: another one is.
        """
        believed = self._believed.get(agent.address, agent.incarnation)
        if agent.incarnation not in ("", believed):
            happened = f"was replaced by {believed}" if believed else "is lost"
            raise OtherIncarnation(
                f"the agent at {agent.address} of incarnation {agent.incarnation} {happened}: what "
                "it held is gone, and what it still sends is discarded"
            )


@dataclass(frozen=True, slots=True)
class Call:
    """One request."""

    agent: Agent
    method: str
    path: str
    what: str
    """What it is about, for messages: `shard 'a' of n1`."""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: memoryview | None = None
    silence_s: float | None = None
    """Longest wait for the next bytes, if another than the connections'."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a reply said about the bytes in it."""

    size_bytes: int
    """Of the whole shard or file."""
    read_bytes: int
    checksum: str
    """Of the whole shard or file."""


class Connections:
    """Connections to all hosts of a run."""

    def __init__(
        self,
        key: str,
        *,
        fence: Fence | None = None,
        connect_s: float = CONNECT_S,
        silence_s: float = SILENCE_S,
        streams: int = STREAMS,
    ) -> None:
        self.fence = fence or Fence()
        self._authorization = authorization(key)
        self._connect_s = connect_s
        self._silence_s = silence_s
        self.streams = streams
        """Connections at once for one large read, or one folder."""
        self._pool = ThreadPoolExecutor(streams, thread_name_prefix="fetch")
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
        """End running requests, close idle connections, and end the threads."""
        with self._lock:
            self._closed = True
            self._drop(list(self._used))
        self._pool.shutdown(cancel_futures=True)
        with self._lock:
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
        self.fence.check(call.agent)
        try:
            return json.loads(text)
        except ValueError as error:
            raise Damaged(f"{_name(call)}: the reply is no JSON") from error

    def read_start(self, call: Call, target: memoryview) -> Part:
        """Read the first bytes of a shard or file, at most as many as the target has.

        Raises:
            DataPlaneError: as the host says, or because it cannot be reached.
        """
        return self._read_range(call, 0, [target], least=False)

    def read(self, call: Call, start: int, targets: Sequence[memoryview]) -> str:
        """Read bytes from `start` on until the targets are full, one after the other.

        Returns:
            The checksum of the whole shard or file, as the host says; empty if nothing was read.

        Raises:
            DataPlaneError: as the host says, or because it cannot be reached.
        """
        size = sum(map(len, targets))
        if size < LARGE_BYTES or self.streams == 1:
            return self._read_range(call, start, targets).checksum
        ends = [size * part // self.streams for part in range(self.streams + 1)]
        running = [
            self._pool.submit(self._read_range, call, start + low, _cut(targets, low, high))
            for low, high in pairwise(ends)
        ]
        # Wait for all: a caller whose read failed may use the buffers for something else.
        errors = [error for one in running if (error := one.exception()) is not None]
        if errors:
            raise errors[0]
        return running[0].result().checksum

    def _read_range(
        self, call: Call, start: int, targets: Sequence[memoryview], *, least: bool = True
    ) -> Part:
        wanted = sum(map(len, targets))
        if not wanted:
            return Part(0, 0, "")
        headers = {**call.headers, "range": f"bytes={start}-{start + wanted - 1}"}
        asked = replace(call, headers=headers)
        with self._reply(asked) as reply:
            size_bytes, announced = _announced(asked, reply, start)
            if announced > wanted or (least and announced < wanted):
                raise Damaged(f"{_name(call)}: {announced:,} bytes instead of {wanted:,}")
            left = announced
            for target in targets:
                at = 0
                while left and at < len(target):
                    count = reply.readinto(target[at : at + left])
                    if not count:
                        raise Unreachable(
                            f"{_name(call)}: the connection closed after {announced - left:,} of "
                            f"{announced:,} bytes; the agent ended, or its host was lost"
                        )
                    at += count
                    left -= count
            checksum = reply.headers.get(CHECKSUM, "")
        self.fence.check(call.agent)
        return Part(size_bytes, announced, checksum)

    @contextmanager
    def _reply(self, call: Call) -> Iterator[HTTPResponse]:
        """The reply of a request, with a status of success; the body is for the caller to read."""
        self.fence.check(call.agent)
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
        if call.body is not None:
            headers["content-length"] = str(len(call.body))
        while True:
            connection, used = self._connection(call.agent.address)
            connection.sock.settimeout(call.silence_s or self._silence_s)
            try:
                # In pieces: the timeout of a socket is for all bytes of one call.
                body = None if call.body is None else _pieces(call.body)
                connection.request(call.method, call.path, body, headers)
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


def _announced(call: Call, reply: HTTPResponse, start: int) -> tuple[int, int]:
    """Bytes of the whole, and in this reply."""
    announced = reply.length
    content_range = reply.headers.get("content-range", "")
    first, _, whole = content_range.removeprefix("bytes ").partition("-")
    whole = whole.partition("/")[2]
    if announced is None or reply.status != 206 or first != str(start) or not whole.isdigit():
        raise Damaged(f"{_name(call)}: the reply is not the range that was asked for")
    return int(whole), announced


def _refusal(call: Call, reply: HTTPResponse) -> DataPlaneError:
    text = reply.read(1 << 16).decode(errors="replace")
    try:
        text = json.loads(text)["error"]["message"]
    except (KeyError, TypeError, ValueError):
        pass  # not ours: shown as it is
    kind = _ERRORS.get(reply.status, Refused)
    return kind(f"{_name(call)}: {text[:500]} (HTTP {reply.status})")


def _pieces(body: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(body), _PIECE_BYTES):
        yield body[start : start + _PIECE_BYTES]


def _name(call: Call) -> str:
    return f"{call.method} {call.what} at {call.agent.address}"


def _cut(targets: Sequence[memoryview], start: int, end: int) -> list[memoryview]:
    """Bytes `[start, end)` of the targets, as if they were one."""
    found, at = [], 0
    for target in targets:
        low, high = max(start - at, 0), min(end - at, len(target))
        if low < high:
            found.append(target[low:high])
        at += len(target)
    return found
