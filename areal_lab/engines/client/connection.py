"""The HTTP connection to one server: replies, streams of messages, errors that name the server.

Connection.call(Call) --> the reply, decoded
Connection.messages(Call) --> the messages of a reply, streamed or whole

Request timeouts that stop while we have paused the engine.

async with timeouts.request() as timeout:     TimeoutError after `limit_s` without a message
    ... timeout.restart() ...                 a message arrived: the time starts over
timeouts.pause(), timeouts.resume()           around a pause of the engine, however long
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx2

from areal_lab.engines.client.dialect import Call, Reply
from areal_lab.engines.keys import authorization
from areal_lab.engines.protocol import EngineError, EngineUnreachable, RequestRefused
from areal_lab.host.certificates import certificates_for
from areal_lab.host.ports import connect_s

_CONNECT_S = 10.0
_STATUS_S = 60.0
"""A server on a busy machine may take long."""
_KEEP_ALIVE_S = 3.0
"""Shorter than the 5 s after which common servers close an idle connection: a request sent at
that moment would fail."""
_EVENT = b"data: "
_LAST_EVENT = b"[DONE]"
_LONGEST_REASON = 500
_LONGEST_EXCERPT = 100
"""Bytes shown of an unreadable reply."""


class Connection:
    """Requests to one server."""

    def __init__(
        self,
        base_url: str,
        *,
        timeout_s: float,
        key: str = "",
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        """Create a connection; nothing is sent yet."""
        self.base_url = base_url.rstrip("/")
        self.timeout_s = timeout_s
        """Longest wait for the reply to a `call`."""
        self._connect_s = connect_s(base_url, _CONNECT_S)
        self._timeout = httpx2.Timeout(timeout_s, connect=self._connect_s)
        self._http = httpx2.AsyncClient(
            base_url=self.base_url,
            headers=authorization(key),
            limits=httpx2.Limits(max_connections=None, keepalive_expiry=_KEEP_ALIVE_S),
            trust_env=False,  # engines are addressed directly, never through a proxy
            verify=certificates_for(base_url),
            transport=transport,
        )

    async def call(self, call: Call) -> Reply:
        """Send a request; returns its reply, or `{}` if that is not JSON."""
        self._check_open(call)
        try:
            reply = await self._http.request(
                call.method, call.path, json=call.body, timeout=self._timeout
            )
        except httpx2.TransportError as error:
            raise self.unreachable(call, _describe(error)) from error
        if reply.is_error:
            raise self._refused(call, reply)
        is_json = reply.headers.get("content-type", "").startswith("application/json")
        return self._decoded(call, reply.content) if is_json else {}

    async def messages(self, call: Call) -> AsyncGenerator[Reply, None]:
        """Send a request and yield the messages of its reply; the caller applies the timeout."""
        self._check_open(call)
        timeout = httpx2.Timeout(None, connect=self._connect_s)
        try:
            async with self._http.stream(
                call.method, call.path, json=call.body, timeout=timeout
            ) as reply:
                if reply.is_error:
                    await reply.aread()
                    refused = self._refused(call, reply)
                    match reply.status_code:
                        case httpx2.codes.BAD_REQUEST:
                            raise RequestRefused(str(refused))
                        case httpx2.codes.INTERNAL_SERVER_ERROR:
                            raise EngineUnreachable(str(refused))
                    raise refused
                async for message in self._messages(call, reply):
                    yield message
        except httpx2.TransportError as error:
            raise self.unreachable(call, _describe(error)) from error

    async def status(self, call: Call) -> int | None:
        """The HTTP status, or None without a prompt reply; never raises for a silent server."""
        if self._http.is_closed:
            return None
        try:
            reply = await self._http.request(call.method, call.path, timeout=_STATUS_S)
        except httpx2.TransportError:
            return None
        return reply.status_code

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    def unreachable(self, call: Call, what: str) -> EngineUnreachable:
        """Error of a server that is gone."""
        return EngineUnreachable(
            f"engine {self.base_url} is unreachable ({call.method} {call.path}: {what})"
        )

    @contextmanager
    def named(self) -> Iterator[None]:
        """Add the server's address to errors about its replies."""
        try:
            yield
        except EngineError as error:
            raise type(error)(f"engine {self.base_url}: {error}") from error

    def _check_open(self, call: Call) -> None:
        """Fail if the connection was closed, as happens between calls when the server is lost."""
        if self._http.is_closed:
            raise self.unreachable(call, "the connection was closed")

    async def _messages(self, call: Call, reply: httpx2.Response) -> AsyncIterator[Any]:
        """Events of a stream, or the parts of a whole reply."""
        if not reply.headers.get("content-type", "").startswith("text/event-stream"):
            whole = self._decoded(call, await reply.aread())
            for index, one in enumerate(whole if isinstance(whole, list) else [whole]):
                yield {**one, "index": index} if isinstance(one, dict) else one
            return
        rest = b""
        async for part in reply.aiter_bytes():
            *events, rest = (rest + part).split(b"\n\n")
            for event in events:
                data = event.removeprefix(_EVENT)
                if data != _LAST_EVENT:
                    yield self._decoded(call, data)

    def _decoded(self, call: Call, data: bytes) -> Any:
        """Decode JSON; a server that sends malformed JSON counts as lost: its state is unknown."""
        try:
            return json.loads(data)
        except ValueError as error:
            start = data[:_LONGEST_EXCERPT].decode(errors="replace")
            raise EngineUnreachable(
                f"engine {self.base_url} sent malformed JSON in reply to {call.method} "
                f"{call.path} ({error}): {start!r}{'...' * (len(data) > _LONGEST_EXCERPT)}"
            ) from error

    def _refused(self, call: Call, reply: httpx2.Response) -> EngineError:
        # A server that has another key now was restarted; ours is gone.
        is_other = reply.status_code == httpx2.codes.UNAUTHORIZED
        return (EngineUnreachable if is_other else EngineError)(
            f"engine {self.base_url} refused {call.method} {call.path} "
            f"({reply.status_code}): {_reason(reply)}"
        )


