"""The hosts of a run: they join, reply to heartbeats, are lost and replaced.

    POST /join --versions agree--> Host --gets a seat--> works --silent--> lost --> seat is vacant
                 \\-> Refused       a spare, if no seat is vacant                     ^     |
                                                          another host that joins ---'<----'

A seat is the slot of one host in the placement: engines and trainer processes belong to seats, and
run on the host that has the seat. When a host is lost, the scheduler is asked for another one.
"""

from __future__ import annotations

import asyncio
import platform
import secrets
import socket
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from areal_lab.cluster.host import Host
from areal_lab.cluster.records import HostFacts, Refused, Welcome, from_json, to_json
from areal_lab.cluster.scheduler import Invitation, NoHosts, Scheduler
from areal_lab.config.sections import ClusterConfig
from areal_lab.control.liveness import HostLiveness, silence_s
from areal_lab.engines.keys import KeyGuard
from areal_lab.host.asgi import served

_REFUSED: Final = 403
_SAY_EVERY_S: Final = 5.0
_TOKEN_BYTES: Final = 32


class TooFewHosts(RuntimeError):
    """Hosts did not join in time; the message lists those that did, and the state of the others."""


def new_token() -> str:
    """Create a secret for the hosts of one run."""
    return secrets.token_urlsafe(_TOKEN_BYTES)


