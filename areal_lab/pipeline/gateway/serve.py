"""Serve a standalone gateway until a stop is requested or the last engine is lost.

All tokens that engines have returned are kept, unless serving itself fails or `run` is canceled.

    engines up --> clients: sessions, calls, rewards --> stop: no new calls, calls end
                                                         --> write the remaining sessions
    task             waits for                       unblocked by
    sessions (each)  its end, its reward             the client, or time; only if all are written
    state            a few seconds                   time

A session remains if it was not exported before the gateway ends or removes the session.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import tempfile
from collections.abc import Callable, Coroutine, Hashable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

from areal_lab.agents.conversation import TreeConversation
from areal_lab.agents.evaluation import Evaluation
from areal_lab.agents.gateway.server import base_url, bind, is_loopback, served
from areal_lab.agents.gateway.service import Service
from areal_lab.agents.gateway.sessions import Session
from areal_lab.agents.hosting.admin_key import admin_key
from areal_lab.agents.hosting.conversations import Conversations
from areal_lab.control.events import EngineId
from areal_lab.control.routing import routing_named
from areal_lab.engines.launch.backends import BACKENDS
from areal_lab.host.asgi import collected_in_pauses
from areal_lab.host.owned_folders import remove_tree
from areal_lab.pipeline.fleet import Fleet, first_error
from areal_lab.pipeline.gateway.prepare import GatewayPlan
from areal_lab.pipeline.gateway.session_lines import SessionLines
from areal_lab.pipeline.rollout.groups import Rollout, sampling_params
from areal_lab.pipeline.rollout.turns import SampleEngine, TurnEngines, TurnRouter
from areal_lab.pipeline.servers.fixed_model import start_servers
from areal_lab.pipeline.servers.pool import ServerPool
from areal_lab.rewards.service import RewardService
from areal_lab.runlog.folder import RunFolder
from areal_lab.shell.display import Display
from areal_lab.shell.stop import StopSignal

GRACE_S: Final = 10.0
"""Seconds in which sampling calls may end after a stop was requested."""
_CUT_S: Final = 5.0
"""Seconds in which engines may return the tokens of aborted calls."""
_ABORT_S: Final = 0.2
"""Seconds between two abort requests to an engine."""
_LOOK_S: Final = 0.01
"""Seconds between two checks for calls on a lost engine."""
_SEED_NOTE: Final = (
    "with this engine, samples with the same seed may differ: they depend on the batch"
)
_STATE_S: Final = 5.0
"""Seconds between two checks for a changed state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Address and engines of a gateway that accepts requests."""

    url: str
    key_file: Path
    engines: str
    """Number and type of the engines, or their addresses."""
    open_to_others: bool
    """True if other machines can connect to the gateway."""


@dataclass(slots=True, kw_only=True)
class StandaloneGateway:
    """A gateway with its engines."""

    plan: GatewayPlan
    display: Display
    ready: Callable[[Ready], None]
    """Called once the gateway accepts requests."""
    stop: StopSignal
    """Requests the end of the gateway, after running calls have ended."""
    end_now: StopSignal
    """Requests to abort the running calls, which keep their tokens; canceling `run` loses these."""
    written: SessionLines | None = None
    """Writer of the file of sessions; None before the gateway serves."""
    _lines: SessionLines = field(init=False)
    _logs: RunFolder | None = None
    _service: Service = field(init=False)
    _sampling: WeakKeyDictionary[TreeConversation, SampleEngine] = field(
        default_factory=WeakKeyDictionary
    )
    _following: set[asyncio.Task[None]] = field(default_factory=set)
    _unwritten: dict[Session, None] = field(default_factory=dict)
    """Sessions to write even if they are exported, in order."""

    async def run(self) -> None:
        """Start engines, serve, and stop everything.

        Raises:
            Exception: the first error of any part, or the reason of the last engine's loss; the
                sessions have been written.
        """
        try:
            async with Fleet() as fleet:
                try:
                    await self._run(fleet)
                except BaseExceptionGroup as errors:
                    raise first_error(errors) from errors
        except asyncio.CancelledError:
            self._remove_logs()
            raise
        self._remove_logs()

    def _remove_logs(self) -> None:
        if self._logs is not None:
            remove_tree(self._logs.path)

    async def _run(self, fleet: Fleet) -> None:
        plan, options = self.plan, self.plan.options
        listener = bind(options.port, options.host)  # before the slow start of engines
        fleet.stack.callback(listener.close)
        conversations = Conversations(plan.served.model, plan.serving)
        self._lines = self.written = SessionLines(
            plan.folder, conversations.codec, discount=plan.serving.turn_discount
        )
        port = listener.getsockname()[1]
        key = fleet.stack.enter_context(admin_key(port, options.admin_key_file))
        logs = self._logs = RunFolder(Path(tempfile.mkdtemp(prefix="areal_lab-gateway-")))
        (logs.path / "logs").mkdir()
        self.display.note(f"logs of the engines: {logs.path / 'logs'} (removed at the end)")
        pool = await start_servers(
            plan.served,
            logs,
            fleet=fleet,
            display=self.display,
            restarts=plan.served.config.rollout.max_engine_restarts,
            clients=True,
        )
        rollout = _rollout(plan, conversations, pool)
        numbers = itertools.count()

        def open_conversation(task_id: str) -> TreeConversation:
            del task_id
            engine = rollout.sample_engine(stream="gateway", group=next(numbers), sample=0)
            conversation = conversations.open(engine, secrets.token_hex(8), seeds=True)
            self._sampling[conversation] = engine
            return conversation

        self._service = service = Service(
            open_conversation,
            open_evaluation=lambda: Evaluation(
                lambda: open_conversation("evaluation"), conversations.codec
            ),
            admin_key=key.key,
            model=plan.served.model.name,
            limits=plan.serving.limits,
            seed_note="" if BACKENDS[pool.backend].own_seeds else _SEED_NOTE,
            enforces_schemas=await _enforces_schemas(pool) and not conversations.opens_thinking,
            began=self._began,
            lost=self._lost,
        )
        async with AsyncExitStack() as stack:
            stack.callback(self._save_rest)
            await stack.enter_async_context(collected_in_pauses(lambda: not service.in_flight))
            serving = await stack.enter_async_context(served(service, listener))
            stack.push_async_callback(self._end_tasks)
            self._spawn(self._show_state())
            self.ready(
                Ready(
                    url=base_url(listener),
                    key_file=key.file,
                    engines=_engines(pool),
                    open_to_others=not is_loopback(listener),
                )
            )
            await self._until_over(serving, pool)
            if pool.given_up.is_set():
                await self._end_without_engines()
                assert pool.last_error is not None
                raise pool.last_error
            await self._end_calls(pool)

    async def _until_over(self, serving: asyncio.Task[None], pool: ServerPool) -> None:
        """Wait until a stop is requested or the last engine is lost.

        Raises:
            Exception: serving failed.
        """
        stopping = asyncio.create_task(self.stop.wait())
        losing = asyncio.create_task(pool.given_up.wait())
        try:
            await asyncio.wait((stopping, losing, serving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            losing.cancel()
        if serving.done():
            serving.result()

    async def _end_calls(self, pool: ServerPool) -> None:
        """Wait for sampling calls, and abort them after `GRACE_S`."""
        service = self._service
        if service.in_flight:
            self.display.note(
                f"stopping: {service.in_flight} sampling calls have {GRACE_S:g} s to end; press "
                "Ctrl-C again to abort them now"
            )
        draining = asyncio.create_task(service.drain(GRACE_S))
        ending_now = asyncio.create_task(self.end_now.wait())
        try:
            await asyncio.wait((draining, ending_now), return_when=asyncio.FIRST_COMPLETED)
        finally:
            draining.cancel()
            ending_now.cancel()
        if service.in_flight:
            # Abort on engines first, since a call that is given up has only the received tokens.
            with suppress(TimeoutError):
                async with asyncio.timeout(_CUT_S):
                    while service.in_flight:  # an engine cannot abort a request in transit to it
                        await pool.abort(self._on_engines())
                        await service.drain(_ABORT_S)
            await self._give_up()

    async def _end_without_engines(self) -> None:
        """End calls with the tokens that lost engines have returned."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_CUT_S):
                while self._on_engines():  # calls notice the loss themselves, and keep their tokens
                    await asyncio.sleep(_LOOK_S)
        await self._give_up()

    async def _give_up(self) -> None:
        """End the remaining calls with their tokens so far, including those without an engine."""
        for engine in list(self._sampling.values()):
            engine.give_up()
        await self._service.drain(_CUT_S)

    def _on_engines(self) -> list[str]:
        """Return the names of the requests that engines are running."""
        return [
            name
            for engine in self._sampling.values()
            for name, turn in engine.open.items()
            if turn.engine is not None
        ]

    # --- sessions ---

    def _began(self, session: Session) -> Mapping[str, Any]:
        if self.plan.writes_all:
            self._unwritten[session] = None
            self._spawn(self._write_at_end(session))
        return {}

    async def _write_at_end(self, session: Session) -> None:
        await self._service.settled(session)
        if self._save(session):
            # Clients can still export it over HTTP for a while.
            self._service.export(session, style="concat", discount=self.plan.serving.turn_discount)

    def _lost(self, session: Session) -> None:
        self._save(session)

    def _save(self, session: Session) -> bool:
        """Write a session; returns False if that fails, and `_save_rest` tries again."""
        if self.plan.writes_all and session not in self._unwritten:
            return True
        try:
            self._lines.write(session)
        except (OSError, ValueError) as error:
            what = str(error)
            if isinstance(error, OSError):
                what = f"{self._lines.file} cannot be written: {error.strerror}"
            self.display.note(what)
            self._unwritten[session] = None
            return False
        self._unwritten.pop(session, None)
        return True

    def _save_rest(self) -> None:
        """Write the remaining sessions.

        Raises:
            Exception: the first write error, after all other sessions are written.
        """
        # With `writes_all`, a session may be exported and not written.
        left = [] if self.plan.writes_all else self._service.sessions.unexported()
        errors: list[Exception] = []
        for session in dict.fromkeys([*left, *self._unwritten]):
            try:
                self._lines.write(session)
            except Exception as error:  # raised below
                errors.append(error)
        if errors:
            raise errors[0]

    # --- tasks ---

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._following.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._following.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.display.note(f"a task of the gateway failed: {error!r}")

    async def _end_tasks(self) -> None:
        tasks = list(self._following)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _show_state(self) -> None:
        shown = state_text(self._service.statistics())
        while True:
            await asyncio.sleep(_STATE_S)
            text = state_text(self._service.statistics())
            if text != shown:
                self.display.note(text)
            shown = text


