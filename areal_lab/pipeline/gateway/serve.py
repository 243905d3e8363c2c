"""Serve a gateway of its own until it is asked to stop or the last engine is lost.

No token that an engine has returned is lost, unless serving itself fails or `run` is canceled.

    engines up --> clients: sessions, calls, rewards --> stop: nothing new, calls end --> sessions
                                                                                   that are left
    task             waits for                       unblocked by
    sessions (each)  its end, its reward             the client, or time; only if all are written
    state            a few seconds                   time

A session is left if nothing has exported it when the gateway ends, or when it is forgotten.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Hashable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

from areal_lab.agents.conversation import TreeConversation
from areal_lab.agents.gateway.server import base_url, bind, is_loopback, served
from areal_lab.agents.gateway.service import Service
from areal_lab.agents.gateway.sessions import Session
from areal_lab.agents.hosting.admin_key import admin_key
from areal_lab.agents.hosting.conversations import Conversations
from areal_lab.control.events import EngineId
from areal_lab.control.routing import routing_named
from areal_lab.host.collector import collected_in_pauses
from areal_lab.pipeline.fleet import Fleet, first_error
from areal_lab.pipeline.gateway.prepare import GatewayPlan
from areal_lab.pipeline.gateway.session_lines import SessionLines
from areal_lab.pipeline.progress import Display
from areal_lab.pipeline.rollout.groups import Rollout, context_tokens, sampling_params
from areal_lab.pipeline.rollout.turns import SampleEngine, TurnEngines, TurnRouter
from areal_lab.pipeline.servers.pool import ServerPool
from areal_lab.pipeline.servers.standing import start_standing
from areal_lab.rewards.service import RewardService
from areal_lab.runlog.folder import RunFolder

GRACE_S: Final = 10.0
"""How long calls that sample have to end once the gateway is asked to stop."""
_CUT_S: Final = 5.0
"""How long engines have to return what there is of calls that are cut off."""
_ABORT_S: Final = 0.2
"""Between two requests to an engine to abort what it has."""
_LOOK_S: Final = 0.01
"""Between two looks at whether calls have left an engine that is lost."""
_STATE_S: Final = 5.0
"""Between two looks at whether the state has changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Address and engines of a gateway that serves."""

    url: str
    key_file: Path
    engines: str
    """What samples, in a few words."""
    open_to_others: bool
    """Whether other machines can reach it."""


@dataclass(slots=True, kw_only=True)
class StandaloneGateway:
    """One gateway with its engines."""

    plan: GatewayPlan
    display: Display
    ready: Callable[[Ready], None]
    """Called once it serves."""
    stop: asyncio.Event
    """Set to end it, once calls that sample have ended."""
    hurry: asyncio.Event
    """Set to cut them off then, with the tokens so far. Canceling `run` loses these tokens."""
    written: SessionLines | None = None
    """What was written; None before it serves."""
    _lines: SessionLines = field(init=False)
    _logs: RunFolder | None = None
    _service: Service = field(init=False)
    _sampling: WeakKeyDictionary[TreeConversation, SampleEngine] = field(
        default_factory=WeakKeyDictionary
    )
    _following: set[asyncio.Task[None]] = field(default_factory=set)
    _unwritten: dict[Session, None] = field(default_factory=dict)
    """Sessions that are to be written whether they are exported or not, in order."""

    async def run(self) -> None:
        """Start engines, serve, and end all.

        Raises:
            Exception: the first error of any part, or why the last engine was lost; sessions are
                written before.
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
            shutil.rmtree(self._logs.path, ignore_errors=True)

    async def _run(self, fleet: Fleet) -> None:
        plan = self.plan
        listener = bind(plan.port, plan.host)  # before engines start, which takes a while
        fleet.stack.callback(listener.close)
        conversations = Conversations(plan.model, plan.serving)
        self._lines = self.written = SessionLines(
            plan.folder, conversations.codec, discount=plan.serving.turn_discount
        )
        key = fleet.stack.enter_context(admin_key(listener.getsockname()[1], plan.admin_key_file))
        logs = self._logs = RunFolder(Path(tempfile.mkdtemp(prefix="areal_lab-gateway-")))
        (logs.path / "logs").mkdir()
        self.display.note(f"logs of engines are in {logs.path / 'logs'}, if they fail")
        pool = await start_standing(
            plan.config,
            logs,
            plan.model,
            fleet=fleet,
            display=self.display,
            restarts=plan.config.rollout.max_engine_restarts,
            conversations=True,
        )
        rollout = _rollout(plan, conversations, pool)
        numbers = itertools.count()

        def open_conversation(task_id: str) -> TreeConversation:
            del task_id
            engine = rollout.sample_engine(stream="gateway", group=next(numbers), sample=0)
            conversation = conversations.open(engine, secrets.token_hex(8))
            self._sampling[conversation] = engine
            return conversation

        self._service = service = Service(
            open_conversation,
            admin_key=key.key,
            model=plan.model.name,
            limits=plan.serving.limits,
            began=self._began,
            lost=self._lost,
        )
        async with AsyncExitStack() as stack:
            stack.callback(self._save_rest)
            await stack.enter_async_context(collected_in_pauses(lambda: not service.in_flight))
            serving = await stack.enter_async_context(served(service, listener))
            stack.push_async_callback(self._end_tasks)
            self._spawn(self._tell_state())
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
        """Wait until it is asked to stop, or the last engine is lost.

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
        """Let what samples end, or cut it off."""
        service = self._service
        if service.in_flight:
            self.display.note(
                f"stopping: calls that sample ({service.in_flight}) have {GRACE_S:g} s to end; "
                "press Ctrl-C again to cut them off now"
            )
        draining = asyncio.create_task(service.drain(GRACE_S))
        hurrying = asyncio.create_task(self.hurry.wait())
        try:
            await asyncio.wait((draining, hurrying), return_when=asyncio.FIRST_COMPLETED)
        finally:
            draining.cancel()
            hurrying.cancel()
        if service.in_flight:
            # Engines first: a reply that is given up has only what has arrived of it.
            with suppress(TimeoutError):
                async with asyncio.timeout(_CUT_S):
                    while service.in_flight:  # an engine cannot abort what is on its way to it
                        await pool.abort(self._on_engines())
                        await service.drain(_ABORT_S)
            await self._give_up()

    async def _end_without_engines(self) -> None:
        """Let calls end with the tokens that lost engines have returned."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_CUT_S):
                while self._on_engines():  # they notice the loss themselves, with their tokens
                    await asyncio.sleep(_LOOK_S)
        await self._give_up()

    async def _give_up(self) -> None:
        """End the calls that are left with the tokens so far, also those without an engine."""
        for engine in list(self._sampling.values()):
            engine.give_up()
        await self._service.drain(_CUT_S)

    def _on_engines(self) -> list[str]:
        """The names of the requests that engines have now."""
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
            # For a while it can be exported over HTTP, too.
            self._service.export(session, style="concat", discount=self.plan.serving.turn_discount)

    def _lost(self, session: Session) -> None:
        self._save(session)

    def _save(self, session: Session) -> bool:
        """Write a session; False if it cannot be written, which the end tries again."""
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
        """Write what is not written yet.

        Raises:
            Exception: the first session that cannot be written; the others are.
        """
        # Whether one was exported does not tell whether it was written.
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

    async def _tell_state(self) -> None:
        told = state_text(self._service.statistics())
        while True:
            await asyncio.sleep(_STATE_S)
            text = state_text(self._service.statistics())
            if text != told:
                self.display.note(text)
            told = text


