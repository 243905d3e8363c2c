"""HTTP interface of the gateway, served inside the caller's event loop.

The HTTP interface of the gateway.

    | path                                     | key     |
    | /chat/completions, /responses, /messages | session |
    | /completions                             | session for evaluation |
    | /messages/count_tokens, /models          | session |
    | /rl/set_reward, /rl/end_session          | session |
    | /grant_capacity, /rl/start_session       | admin   |
    | /export_trajectories, /statistics        | admin   |
    | /health                                  | none    |

Each also under /v1. The names of the lower half are AReaL's. A key is sent as `Authorization:
Bearer KEY` or `x-api-key: KEY`, or is part of the path, `/key/KEY/v1/chat/completions`, for clients
whose address alone can differ from sample to sample; then headers do not count. Query strings and
unknown fields are ignored.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from areal_lab.agents.gateway import reading
from areal_lab.agents.gateway.anthropic import ANTHROPIC
from areal_lab.agents.gateway.calls import Dialect, continued, prompt
from areal_lab.agents.gateway.chat import CHAT
from areal_lab.agents.gateway.completions import COMPLETIONS
from areal_lab.agents.gateway.delivery import Delivery, error_reply
from areal_lab.agents.gateway.errors import ApiError, invalid
from areal_lab.agents.gateway.responses import RESPONSES
from areal_lab.agents.gateway.service import Service, body_digest
from areal_lab.agents.gateway.sessions import Session
from areal_lab.host.asgi import JsonReply, guest_server

HOST: Final = "127.0.0.1"
_BACKLOG: Final = 4096
"""Connections that may wait to be accepted: a thousand agents may connect together."""
_KEEP_ALIVE_S: Final = 3600
"""Longer than any client keeps an idle connection, so none is closed while a request is being
sent."""
_SWEEP_S: Final = 5.0


def bind(port: int = 0, host: str = HOST) -> socket.socket:
    """Return a socket that listens on this port; 0 takes a free one."""
    if not host:  # which would be every address
        raise _wrong_host(host, "it is empty")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        unknown = isinstance(error, socket.gaierror | UnicodeError)
        if unknown or getattr(error, "errno", None) == errno.EADDRNOTAVAIL:
            raise _wrong_host(host, reason.lower()) from error
        raise ValueError(f"port {port} is not available for the gateway: {reason}") from error
    # asyncio disables Nagle's algorithm for sockets that it knows as TCP, which this one is only
    # once it is created from its descriptor. Otherwise each reply waits 40 ms for an
    # acknowledgment.
    return socket.socket(fileno=listener.detach())


def base_url(listener: socket.socket) -> str:
    """URL of the gateway on this socket for agents of this machine; `/v1` may follow."""
    host, port = listener.getsockname()[:2]
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        host = "127.0.0.1" if address.version == 4 else "::1"
    return f"http://[{host}]:{port}" if address.version == 6 else f"http://{host}:{port}"


def is_loopback(listener: socket.socket) -> bool:
    """Return whether only this machine can reach a socket."""
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


@asynccontextmanager
async def served(service: Service, listener: socket.socket) -> AsyncIterator[asyncio.Task[None]]:
    """Serve until the end of the block; the task ends earlier only if serving fails."""
    serving = asyncio.create_task(serve(service, listener), name="gateway")
    try:
        yield serving
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def serve(service: Service, listener: socket.socket) -> None:
    """Serve until canceled; then cancel running calls and close everything.

    Clients may connect to `listener`, a socket of `bind`, before this runs.
    """
    server = guest_server(create_app(service), timeout_keep_alive=_KEEP_ALIVE_S)
    sweeping = asyncio.create_task(_sweep(service))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        done, _ = await asyncio.wait((sweeping, serving), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # neither ends by itself
    finally:
        sweeping.cancel()
        # Close the service first, so pending calls get a reply (if only an error) before
        # connections close.
        await service.close()
        server.should_exit = True
        await asyncio.wait((serving,))


def _wrong_host(host: str, reason: str) -> ValueError:
    return ValueError(
        f"host is {host!r}, but must be an address of this machine, such as {HOST}, or 0.0.0.0 for "
        f"all of them ({reason})"
    )


async def _sweep(service: Service) -> None:
    while True:
        await asyncio.sleep(_SWEEP_S)
        service.sweep()


T = TypeVar("T")

_MOST_TASK_ID = 256
"""Maximum characters of a task's id."""


_KEY_OF_PATH: Final = "areal_lab_key"
"""Entry of a request's scope."""


