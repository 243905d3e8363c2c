"""The HTTP interface of a host agent.

    GET  /health                       heartbeat --> HostHealth
    POST /engines/N, /modules/N        StartEngine, StartModule --> StartedEngine, StartedModule
    GET  /processes/N                  --> ProcessEnd
    POST /processes/N/end, /stop       SIGTERM and no wait; end it and wait (?at_once=1)
                                       the run chooses N, a new one for each start
    GET  /logs, /logs/NAME             names of log files; the end of one (?lines=20)
    POST /files/seen, /serve, /fetch, /check, /put, /remove, /weights-root
                                       see `files`
    *    /folders                      the data plane (`folders.server`)
    GET  /free-port                    a port on which nothing listens now
    POST /dismiss                      the run no longer needs the host

Every request has the token of the run, which is checked first (`engines.keys.KeyGuard`), and the
incarnation of the agent (its number of joins) that it is meant for; another incarnation refuses it
with 409. A heartbeat without an incarnation only asks for the state. While the run is silent, a
request to start something waits: if it is late, no heartbeat follows until the lease is over.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route

from areal_lab.cluster.agent.lease import HostAgent
from areal_lab.cluster.folders.replies import INCARNATION, DataPlaneError
from areal_lab.cluster.records import (
    RECEIVED,
    FetchFolder,
    Place,
    Refused,
    ServeFolder,
    Shapes,
    StartEngine,
    StartModule,
    from_json,
    to_json,
)
from areal_lab.engines.keys import App, KeyGuard, Receive, Scope, Send
from areal_lab.engines.launch.start import PortTaken
from areal_lab.engines.protocol import EngineError, WeightsFolder, described
from areal_lab.host import ports
from areal_lab.host.processes import ChildDied, last_lines

Handler = Callable[[Request], Awaitable[Response]]
_Request = TypeVar("_Request")
_REFUSALS: Final = (ValueError, ChildDied, PortTaken, EngineError, DataPlaneError)
"""Expected errors of a request, besides `OSError`, which includes `TimeoutError`."""
LATE: Final = 409
"""Status of a reply to a request for another incarnation."""
REFUSED: Final = 422
_STARTS: Final = frozenset(
    {"/engines/{number:int}", "/modules/{number:int}", "/files/fetch"},
)
"""Requests that wait while the run is silent."""
_LINES: Final = 20
_MOST_DIGITS: Final = 9


def agent_app(agent: HostAgent, token: str) -> App:
    """The application of an agent."""

    async def health(request: Request) -> Response:
        if request.headers.get(INCARNATION) == agent.incarnation:
            return _reply(agent.heartbeat(_number(request.headers.get(RECEIVED), 0)))
        return _reply(agent.health())

    async def start_engine(request: Request) -> Response:
        asked = from_json(StartEngine, await request.body())
        return _reply(await agent.held.start_engine(request.path_params["number"], asked))

    async def start_module(request: Request) -> Response:
        asked = from_json(StartModule, await request.body())
        return _reply(await agent.held.start_module(request.path_params["number"], asked))

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
        lines = _number(request.query_params.get("lines"), _LINES)
        return PlainTextResponse(last_lines(agent.folder / "logs" / name, lines))

    async def free_port(request: Request) -> Response:
        del request
        return PlainTextResponse(str(ports.free_port(agent.address)))

    async def logs(request: Request) -> Response:
        del request
        return JSONResponse(sorted(file.name for file in (agent.folder / "logs").iterdir()))

    async def seen(request: Request) -> Response:
        asked = from_json(Place, await request.body())
        return _reply(await agent.files.seen(Path(asked.path)))

    async def serve(request: Request) -> Response:
        asked = from_json(ServeFolder, await request.body())
        agent.files.serve(asked.name, Path(asked.path))
        return Response()

    async def fetch(request: Request) -> Response:
        asked = from_json(FetchFolder, await request.body())
        return _reply(Place(path=str(await agent.files.fetch(asked))))

    async def check(request: Request) -> Response:
        weights = from_json(WeightsFolder, await request.body())
        found = await agent.files.check(weights)
        return _reply(Shapes(shapes={name: tuple(shape) for name, shape in found.items()}))

    async def put(request: Request) -> Response:
        path = agent.files.put(request.path_params["name"], await request.body())
        return _reply(Place(path=str(path)))

    async def remove(request: Request) -> Response:
        await agent.files.remove(Path(from_json(Place, await request.body()).path))
        return Response()

    async def weights_root(request: Request) -> Response:
        size_bytes = int(request.path_params["size_bytes"])
        return _reply(Place(path=str(await agent.files.weights_root(size_bytes))))

    async def data_plane(scope: Scope, receive: Receive, send: Send) -> None:
        await agent.data_plane(scope, receive, send)

    async def dismiss(request: Request) -> Response:
        del request
        agent.dismissed.set()
        return Response()

    current = [
        ("/engines/{number:int}", start_engine, "POST"),
        ("/modules/{number:int}", start_module, "POST"),
        ("/processes/{number:int}", end_of, "GET"),
        ("/processes/{number:int}/end", ask_to_end, "POST"),
        ("/processes/{number:int}/stop", stop, "POST"),
        ("/logs", logs, "GET"),
        ("/logs/{name}", log, "GET"),
        ("/free-port", free_port, "GET"),
        ("/files/seen", seen, "POST"),
        ("/files/serve", serve, "POST"),
        ("/files/fetch", fetch, "POST"),
        ("/files/check", check, "POST"),
        ("/files/put/{name}", put, "POST"),
        ("/files/remove", remove, "POST"),
        ("/files/weights-root/{size_bytes:int}", weights_root, "POST"),
        ("/dismiss", dismiss, "POST"),
    ]
    routes = [
        Route("/health", health),
        *(
            Route(path, _for_current(agent, act, path in _STARTS), methods=[method])
            for path, act, method in current
        ),
        Mount("/", data_plane),
    ]
    return KeyGuard(Starlette(routes=routes, exception_handlers={Exception: _failed}), token)


async def _failed(_: Request, error: Exception) -> Response:
    """Reply to a request that raised an unexpected error."""
    return _reply(Refused(reason=f"the agent failed: {described(error)}"), 500)


def _number(text: str | None, otherwise: int) -> int:
    """Parse a number of a header or a query, which may be malformed."""
    if text is None or not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
        return otherwise
    return int(text)


def _for_current(agent: HostAgent, act: Handler, starts: bool) -> Handler:
    """Refuse requests for another incarnation, and turn errors into refusals."""

    async def handler(request: Request) -> Response:
        await request.body()  # it may arrive later: the check applies to the code after it
        if starts:
            await agent.until_heard()
        asked = request.headers.get(INCARNATION, "")
        if not agent.incarnation or asked != agent.incarnation:
            reason = f"host {agent.name} has started again since: the request is late"
            return _reply(Refused(reason=reason), LATE)
        try:
            return await act(request)
        except OSError as error:  # it may quote a path of any length
            return _reply(Refused(reason=described(error)), REFUSED)
        except _REFUSALS as error:
            return _reply(Refused(reason=str(error) or type(error).__name__), REFUSED)

    return handler


def _reply(message: object, status: int = 200) -> Response:
    return Response(to_json(message), status, media_type="application/json")