@dataclass(slots=True, kw_only=True)
class Hosts:
    """The hosts of one run."""

    config: ClusterConfig
    scheduler: Scheduler
    address: str
    """Address of this machine for the hosts."""
    start_timeout_s: float
    say: Callable[[str], None]
    """Prints events for the user."""
    waiting: Callable[[str], None]
    """Shows the reason for waiting."""
    token: str = field(default_factory=new_token, repr=False)
    """Secret in the environment of every agent."""
    data_plane: ASGIApp | None = None
    """Application that serves folders of this machine at the same port; set once it exists."""
    port: int = 0
    """Port at which hosts join, from `start` on."""
    seats: dict[str, Host | None] = field(default_factory=dict)
    """Host in each seat, by its name; None for a vacant one."""
    spares: list[Host] = field(default_factory=list)
    losses: int = 0
    refusals: list[str] = field(default_factory=list)
    """Reasons for refused hosts."""
    _lost: list[Host] = field(default_factory=list)
    """Lost hosts whose connections are still open."""
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _closed: bool = False

    async def start(self) -> list[Host]:
        """Start listening and the scheduler, and wait until all hosts have joined."""
        listener = self._listener()
        self.port = listener.getsockname()[1]
        self._stack.callback(listener.close)
        routes = [Route("/join", self._join, methods=["POST"]), Mount("/", self._serve_data)]
        app = KeyGuard(Starlette(routes=routes), self.token)
        await self._stack.enter_async_context(served(app, listener))
        invitation = Invitation(run=f"{self.address}:{self.port}", token=self.token)
        self._stack.push_async_callback(self.scheduler.stop)
        self.waiting(f"starting {self.config.n_nodes} hosts")
        await self.scheduler.start(self.config.n_nodes, invitation)
        await self._wait_for_all()
        for host in sorted(self.spares, key=lambda host: _natural(host.name)):
            self.seats[host.name] = host
        self.spares.clear()
        return self.working

    def _listener(self) -> socket.socket:
        where = (self.address, self.config.port)
        try:
            return socket.create_server(where, backlog=self.config.n_nodes + 16)
        except OSError as error:
            raise ValueError(
                f"hosts cannot join at {self.address}:{self.config.port} ({error.strerror}); set "
                "cluster.address to an IPv4 address of this machine, and cluster.port to a free "
                "port, or 0"
            ) from error

    @property
    def working(self) -> list[Host]:
        """Hosts in seats, in order of the seats."""
        return [host for host in self.seats.values() if host is not None]

    def leave_vacant(self, names: Sequence[str]) -> None:
        """Turn the hosts in these seats into spares."""
        for name in names:
            if (host := self.seats.pop(name, None)) is not None:
                self.spares.append(host)

    def seat_spare(self) -> str | None:
        """Give a spare host a new seat, which is returned; None without a spare."""
        if not self.spares:
            return None
        host = self.spares.pop(0)
        self.seats[host.name] = host
        return host.name

    async def host_in(self, seat: str) -> Host:
        """Host in a seat; waits for another one while it is vacant."""
        if self.seats[seat] is None:
            self.say(
                f"waiting for a host that takes the place of {seat}, at most "
                f"{self.start_timeout_s:g} s ({await self._state()})"
            )
        try:
            async with asyncio.timeout(self.start_timeout_s), self._changed:
                await self._changed.wait_for(lambda: self.seats[seat] is not None)
                host = self.seats[seat]
        except TimeoutError:
            host = None
        if host is None:
            raise TooFewHosts(
                f"no host took the place of {seat} within {self.start_timeout_s:g} s "
                f"(scheduler.start_timeout_s){self._what_became()}; {await self._state()}"
            )
        return host

    async def close(self) -> None:
        """Dismiss all hosts, and stop the scheduler's agents."""
        self._closed = True
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        hosts = [*self.working, *self.spares, *self._lost]
        await asyncio.gather(*(host.dismiss() for host in hosts))
        await self._stack.aclose()

    # --- joining ---

    async def _join(self, request: Request) -> Response:
        try:
            facts = from_json(HostFacts, await request.body())
        except ValueError as error:
            return self._refused(
                f"a host that joined tells of itself in a way that the run does not know ({error});"
                f" install areal_lab {version('areal_lab')} there, as here"
            )
        same_name = self._named(facts.name)
        if same_name is not None and same_name.facts.incarnation != facts.incarnation:
            await same_name.heartbeat(self.config.heartbeat_s)
        if refusal := self._refusal(facts):
            return self._refused(refusal)
        host = Host(
            facts=facts,
            liveness=HostLiveness(facts.incarnation, self.config.lost_after),
            token=self.token,
        )
        for _ in range(self.config.lost_after):
            await host.heartbeat(self.config.heartbeat_s)
            if not host.liveness.missed:
                break
        else:
            await host.dismiss()
            return self._refused(
                f"host {facts.name} has joined, but the run does not reach it at {facts.address}:"
                f"{facts.port}; give it --address, as the run reaches it, and open its ports"
            )
        # Checked last: a host asks again if the reply is late, and one of both requests has taken
        # the seat.
        earlier = self._named(facts.name)
        if earlier is not None and earlier.facts.incarnation == facts.incarnation:
            await host.close()
            return self._welcome()
        if earlier is not None:  # its incarnation has ended, or `_refusal` would report it
            earlier.liveness.replied(facts.incarnation)
            self._lose(earlier, replaced=True)
        self._take_seat(host)
        self._spawn(self._watch(host), f"watch host {host.name}")
        async with self._changed:
            self._changed.notify_all()
        return self._welcome()

    def _named(self, name: str) -> Host | None:
        """Host of this name that is not lost."""
        return next((h for h in (*self.working, *self.spares) if h.name == name), None)

    def _welcome(self) -> Response:
        silent_after_s = silence_s(self.config.heartbeat_s, self.config.lost_after)
        return Response(
            to_json(Welcome(lease_s=self.config.lease_s, silent_after_s=silent_after_s))
        )

    def _refused(self, refusal: str) -> Response:
        self.refusals.append(refusal)
        self.say(refusal)
        return Response(to_json(Refused(reason=refusal)), _REFUSED)

    async def _serve_data(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.data_plane or PlainTextResponse("nothing is served here", 404)
        await app(scope, receive, send)

    def _refusal(self, facts: HostFacts) -> str:
        """Why this host cannot be part of the run; empty if it can."""
        where = f"host {facts.name} ({facts.address})"
        if self._closed:
            return f"{where} joined too late: the run is over"
        for what, theirs, ours in (
            ("Python", _minor(facts.python), _minor(platform.python_version())),
            ("areal_lab", facts.areal_lab, version("areal_lab")),
        ):
            if theirs != ours:
                return (
                    f"{where} has {what} {theirs}, but the run has {ours}: what they send each "
                    "other would not be understood; install the same on both"
                )
        other = self._named(facts.name)
        if other is not None and other.facts.incarnation != facts.incarnation and other.replies:
            return (
                f"{where} has the name of another host of the run, which replies at "
                f"{other.facts.address}:{other.facts.port}; start its agent with --name"
            )
        if len(facts.gpus) < self.config.n_gpus_per_node:
            return (
                f"{where} has {len(facts.gpus)} GPUs, but cluster.n_gpus_per_node is "
                f"{self.config.n_gpus_per_node}; lower it, or use another host"
            )
        return ""

    def _take_seat(self, host: Host) -> None:
        vacant = [seat for seat, sits in self.seats.items() if sits is None]
        seat = host.name if host.name in vacant else next(iter(vacant), None)
        if seat is None:
            self.spares.append(host)
        else:
            self.seats[seat] = host
            self.say(f"host {host.name} ({host.facts.address}) takes the place of {seat}")

    async def _wait_for_all(self) -> None:
        wanted = self.config.n_nodes
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self.start_timeout_s
        while len(self.spares) < wanted:
            there = len(self.spares)
            joined = f"{there} of {wanted} hosts have joined"
            try:
                state = await self.scheduler.state()
            except NoHosts as error:
                raise TooFewHosts(
                    f"cluster.n_nodes is {wanted}, but {joined}{self._what_became()}: {error}"
                ) from error
            self.waiting(f"waiting for hosts ({joined}; {state})")
            left_s = until_s - loop.time()
            if left_s <= 0:
                raise TooFewHosts(
                    f"cluster.n_nodes is {wanted}, but {joined} within {self.start_timeout_s:g} s "
                    f"(scheduler.start_timeout_s){self._what_became()}: {state}; lower "
                    "cluster.n_nodes, or bring up the others"
                )
            try:
                async with asyncio.timeout(min(_SAY_EVERY_S, left_s)), self._changed:
                    await self._changed.wait_for(partial(self._differ_from, there))
            except TimeoutError:
                continue

    def _differ_from(self, spares: int) -> bool:
        return len(self.spares) != spares

    async def _state(self) -> str:
        """Reason for waiting for hosts, or why none will come."""
        try:
            return await self.scheduler.state()
        except NoHosts as error:
            return str(error)

    def _what_became(self) -> str:
        names = ", ".join(host.name for host in [*self.working, *self.spares])
        joined = f" (there are {names})" if names else ""
        return joined + "".join(f"; {refusal}" for refusal in self.refusals[-3:])

    # --- losing ---

    async def _watch(self, host: Host) -> None:
        """Send heartbeats until the host is lost."""
        loop = asyncio.get_running_loop()
        while not host.lost.is_set():
            began_s = loop.time()
            await host.heartbeat(self.config.heartbeat_s)
            if host.liveness.lost:
                self._lose(host)
                return
            await asyncio.sleep(max(0.0, began_s + self.config.heartbeat_s - loop.time()))

    def _lose(self, host: Host, *, replaced: bool = False) -> None:
        """Count a host as lost, and fail its calls.

        `replaced` is set if its successor is already there: the same host, restarted.
        """
        if host.lost.is_set():
            return
        self.losses += 1
        self._lost.append(host)
        self.say(str(host.error))
        if host in self.spares:
            self.spares.remove(host)
        for seat, sits in self.seats.items():
            if sits is host:
                self.seats[seat] = None
                if self.spares and not replaced:
                    self._take_seat(self.spares.pop(0))
        host.mark_lost()
        if not self._closed and not replaced:
            self._spawn(self._replace(host), f"replace host {host.name}")

    async def _replace(self, host: Host) -> None:
        async with self._changed:
            self._changed.notify_all()
        try:
            await self.scheduler.replace(host.name)
        except Exception as error:  # whatever it is, the run continues without the host
            self.say(f"no host could be started to replace {host.name}: {error}")

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _minor(python: str) -> str:
    return ".".join(python.split(".")[:2])


def _natural(name: str) -> tuple[str, int, str]:
    """Sort key with h2 before h10."""
    head = name.rstrip("0123456789")
    digits = name[len(head) :]
    return head, int(digits or 0), name