class _WithoutVersion:
    """Strip `/key/KEY` and `/v1` from the beginning of paths: clients configure base URLs with the
    version, without it, or with one too many.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"]
            if path.startswith("/key/"):
                # Errors repeat the path that is left.
                scope[_KEY_OF_PATH], _, path = path.removeprefix("/key/").partition("/")
                path = f"/{path}"
            while path.startswith("/v1/"):
                path = path[3:]
            # In place: code outside that handles failures has to see the change, too.
            scope["path"] = path.rstrip("/") or "/"
        await self._app(scope, receive, send)


def create_app(service: Service) -> Starlette:
    """Create the HTTP interface of a service."""

    async def refused(request: Request, error: ApiError) -> Response:
        return error_reply(_dialect(request), error)

    async def unknown_path(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.scope['path']}: {error.detail}"
        return error_reply(_dialect(request), ApiError(error.status_code, message))

    async def gone(_request: Request, _error: ClientDisconnect) -> Response:
        return Response(status_code=400)  # the client is gone

    async def failed(request: Request, error: Exception) -> Response:
        message = f"the gateway failed: {type(error).__name__}: {error}"
        return error_reply(_dialect(request), ApiError(500, message))

    handlers: dict[Any, Any] = {  # each takes its own kind of error
        ApiError: refused,
        HTTPException: unknown_path,
        ClientDisconnect: gone,
        Exception: failed,
    }
    # Plain Starlette: FastAPI would take a tenth of a call's time, and only its routes would be
    # used.
    return Starlette(
        routes=[*_calls(service), *_sessions(service)],
        middleware=[Middleware(_WithoutVersion)],
        exception_handlers=handlers,
    )


def _calls(service: Service) -> list[Route]:
    """Endpoints for agents."""

    async def answer(request: Request, dialect: Dialect) -> Response:
        session = service.open_session(_keys(request))
        body = await _body(request, service, session)
        call = service.noted(session, dialect.parse(body))
        exchange = service.ask(
            session,
            dialect,
            call,
            body_digest(dialect.name, body),
            retries=_retries(request),
        )
        return Delivery(exchange, dialect, call, keep_alive_s=service.limits.keep_alive_s)

    async def chat_completions(request: Request) -> Response:
        return await answer(request, CHAT)

    async def completions(request: Request) -> Response:
        return await answer(request, COMPLETIONS)

    async def responses(request: Request) -> Response:
        return await answer(request, RESPONSES)

    async def messages(request: Request) -> Response:
        return await answer(request, ANTHROPIC)

    async def count_tokens(request: Request) -> Response:
        session = service.open_session(_keys(request))
        call = ANTHROPIC.parse(await _body(request, service, session))
        if call.follows:
            earlier = session.turn(call.follows)
            if earlier is None:
                raise ANTHROPIC.unknown(call.follows)
            call = continued(call, earlier)
        try:
            tokens = await session.conversation.prompt_tokens(prompt(call))
        except ValueError as error:
            raise invalid(str(error)) from error
        return JsonReply({"input_tokens": tokens})

    async def models(request: Request) -> Response:
        _any_key(service, request)
        entry = _model(request, service.model)
        if _dialect(request) is ANTHROPIC:
            ends = {"first_id": service.model, "last_id": service.model}
            return JsonReply({"data": [entry], "has_more": False, **ends})
        return JsonReply({"object": "list", "data": [entry]})

    async def model(request: Request) -> Response:
        _any_key(service, request)
        return JsonReply(_model(request, request.path_params["name"]))

    async def health(_request: Request) -> Response:
        return JsonReply({"status": "ok"})

    return [
        Route("/chat/completions", chat_completions, methods=["POST"]),
        Route("/completions", completions, methods=["POST"]),
        Route("/responses", responses, methods=["POST"]),
        Route("/messages", messages, methods=["POST"]),
        Route("/messages/count_tokens", count_tokens, methods=["POST"]),
        Route("/models", models, methods=["GET"]),
        Route("/models/{name:path}", model, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
    ]


def _sessions(service: Service) -> list[Route]:
    """Endpoints for programs that start agents and train on the results."""

    async def grant_capacity(request: Request) -> Response:
        service.sessions.require_admin(_keys(request))
        return JsonReply({"capacity": service.sessions.grant_capacity()})

    async def start_session(request: Request) -> Response:
        service.sessions.require_admin(_keys(request))
        body = await _body(request, service)
        task_id = reading.text(body, "task_id") or ""
        if len(task_id) > _MOST_TASK_ID:
            raise invalid(
                f"task_id has {len(task_id)} characters, of {_MOST_TASK_ID} at most", "task_id"
            )
        start = (
            service.start_evaluation if reading.flag(body, "evaluation") else service.start_session
        )
        session, key = start(task_id, reading.text(body, "api_key"))
        return JsonReply({"session_id": session.session_id, "api_key": key, **session.told})

    async def set_reward(request: Request) -> Response:
        session = service.session(_keys(request))
        body = await _body(request, service, session)
        reward = reading.number(body, "reward")
        if reward is None:
            raise invalid("reward is missing", "reward")
        service.set_reward(
            session,
            reward,
            reading.text(body, "interaction_id"),
            reading.integer(body, "index", least=0),
        )
        return JsonReply({"message": "success"})

    async def end_session(request: Request) -> Response:
        session = service.session(_keys(request))
        service.end_session(session)
        return JsonReply({"message": "success", "interaction_count": len(session.interactions)})

    async def export_trajectories(request: Request) -> Response:
        service.sessions.require_admin(_keys(request))
        body = await _body(request, service)
        session = service.session_by_id(reading.required(body, "session_id"))
        style = reading.text(body, "style") or "individual"
        if style not in ("individual", "concat"):
            raise invalid(f"style is {style}, but must be individual or concat", "style")
        discount = reading.number(body, "discount")
        if discount is not None and not 0 <= discount <= 1:
            raise invalid(f"discount is {discount:g}, but must be from 0 to 1", "discount")
        await _unless_gone(request, service.settled(session))
        return JsonReply(
            service.export(
                session,
                style="concat" if style == "concat" else "individual",
                discount=1.0 if discount is None else discount,
            )
        )

    async def statistics(request: Request) -> Response:
        service.sessions.require_admin(_keys(request))
        return JsonReply(service.statistics())

    return [
        Route("/grant_capacity", grant_capacity, methods=["POST"]),
        Route("/rl/start_session", start_session, methods=["POST"]),
        Route("/rl/set_reward", set_reward, methods=["POST"]),
        Route("/rl/end_session", end_session, methods=["POST"]),
        Route("/export_trajectories", export_trajectories, methods=["POST"]),
        Route("/statistics", statistics, methods=["GET"]),
    ]


# --- requests ------------------------------------------------------------------------------------


def _keys(request: Request) -> list[str]:
    """Keys of a request, from its path, else from either header."""
    if _KEY_OF_PATH in request.scope:
        return [key for key in [request.scope[_KEY_OF_PATH]] if key]
    found = []
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        found.append(token.strip())
    found.append(request.headers.get("x-api-key", "").strip())
    return [key for key in found if key]


def _any_key(service: Service, request: Request) -> Session | None:
    keys = _keys(request)
    return None if service.sessions.is_admin(keys) else service.open_session(keys)


def _retries(request: Request) -> int:
    """Number of earlier attempts of this call, as OpenAI's and Anthropic's clients report it."""
    found = request.headers.get("x-stainless-retry-count", "")
    return int(found) if found.isascii() and found.isdigit() and len(found) < 10 else 0


async def _body(
    request: Request, service: Service, session: Session | None = None
) -> dict[str, Any]:
    """Parse the body as an object; an empty body is an empty object."""
    limits = service.limits
    raw = bytearray()
    try:
        async for chunk in request.stream():
            raw += chunk
            if session is not None:
                session.body_bytes += len(chunk)
                if session.body_bytes > limits.session_body_bytes:
                    raise ApiError(
                        429,
                        f"the session sends more than {limits.session_body_bytes} bytes at once",
                        retry_after_s=limits.retry_after_s,
                    )
            if len(raw) > limits.body_bytes:
                # uvicorn reads and drops the rest, so the client can read this reply.
                raise ApiError(413, f"the body has more than {limits.body_bytes} bytes")
        return reading.parse_json(bytes(raw)) if raw else {}
    finally:
        if session is not None:
            session.body_bytes -= len(raw)


async def _unless_gone(request: Request, wanted: Awaitable[T]) -> T:
    """Wait until the result is there or the client has hung up."""
    task = asyncio.ensure_future(wanted)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _dialect(request: Request) -> Dialect:
    """Dialect of errors, by path; Anthropic's clients send their version everywhere."""
    path = request.scope["path"]
    if path.startswith("/messages") or "anthropic-version" in request.headers:
        return ANTHROPIC
    return RESPONSES if path.startswith("/responses") else CHAT


def _model(request: Request, name: str) -> dict[str, Any]:
    if _dialect(request) is ANTHROPIC:
        created = datetime.fromtimestamp(0, UTC).isoformat()
        return {"type": "model", "id": name, "display_name": name, "created_at": created}
    return {"id": name, "object": "model", "created": 0, "owned_by": "areal_lab"}