def state_text(statistics: Mapping[str, Any]) -> str:
    """Describe the running and finished work of a gateway in one line.

    Args:
        statistics: statistics of its service.
    """
    counts: Mapping[str, int] = statistics["counts"]

    def count(name: str) -> int:
        return counts.get(name, 0)

    refused = count("refused_sessions") + count("refused_requests")
    problems = [
        f"{number:,} {what}"
        for number, what in ((count("failed"), "failed"), (refused, "refused"))
        if number
    ]
    return "; ".join(
        [
            f"sessions: {statistics['open_sessions']} open, {count('sessions'):,} started",
            f"calls: {statistics['requests_in_flight']} sampling, {count('calls'):,} started"
            + "".join(f", {problem}" for problem in problems),
            f"{count('generated_tokens'):,} tokens",
        ]
    )


class _WaitingRouter(TurnRouter):
    """Router whose turns wait if no engine is left: an error would drop their tokens."""

    async def acquire(self, engines: TurnEngines, key: Hashable) -> EngineId:
        """See `TurnRouter.acquire`."""
        try:
            return await super().acquire(engines, key)
        except Exception:
            await asyncio.Event().wait()
            raise


def _rollout(plan: GatewayPlan, conversations: Conversations, pool: ServerPool) -> Rollout:
    config = plan.served.config
    return Rollout(
        engines=pool,
        codec=conversations.codec,
        # Without workers: clients set the rewards of their sessions.
        rewards=RewardService(config.reward.fn),
        sampling=sampling_params(config.gconfig, conversations.codec, plan.served.model),
        run_seed=plan.seed,
        running_samples=config.rollout.max_running_requests,
        context_tokens=plan.served.context_tokens,
        router=_WaitingRouter(routing_named(config.rollout.routing).make_router()),
    )


async def _enforces_schemas(pool: ServerPool) -> bool:
    """Return whether all engines do."""
    clients = [server.client for server in pool.alive.values()]
    return all([await client.enforces_schemas() for client in clients])


def _engines(pool: ServerPool) -> str:
    servers = list(pool.alive.values())
    if any(server.process is None for server in servers):
        return ", ".join(server.client.base_url for server in servers)
    return f"{len(servers)} {pool.backend} engine{'s' if len(servers) > 1 else ''}"