def state_text(statistics: Mapping[str, Any]) -> str:
    """What a gateway does now and has done so far, in one line.

    Args:
        statistics: of its service.
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
            f"calls: {statistics['requests_in_flight']} sampling, {count('calls'):,} begun"
            + "".join(f", {problem}" for problem in problems),
            f"{count('generated_tokens'):,} tokens",
        ]
    )


class _WaitingRouter(TurnRouter):
    """If no engine is left, turns wait to be given up: an error would drop their tokens."""

    async def acquire(self, engines: TurnEngines, key: Hashable) -> EngineId:
        """See `TurnRouter.acquire`."""
        try:
            return await super().acquire(engines, key)
        except Exception:
            await asyncio.Event().wait()
            raise


def _rollout(plan: GatewayPlan, conversations: Conversations, pool: ServerPool) -> Rollout:
    config = plan.config
    return Rollout(
        engines=pool,
        codec=conversations.codec,
        # Its workers are never started: clients set the rewards of their sessions.
        rewards=RewardService(config.reward.fn),
        sampling=sampling_params(config.gconfig, conversations.codec, plan.model),
        run_seed=plan.seed,
        running_samples=config.rollout.max_running_requests,
        context_tokens=context_tokens(config, plan.model),
        router=_WaitingRouter(routing_named(config.rollout.routing).make_router()),
    )


def _engines(pool: ServerPool) -> str:
    servers = list(pool.alive.values())
    if any(server.process is None for server in servers):
        return ", ".join(server.client.base_url for server in servers)
    return f"{len(servers)} {pool.backend} engine{'s' if len(servers) > 1 else ''}"
