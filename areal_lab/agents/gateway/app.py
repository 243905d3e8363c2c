"""The HTTP interface of the gateway.

    | path                                     | key     |
    | /chat/completions, /responses, /messages | session |
    | /messages/count_tokens, /models          | session |
    | /rl/set_reward, /rl/end_session          | session |
    | /grant_capacity, /rl/start_session       | admin   |
    | /export_trajectories, /statistics        | admin   |
    | /health                                  | none    |

Each also under /v1. The names of the lower half are AReaL's. A key is sent as `Authorization:
Bearer KEY` or `x-api-key: KEY`; query strings and unknown fields are ignored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from datetime import UTC, datetime
from typing import Any, TypeVar

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
from areal_lab.agents.gateway.delivery import Delivery, JsonReply, error_reply
from areal_lab.agents.gateway.errors import ApiError, invalid
from areal_lab.agents.gateway.exchanges import body_digest
from areal_lab.agents.gateway.responses import RESPONSES
from areal_lab.agents.gateway.service import Service
from areal_lab.agents.gateway.sessions import Session

T = TypeVar("T")

_MOST_TASK_ID = 256
"""Characters of a task's id."""


class _WithoutVersion:
    """Takes `/v1` off the beginning of paths: base URLs are configured with it, without it, and
    with it once too often."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"]
            while path.startswith("/v1/"):
                path = path[3:]
            # In place: what handles failures outside of this has to see it, too.
            scope["path"] = path.rstrip("/") or "/"
        await self._app(scope, receive, send)


def create_app(service: Service) -> Starlette:
    """The HTTP interface of a service."""

    async def refused(request: Request, error: ApiError) -> Response:
        return error_reply(_dialect(request), error)

    async def unknown_path(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.scope['path']}: {error.detail}"
        return error_reply(_dialect(request), ApiError(error.status_code, message))

    async def gone(_request: Request, _error: ClientDisconnect) -> Response:
        return Response(status_code=400)  # there is nobody to read it

    async def failed(request: Request, error: Exception) -> Response:
        message = f"the gateway failed: {type(error).__name__}: {error}"
        return error_reply(_dialect(request), ApiError(500, message))

    handlers: dict[Any, Any] = {  # each takes its own kind of error
        ApiError: refused,
        HTTPException: unknown_path,
        ClientDisconnect: gone,
        Exception: failed,
    }
    # Not FastAPI, of which nothing but the routes would be used: it takes a tenth of a call's time.
    return Starlette(
        routes=[*_calls(service), *_sessions(service)],
        middleware=[Middleware(_WithoutVersion)],
        exception_handlers=handlers,
    )


def _calls(service: Service) -> list[Route]:
    """What agents use."""

    async def answer(request: Request, dialect: Dialect) -> Response:
        session = service.open_session(_keys(request))
        body = await _body(request, service)
        call = dialect.parse(body)
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

    async def responses(request: Request) -> Response:
        return await answer(request, RESPONSES)

    async def messages(request: Request) -> Response:
        return await answer(request, ANTHROPIC)

    async def count_tokens(request: Request) -> Response:
        session = service.open_session(_keys(request))
        call = ANTHROPIC.parse(await _body(request, service))
        if call.follows:
            earlier = session.turn(call.follows)
            if earlier is None:
                raise ANTHROPIC.unknown(call.follows)
            call = continued(call, earlier)
        try:
            tokens = session.conversation.prompt_tokens(prompt(call))
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
        Route("/responses", responses, methods=["POST"]),
        Route("/messages", messages, methods=["POST"]),
        Route("/messages/count_tokens", count_tokens, methods=["POST"]),
        Route("/models", models, methods=["GET"]),
        Route("/models/{name:path}", model, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
    ]


def _sessions(service: Service) -> list[Route]:
    """What starts agents and trains on what they did."""

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
        session, key = service.start_session(task_id, reading.text(body, "api_key"))
        return JsonReply({"session_id": session.session_id, "api_key": key, **session.told})

    async def set_reward(request: Request) -> Response:
        session = service.session(_keys(request))
        body = await _body(request, service)
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
    """The keys that a request has, in either header."""
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
    """How often OpenAI's and Anthropic's clients say they have sent this call before."""
    found = request.headers.get("x-stainless-retry-count", "")
    return int(found) if found.isascii() and found.isdigit() and len(found) < 10 else 0


async def _body(request: Request, service: Service) -> dict[str, Any]:
    """The object that a body is; nothing is an empty one."""
    most_bytes = service.limits.body_bytes
    parts: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > most_bytes:
            # uvicorn reads the rest and drops it, so that the client can read this.
            raise ApiError(413, f"the body has more than {most_bytes} bytes")
        parts.append(chunk)
    raw = b"".join(parts)
    return reading.parse_json(raw) if raw else {}


async def _unless_gone(request: Request, wanted: Awaitable[T]) -> T:
    """Wait, but not for a client that has hung up.

    Raises:
        ClientDisconnect: it has.
    """
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
    """The dialect of errors, by path; Anthropic's clients send their version everywhere."""
    path = request.scope["path"]
    if path.startswith("/messages") or "anthropic-version" in request.headers:
        return ANTHROPIC
    return RESPONSES if path.startswith("/responses") else CHAT


def _model(request: Request, name: str) -> dict[str, Any]:
    if _dialect(request) is ANTHROPIC:
        created = datetime.fromtimestamp(0, UTC).isoformat()
        return {"type": "model", "id": name, "display_name": name, "created_at": created}
    return {"id": name, "object": "model", "created": 0, "owned_by": "areal_lab"}
