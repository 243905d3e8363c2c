"""Send a completed answer, whole or as a stream, and detect whether the client received it.

    wait for the answer, or the client to hang up --> status and headers --> body

A stream begins when its answer is complete, so errors have their status. If that takes long, the
stream begins with keep-alive events, and an error becomes an event. A slow reader delays only its
own connection: the call already counts as done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from areal_lab.agents.gateway.calls import Answer, Call, Dialect
from areal_lab.agents.gateway.errors import ApiError
from areal_lab.agents.gateway.service import Exchange
from areal_lab.agents.gateway.stream import chunks
from areal_lab.host.asgi import JsonReply

_PART_BYTES: Final = 65_536
_NOTE: Final = "x-areal-lab-note"
_INTERACTION: Final = "x-areal-lab-interaction-id"


def error_reply(dialect: Dialect, error: ApiError) -> Response:
    """Reply to a request that is not served."""
    return JsonReply(dialect.error(error), status_code=error.status, headers=error.headers)


class Delivery(Response):
    """Reply to one client of an exchange."""

    def __init__(
        self, exchange: Exchange, dialect: Dialect, call: Call, *, keep_alive_s: float
    ) -> None:
        """Create the reply; it waits when it is sent."""
        # Not Response's `__init__`, which creates an empty reply.
        self._exchange = exchange
        self._dialect = dialect
        self._call = call
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the reply."""
        gone = asyncio.ensure_future(_disconnected(receive))
        delivered = False
        try:
            if self._call.stream:
                delivered = await self._stream(gone, scope, receive, send)
            else:
                await asyncio.wait((self._exchange.task, gone), return_when=asyncio.FIRST_COMPLETED)
                if not gone.done():
                    delivered = await self._whole(gone, scope, receive, send)
        finally:
            gone.cancel()
            self._exchange.left(delivered=delivered)

    async def _whole(
        self, gone: asyncio.Future[None], scope: Scope, receive: Receive, send: Send
    ) -> bool:
        """Send the answer as one object, or the error; returns whether an answer was sent."""
        outcome = _outcome(self._exchange.task)
        if isinstance(outcome, ApiError):
            await error_reply(self._dialect, outcome)(scope, receive, send)
            return False
        body = self._dialect.reply(self._call, outcome)
        whole = JsonReply(body, headers=self._answer_headers(outcome))
        await send({"type": "http.response.start", "status": 200, "headers": whole.raw_headers})
        return await _write_all(send, gone, _parts(bytes(whole.body)))

    async def _stream(
        self, gone: asyncio.Future[None], scope: Scope, receive: Receive, send: Send
    ) -> bool:
        """Send the answer as events, or the error; returns whether an answer was sent."""
        task = self._exchange.task
        begun = False
        while not await self._answered_or_gone(gone):
            if not begun:
                await self._begin(send, {})
                begun = True
            await _write(send, self._dialect.keep_alive)
        if gone.done():
            return False
        outcome = _outcome(task)
        if isinstance(outcome, ApiError):
            if begun:
                await _write(send, self._dialect.error_event(outcome), last=True)
            else:
                await error_reply(self._dialect, outcome)(scope, receive, send)
            return False
        if not begun:
            await self._begin(send, self._answer_headers(outcome))
        return await _write_all(send, gone, chunks(self._dialect.events(self._call, outcome)))

    async def _answered_or_gone(self, gone: asyncio.Future[None]) -> bool:
        """Wait for the answer or for the client to hang up; False after the keep-alive period."""
        done, _ = await asyncio.wait(
            (self._exchange.task, gone),
            timeout=self._keep_alive_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        return bool(done)

    async def _begin(self, send: Send, headers: Mapping[str, str]) -> None:
        start = Response(
            media_type="text/event-stream", headers={"cache-control": "no-cache", **headers}
        )
        raw = [(name, value) for name, value in start.raw_headers if name != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": raw})

    def _answer_headers(self, answer: Answer) -> dict[str, str]:
        headers = {_INTERACTION: answer.interaction_id}
        if self._call.notes:
            headers[_NOTE] = "; ".join(self._call.notes)
        return headers


def _outcome(task: asyncio.Task[Answer]) -> Answer | ApiError:
    if task.cancelled():
        return ApiError(503, "the gateway is closing", code="closing")
    error = task.exception()
    if error is None:
        return task.result()
    if isinstance(error, ApiError):
        return error
    raise error


def _parts(body: bytes) -> Iterator[bytes]:
    """Split a body into separate writes, so a slow reader can block each."""
    for start in range(0, len(body), _PART_BYTES):
        yield body[start : start + _PART_BYTES]


async def _write_all(send: Send, gone: asyncio.Future[None], parts: Iterator[bytes]) -> bool:
    """Send a body; returns False once the client has hung up."""
    for part in parts:
        await _write(send, part)
        # Creating and sending a part may never suspend: yield here to other tasks and to `gone`.
        await asyncio.sleep(0)
        if gone.done():
            return False
    await _write(send, b"", last=True)
    return True


async def _write(send: Send, body: bytes, *, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not last})


async def _disconnected(receive: Receive) -> None:
    """Wait until the client has hung up."""
    while (await receive())["type"] != "http.disconnect":
        pass
