"""The HTTP interface of a host agent.

    GET  /health                       heartbeat --> HostHealth
    POST /engines, /modules            StartEngine, StartModule --> StartedEngine, StartedModule
    GET  /processes/N                  --> ProcessEnd
    POST /processes/N/end, /stop       SIGTERM and no wait; end it and wait (?at_once=1)
    GET  /logs, /logs/NAME             names of log files; the end of one (?lines=20)
    GET  /free-port                    a port on which nothing listens now
    POST /dismiss                      the run needs the host no longer

Every request has the token of the run and the incarnation that it is meant for; the agent of
another incarnation refuses it with 409, and the token is checked before (`engines.keys.KeyGuard`).
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from areal_lab.cluster.agent.lease import HostAgent
from areal_lab.cluster.records import (
    INCARNATION_HEADER,
    HostHealth,
    Refused,
    StartEngine,
    StartModule,
    from_json,
    to_json,
)
from areal_lab.engines.errors import EngineError
from areal_lab.engines.keys import App, KeyGuard
from areal_lab.engines.launch.start import PortTaken
from areal_lab.host.processes import ChildDied, last_lines

Handler = Callable[[Request], Awaitable[Response]]
_Request = TypeVar("_Request")
_REFUSALS: Final = (ValueError, OSError, ChildDied, PortTaken, EngineError)
"""What a request may end with; `OSError` has `TimeoutError`."""
LATE: Final = 409
"""Status of a reply to a request for another incarnation."""
REFUSED: Final = 422
_LINES: Final = 20


def agent_app(agent: HostAgent, token: str) -> App:
    """The application of an agent."""

    async def health(request: Request) -> Response:
        if request.headers.get(INCARNATION_HEADER) == str(agent.incarnation):
            return _reply(agent.heard())
        return _reply(HostHealth(incarnation=agent.incarnation))

    async def start_engine(request: Request) -> Response:
        asked = from_json(StartEngine, await request.body())
        return _reply(await agent.held.start_engine(asked))

    async def start_module(request: Request) -> Response:
        asked = from_json(StartModule, await request.body())
        return _reply(await agent.held.start_module(asked))

    async def end_of(request: Request) -> Response:
        return _reply(await agent.held.end_of(request.path_params["number"]))

    async def ask_to_end(request: Request) -> Response:
        agent.held.ask_to_end(request.path_params["number"])
        return Response()

    async def stop(request: Request) -> Response:
        at_once = "at_once" in request.query_params
        await agent.held.stop(request.path_params["number"], at_once=at_once)
        return Response()

    async def log(request: Request) -> Response:
        name = Path(request.path_params["name"]).name
        lines = int(request.query_params.get("lines", _LINES))
        return PlainTextResponse(last_lines(agent.folder / "logs" / name, lines))

    async def free_port(request: Request) -> Response:
        del request
        with socket.create_server((agent.address, 0)) as listener:
            return PlainTextResponse(str(listener.getsockname()[1]))

    async def logs(request: Request) -> Response:
        del request
        return JSONResponse(sorted(file.name for file in (agent.folder / "logs").iterdir()))

    async def dismiss(request: Request) -> Response:
        del request
        agent.dismissed.set()
        return Response()

    current = [
        ("/engines", start_engine, "POST"),
        ("/modules", start_module, "POST"),
        ("/processes/{number:int}", end_of, "GET"),
        ("/processes/{number:int}/end", ask_to_end, "POST"),
        ("/processes/{number:int}/stop", stop, "POST"),
        ("/logs", logs, "GET"),
        ("/logs/{name}", log, "GET"),
        ("/free-port", free_port, "GET"),
        ("/dismiss", dismiss, "POST"),
    ]
    routes = [
        Route("/health", health),
        *(Route(path, _for_current(agent, act), methods=[method]) for path, act, method in current),
    ]
    return KeyGuard(Starlette(routes=routes), token)


def _for_current(agent: HostAgent, act: Handler) -> Handler:
    """Refuse requests for another incarnation, and turn errors into refusals."""

    async def handler(request: Request) -> Response:
        asked = request.headers.get(INCARNATION_HEADER, "")
        if not agent.incarnation or asked != str(agent.incarnation):
            reason = f"host {agent.name} has started again since: the request is late"
            return _reply(Refused(reason=reason), LATE)
        try:
            return await act(request)
        except _REFUSALS as error:
            return _reply(Refused(reason=str(error) or type(error).__name__), REFUSED)

    return handler


def _reply(message: object, status: int = 200) -> Response:
    return Response(to_json(message), status, media_type="application/json")