def _describe(error: httpx2.TransportError) -> str:
    return str(error) or type(error).__name__


def _reason(reply: httpx2.Response) -> str:
    try:
        body = reply.json()
    except ValueError:
        return " ".join(reply.text.split())[:_LONGEST_REASON]
    candidates: Iterable[object] = (
        (body.get("error"), body.get("message"), body.get("detail"), body.get("error_message"))
        if isinstance(body, dict)
        else (body,)
    )
    for found in candidates:
        message = found.get("message") if isinstance(found, dict) else found
        if message:
            return " ".join(str(message).split())
    return str(body)[:_LONGEST_REASON]


class RequestTimeout:
    """The timeout of one request."""

    def __init__(self, timeout: asyncio.Timeout, limit_s: float | None) -> None:
        self._timeout = timeout
        self._limit_s = limit_s
        self._paused = False

    def restart(self) -> None:
        """Restart the timeout: a message arrived."""
        self.arm(paused=self._paused)

    def arm(self, *, paused: bool) -> None:
        """Restart the timeout, or stop it while `paused`."""
        self._paused = paused
        if self._timeout.expired() or self._limit_s is None:
            return
        now_s = asyncio.get_running_loop().time()
        self._timeout.reschedule(None if paused else now_s + self._limit_s)


class RequestTimeouts:
    """The timeouts of all requests of one client."""

    def __init__(self, limit_s: float | None) -> None:
        self.limit_s = limit_s
        self._active: set[RequestTimeout] = set()
        self._paused = False

    @asynccontextmanager
    async def request(self) -> AsyncIterator[RequestTimeout]:
        """Raise `TimeoutError` inside the block after `limit_s` without a message."""
        async with asyncio.timeout(None) as timeout:
            one = RequestTimeout(timeout, self.limit_s)
            one.arm(paused=self._paused)
            self._active.add(one)
            try:
                yield one
            finally:
                self._active.discard(one)

    def pause(self) -> None:
        """Stop every timeout: no message is expected from now on."""
        self._set(True)

    def resume(self) -> None:
        """Restart the timeout of every request: messages are expected again."""
        self._set(False)

    def _set(self, paused: bool) -> None:
        self._paused = paused
        for one in self._active:
            one.arm(paused=paused)
