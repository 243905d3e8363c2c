"""HTTP to one server: answers, streams of messages, and errors that name the server.

Connection.call(Call) --> the answer, decoded
Connection.messages(Call) --> one message after the other, however many the answer comes in
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from areal_lab.engines.client.dialect import Answer, Call
from areal_lab.engines.errors import EngineError, EngineUnreachable

_CONNECT_S = 10.0
_KEEP_ALIVE_S = 3.0
"""Shorter than the 5 s after which common servers close an idle connection, which a request sent
just then would run into."""
_EVENT = b"data: "
_LAST_EVENT = b"[DONE]"
_LONGEST_REASON = 500
_LONGEST_EXCERPT = 100
"""Bytes shown of what cannot be read."""


class Connection:
    """Requests to one server."""

    def __init__(
        self, base_url: str, *, timeout_s: float, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        """Nothing is sent yet.

        Args:
            base_url: as in `http://127.0.0.1:30000`.
            timeout_s: longest wait for the answer to a `call`.
            transport: instead of the network, for tests.
        """
        self.base_url = base_url.rstrip("/")
        self.timeout_s = timeout_s
        """Longest wait for the answer to a `call`."""
        self._timeout = httpx.Timeout(timeout_s, connect=_CONNECT_S)
        self._http = httpx.AsyncClient(
            base_url=self.base_url,
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_KEEP_ALIVE_S),
            trust_env=False,  # engines are addressed directly, never through a proxy
            transport=transport,
        )

    async def call(self, call: Call) -> Answer:
        """Send a request; its answer, or `{}` if that is no JSON.

        Raises:
            EngineUnreachable: if there is no answer in time, or it is malformed JSON.
            EngineError: if it is an error.
        """
        self._check_open(call)
        try:
            answer = await self._http.request(
                call.method, call.path, json=call.body, timeout=self._timeout
            )
        except httpx.TransportError as error:
            raise self.unreachable(call, _what(error)) from error
        if answer.is_error:
            raise self._refused(call, answer)
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        return self._decoded(call, answer.content) if is_json else {}

    async def messages(self, call: Call) -> AsyncGenerator[Answer, None]:
        """Send a request and hand on the messages of its answer; patience is the caller's business.

        Raises:
            EngineUnreachable: if the connection is lost, the server says that it is broken, or
                sends malformed JSON.
            EngineError: if the answer is another error.
        """
        self._check_open(call)
        timeout = httpx.Timeout(None, connect=_CONNECT_S)
        try:
            async with self._http.stream(
                call.method, call.path, json=call.body, timeout=timeout
            ) as answer:
                if answer.is_error:
                    await answer.aread()
                    refused = self._refused(call, answer)
                    # Of a request that it will not serve a server says 400.
                    broken = answer.status_code == httpx.codes.INTERNAL_SERVER_ERROR
                    raise EngineUnreachable(str(refused)) if broken else refused
                async for message in self._messages(call, answer):
                    yield message
        except httpx.TransportError as error:
            raise self.unreachable(call, _what(error)) from error

    async def status(self, call: Call) -> int | None:
        """The status of the answer if there is one, soon; never raises for a silent server."""
        if self._http.is_closed:
            return None
        try:
            answer = await self._http.request(call.method, call.path, timeout=_CONNECT_S)
        except httpx.TransportError:
            return None
        return answer.status_code

    async def close(self) -> None:
        """Release the connections."""
        await self._http.aclose()

    def unreachable(self, call: Call, what: str) -> EngineUnreachable:
        """The error of a server that is gone."""
        return EngineUnreachable(
            f"engine {self.base_url} is unreachable ({call.method} {call.path}: {what})"
        )

    @contextmanager
    def named(self) -> Iterator[None]:
        """Errors about what the server said get its name."""
        try:
            yield
        except EngineError as error:
            raise type(error)(f"engine {self.base_url}: {error}") from error

    def _check_open(self, call: Call) -> None:
        """Who makes several calls may meet a connection that was closed as its server is lost."""
        if self._http.is_closed:
            raise self.unreachable(call, "the connection was closed")

    async def _messages(self, call: Call, answer: httpx.Response) -> AsyncIterator[Any]:
        """Events of a stream, or the one or several parts of a whole answer."""
        if not answer.headers.get("content-type", "").startswith("text/event-stream"):
            whole = self._decoded(call, await answer.aread())
            for index, one in enumerate(whole if isinstance(whole, list) else [whole]):
                yield {**one, "index": index} if isinstance(one, dict) else one
            return
        rest = b""
        async for part in answer.aiter_bytes():
            *events, rest = (rest + part).split(b"\n\n")
            for event in events:
                data = event.removeprefix(_EVENT)
                if data != _LAST_EVENT:
                    yield self._decoded(call, data)

    def _decoded(self, call: Call, data: bytes) -> Any:
        """A server that garbles what it says counts as lost: what it did is not known."""
        try:
            return json.loads(data)
        except ValueError as error:
            start = data[:_LONGEST_EXCERPT].decode(errors="replace")
            raise EngineUnreachable(
                f"engine {self.base_url} sent malformed JSON in reply to {call.method} "
                f"{call.path} ({error}): {start!r}{'...' * (len(data) > _LONGEST_EXCERPT)}"
            ) from error

    def _refused(self, call: Call, answer: httpx.Response) -> EngineError:
        return EngineError(
            f"engine {self.base_url} refused {call.method} {call.path} "
            f"({answer.status_code}): {_reason(answer)}"
        )


def _what(error: httpx.TransportError) -> str:
    return str(error) or type(error).__name__


def _reason(answer: httpx.Response) -> str:
    try:
        body = answer.json()
    except ValueError:
        return " ".join(answer.text.split())[:_LONGEST_REASON]
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
