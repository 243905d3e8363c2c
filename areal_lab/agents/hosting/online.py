"""Samples that programs outside of the run make: they know an address and a key, and no more.

    POST /rl/start_session (admin key)  -->  the oldest sample that waits: its key, its problem
    calls of the model, /rl/set_reward, /rl/end_session (key of the session)
    ended, with a reward                -->  the sample

    task             waits for                             unblocked by
    run (each)       a session                             `/rl/start_session`
                     its end, its reward                   the client, or time
    expire           the last sessions of a task's group   time, from the last that was started

A session without a reward is not a sample. One without a task gives its place to the next session.
One on a task leaves its group without a sample, which is then not trained on: nobody may ever start
another session on that task.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_lab.agents.conversation import TreeConversation
from areal_lab.agents.gateway.errors import ApiError
from areal_lab.agents.gateway.server import HOST, base_url, bind, is_loopback, served
from areal_lab.agents.gateway.service import Service
from areal_lab.agents.gateway.sessions import Session
from areal_lab.agents.hosting.admin_key import admin_key, check_admin_key_file, how_to_start
from areal_lab.agents.hosting.conversations import (
    RUN_REQUESTS,
    Conversations,
    Serving,
    episode_of,
    run_limits,
)
from areal_lab.agents.hosting.waiting import WaitingSamples
from areal_lab.agents.workflow import Episode, WorkflowEngine
from areal_lab.rewards.service import RewardOutcome


@dataclass(slots=True, eq=False)
class _Sample:
    """A sample that waits for a session."""

    group: str
    conversation: TreeConversation
    told: Mapping[str, Any]
    session: asyncio.Future[Session] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Online:
    """Samples that programs outside of the run make over HTTP, while weights change under them.

    Each session that ends with a reward is a sample: its reward is that of the session, or the sum
    of rewards of single replies, whose turns are then compared by their returns. Sessions with the
    same `task_id` are samples of one group.

    Args:
        host: address to listen on. One that other machines reach has to be trusted: requests are
            not encrypted.
        port: to listen on; 0 takes a free one.
        admin_key_file: file with the key that starts sessions, or to be made; empty is one of its
            own for each run.
        session_timeout_s: a session that is not used for so long is ended, and so is a group
            whose task starts no further session.
        reward_timeout_s: how long after its end a session may still get its reward.
        requests: calls that sample at once; one more is refused with 429.
        session_requests: calls that sample at once in one session.
        turn_discount: of rewards, from a reply to the one before it.
        turn_discount_style: `tree` carries rewards back along each conversation; `linear` in order
            of creation, as AReaL does, so that parallel conversations get each other's rewards.
        tool_call_parser: how calls of tools are read (`tool_calls.GRAMMARS`); `auto` is the one
            that the model's template writes.
        template: file of a chat template, instead of the model's.

    Raises:
        ValueError: a number is out of its bounds, or the file of the key cannot be used.
    """

    def __init__(
        self,
        *,
        host: str = HOST,
        port: int = 0,
        admin_key_file: str = "",
        session_timeout_s: float = 3600.0,
        reward_timeout_s: float = 0.0,
        requests: int = RUN_REQUESTS,
        session_requests: int = 64,
        turn_discount: float = 1.0,
        turn_discount_style: str = "tree",
        tool_call_parser: str = "auto",
        template: str = "",
    ) -> None:
        if not 0 <= port <= 65535:
            raise ValueError(f"port is {port}, but must be in [0, 65535]; 0 takes a free one")
        check_admin_key_file(admin_key_file)
        self._host = host
        self._port = port
        self._key_file = admin_key_file
        self._serving = Serving(
            tool_call_parser=tool_call_parser,
            template=template,
            turn_discount=turn_discount,
            turn_discount_style=turn_discount_style,
            limits=run_limits(
                requests=requests,
                session_requests=session_requests,
                session_timeout_s=session_timeout_s,
                reward_timeout_s=reward_timeout_s,
            ),
        )
        self._waiting: WaitingSamples[_Sample] = WaitingSamples()
        self._expiring: dict[str, asyncio.TimerHandle] = {}
        self._stack = AsyncExitStack()
        self._url = ""
        self.ends: Counter[str] = Counter()
        """Sessions that ended, by what became of them."""

    # --- of the run ---

    def check_model(self, model: Path) -> None:
        """See `ReadsModel`; the port must be free, too."""
        self._serving.check_model(model)
        bind(self._port, self._host).close()

    async def open(self, model: Path) -> None:
        """See `Opens`."""
        self._conversations = Conversations(model, self._serving)
        listener = bind(self._port, self._host)
        self._stack.callback(listener.close)
        self._url = base_url(listener)
        self._open_to_others = not is_loopback(listener)
        key = self._stack.enter_context(admin_key(listener.getsockname()[1], self._key_file))
        self._file = key.file
        self._service = Service(
            self._conversation_of,
            admin_key=key.key,
            model=model.name,
            limits=self._serving.limits,
            began=self._began,
        )
        await self._stack.enter_async_context(served(self._service, listener))

    async def close(self) -> None:
        """See `Opens`."""
        for timer in self._expiring.values():
            timer.cancel()
        await self._stack.aclose()
        self._url = ""

    def address(self) -> Mapping[str, str]:
        """See `Attended`."""
        return {"url": self._url, "admin_key_file": str(self._file)}

    def notices(self) -> tuple[str, ...]:
        """See `Attended`."""
        lines = [
            f"the run waits for sessions from outside at {self._url}; its admin key is in "
            f"{self._file}",
            f"start one: {how_to_start(self._url, self._file)}",
        ]
        if self._open_to_others:
            lines.append(
                f"the gateway listens on {self._host}: other machines can reach it, and requests "
                "are not encrypted"
            )
        return tuple(lines)

    def waiting_for(self) -> str:
        """See `Attended`."""
        samples = len(self._waiting)
        if not self._url or not samples:
            return ""
        sessions = f"{samples} session{'s' if samples > 1 else ''} from outside"
        unfilled = [f"{count} on {task!r}" for task, count in self._waiting.unfilled().items()]
        of_tasks = f", {', '.join(unfilled[:3])}" if unfilled else ""
        return f"{sessions} at {self._url} ({self._service.sessions.open} open{of_tasks})"

    async def run(self, engine: WorkflowEngine, data: Mapping[str, Any]) -> Episode:
        """See `Workflow.run`."""
        group = f"{engine.stream}-{engine.group}"
        told = {"group": group, "data": _sendable_fields(data)}
        try:
            with self._waiting.member(group):
                while True:
                    conversation = self._conversations.open(engine, secrets.token_hex(8))
                    sample = _Sample(group, conversation, told)
                    outcome, on_a_task = await self._outcome(sample)
                    if outcome.status == "ok" or on_a_task:
                        break
        finally:
            if group not in self._waiting and group in self._expiring:
                self._expiring.pop(group).cancel()
        of_turns = bool(outcome.rewards) or self._serving.turn_discount < 1
        return episode_of(conversation, outcome, of_turns=outcome.status == "ok" and of_turns)

    async def _outcome(self, sample: _Sample) -> tuple[RewardOutcome, bool]:
        """The outcome of a session for this sample, and whether it is on a task."""
        try:
            session = await self._session(sample)
        except TimeoutError as error:
            return RewardOutcome("timeout", math.nan, detail=str(error)), True
        return await self._ended(session), bool(session.task_id)

    async def _session(self, sample: _Sample) -> Session:
        """The session that starts for this sample.

        Raises:
            TimeoutError: its group wants sessions on a task that starts no more of them.
        """
        self._waiting.add(sample.group, sample)
        try:
            return await sample.session
        except asyncio.CancelledError:
            future = sample.session
            if not future.cancelled() and future.exception() is None:
                # It was started in the moment in which the run ceased to need it.
                self._service.end_session(future.result(), "gateway")
            raise
        finally:
            self._waiting.remove(sample.group, sample)

    async def _ended(self, session: Session) -> RewardOutcome:
        """What became of a session, once it has ended."""
        try:
            await self._service.settled(session)
        finally:
            # If the run needs it no more: its client is told at its next call.
            self._service.end_session(session, "gateway")
        self._service.export(session, style="concat", discount=self._serving.turn_discount)
        end = session.outcome
        self.ends["timeout" if session.ended_by == "timeout" and end != "rewarded" else end] += 1
        if end == "rewarded":
            return _outcome_of(session)
        if session.ended_by == "timeout":
            limit_s = self._serving.limits.session_timeout_s
            return RewardOutcome(
                "timeout",
                math.nan,
                detail=f"session {session.session_id} was not used for {limit_s:g} s",
            )
        return RewardOutcome(
            "error", math.nan, detail=f"session {session.session_id} ended without a reward"
        )

    # --- of the gateway ---

    def _conversation_of(self, task_id: str) -> TreeConversation:
        while (sample := self._waiting.next(task_id)) is not None and sample.session.done():
            self._waiting.remove(sample.group, sample)  # its group has just been dropped
        if sample is None:
            raise ApiError(
                429,
                "no sample of the run waits for a session; it starts more as it trains",
                code="no_capacity",
                retry_after_s=self._serving.limits.retry_after_s,
            )
        return sample.conversation

    def _began(self, session: Session) -> Mapping[str, Any]:
        sample = self._waiting.take(session.task_id)
        assert sample.conversation is session.conversation
        sample.session.set_result(session)
        if session.task_id:
            self._expire_later(sample.group, session.task_id)
        return sample.told

    def _expire_later(self, group: str, task: str) -> None:
        """End the wait of a group's other samples if its task starts no further session."""
        if group in self._expiring:
            self._expiring.pop(group).cancel()
        if self._waiting.of_group(group):
            self._expiring[group] = asyncio.get_running_loop().call_later(
                self._serving.limits.session_timeout_s, self._expire, group, task
            )

    def _expire(self, group: str, task: str) -> None:
        del self._expiring[group]
        samples = self._waiting.of_group(group)
        for sample in samples:
            self.ends["not_started"] += 1
            self._waiting.remove(group, sample)
            sample.session.set_exception(
                TimeoutError(
                    f"task {task!r} started no further session in "
                    f"{self._serving.limits.session_timeout_s:g} s, but its group wants "
                    f"{len(samples)} more; start as many sessions on a task as gconfig.n_samples"
                )
            )


def _outcome_of(session: Session) -> RewardOutcome:
    """The reward of a session, and those of its replies by their ids."""
    total = session.total_reward()
    assert total is not None, "it has one"
    return RewardOutcome("ok", total, session.rewards_by_name())


def _sendable_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a problem that JSON can hold."""
    found = {}
    for name, value in data.items():
        with suppress(TypeError, ValueError):
            json.dumps(value, allow_nan=False)
            found[name] = value
    return found
