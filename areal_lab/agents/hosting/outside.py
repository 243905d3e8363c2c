"""Samples that sessions from outside make: each waits for one, and for its end and its reward.

    POST /rl/start_session (admin key)  -->  the oldest sample that waits: its key, its problem
    calls of the model, /rl/set_reward, /rl/end_session (key of the session)
    ended, with a reward                -->  the sample

    task             waits for                             unblocked by
    run (each)       a session                             `/rl/start_session`
                     its end, its reward                   the client, or time
    expire           the last sessions of a task's group   time, from the last that was started

A session without a reward is not a sample. One without a task gives its place to the next session.
One on a task leaves its group without a sample, which is then not trained on: nobody may ever start
another session on that task. That is `abandoned`, and no failure of the run.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from areal_lab.agents.conversation import TreeConversation
from areal_lab.agents.gateway.errors import ApiError
from areal_lab.agents.gateway.service import Service
from areal_lab.agents.gateway.sessions import Session
from areal_lab.agents.hosting.conversations import Conversations, Serving, episode_of
from areal_lab.agents.hosting.waiting import WaitingSamples
from areal_lab.agents.workflow import Episode, WorkflowEngine
from areal_lab.rewards.service import RewardOutcome


class _GivenUp(Exception):
    """No session will come for a sample; has the reason."""


@dataclass(slots=True, eq=False)
class _Sample:
    """A sample that waits for a session."""

    group: str
    conversation: TreeConversation
    told: Mapping[str, Any]
    session: asyncio.Future[Session] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class OutsideSamples:
    """The samples of a run, and the service whose sessions make them."""

    def __init__(
        self,
        conversations: Conversations,
        serving: Serving,
        *,
        admin_key: str,
        model: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin without samples.

        Args:
            conversations: of the model.
            serving: how sessions are served.
            admin_key: starts sessions.
            model: its name.
            clock: seconds of a clock that only goes forward, as that of the event loop.
        """
        self.service = Service(
            self._conversation_of,
            admin_key=admin_key,
            model=model,
            limits=serving.limits,
            clock=clock,
            began=self._began,
        )
        self.waiting: WaitingSamples[_Sample] = WaitingSamples()
        self.ends: Counter[str] = Counter()
        """Sessions that ended, by what became of them, and those that never began."""
        self._conversations = conversations
        self._serving = serving
        self._expiring: dict[str, asyncio.TimerHandle] = {}

    def close(self) -> None:
        """Let no time run out any more."""
        for timer in self._expiring.values():
            timer.cancel()

    async def run(self, engine: WorkflowEngine, data: Mapping[str, Any]) -> Episode:
        """See `Workflow.run`."""
        group = f"{engine.stream}-{engine.group}"
        told = {"group": group, "data": _sendable_fields(data)}
        try:
            with self.waiting.member(group):
                while True:
                    conversation = self._conversations.open(engine, secrets.token_hex(8))
                    sample = _Sample(group, conversation, told)
                    outcome, on_a_task = await self._outcome(sample)
                    if outcome.status == "ok" or on_a_task:
                        break
        finally:
            if group not in self.waiting and group in self._expiring:
                self._expiring.pop(group).cancel()
        of_turns = bool(outcome.rewards) or self._serving.turn_discount < 1
        return episode_of(conversation, outcome, of_turns=outcome.status == "ok" and of_turns)

    async def _outcome(self, sample: _Sample) -> tuple[RewardOutcome, bool]:
        """The outcome of a session for this sample, and whether it is on a task."""
        try:
            session = await self._session(sample)
        except _GivenUp as error:
            return _abandoned(str(error)), True
        outcome = await self._ended(session)
        if outcome.status != "ok" and session.task_id:
            self._give_up(sample.group, outcome.detail)
        return outcome, bool(session.task_id)

    async def _session(self, sample: _Sample) -> Session:
        """The session that starts for this sample.

        Raises:
            _GivenUp: its group cannot be completed.
        """
        self.waiting.add(sample.group, sample)
        try:
            return await sample.session
        except asyncio.CancelledError:
            future = sample.session
            if not future.cancelled() and future.exception() is None:
                # It was started in the moment in which the run ceased to need it.
                self.service.end_session(future.result(), "gateway")
            raise
        finally:
            self.waiting.remove(sample.group, sample)

    async def _ended(self, session: Session) -> RewardOutcome:
        """What became of a session, once it has ended."""
        try:
            await self.service.settled(session)
        finally:
            # If the run needs it no more: its client is told at its next call.
            self.service.end_session(session, "gateway")
        self.service.export(session, style="concat", discount=self._serving.turn_discount)
        reward = session.total_reward()
        if reward is not None:
            self.ends["rewarded"] += 1
            return RewardOutcome("ok", reward, session.rewards_by_name())
        timeout = session.ended_by == "timeout"
        self.ends["timeout" if timeout else session.outcome] += 1
        limit_s = self._serving.limits.session_timeout_s
        how = f"was not used for {limit_s:g} s" if timeout else "ended without a reward"
        return _abandoned(f"session {session.session_id} {how}")

    # --- of the gateway ---

    def _conversation_of(self, task_id: str) -> TreeConversation:
        while (sample := self.waiting.next(task_id)) is not None and sample.session.done():
            self.waiting.remove(sample.group, sample)  # its group has just been dropped
        if sample is None:
            raise ApiError(
                429,
                "no sample of the run waits for a session; it starts more as it trains",
                code="no_capacity",
                retry_after_s=self._serving.limits.retry_after_s,
            )
        return sample.conversation

    def _began(self, session: Session) -> Mapping[str, Any]:
        sample = self.waiting.take(session.task_id)
        assert sample.conversation is session.conversation
        sample.session.set_result(session)
        if session.task_id:
            self._expire_later(sample.group, session.task_id)
        return sample.told

    def _expire_later(self, group: str, task: str) -> None:
        """End the wait of a group's other samples if its task starts no further session."""
        if group in self._expiring:
            self._expiring.pop(group).cancel()
        if self.waiting.of_group(group):
            self._expiring[group] = asyncio.get_running_loop().call_later(
                self._serving.limits.session_timeout_s, self._expire, group, task
            )

    def _expire(self, group: str, task: str) -> None:
        wanted = len(self.waiting.of_group(group))
        self._give_up(
            group,
            f"task {task!r} started no further session in "
            f"{self._serving.limits.session_timeout_s:g} s, but its group wants {wanted} more; "
            "start as many sessions on a task as gconfig.n_samples",
        )

    def _give_up(self, group: str, why: str) -> None:
        """End the wait of a group's samples."""
        if group in self._expiring:
            self._expiring.pop(group).cancel()
        for sample in self.waiting.of_group(group):
            self.waiting.remove(group, sample)
            if not sample.session.done():
                self.ends["not_started"] += 1
                sample.session.set_exception(_GivenUp(why))


def _abandoned(why: str) -> RewardOutcome:
    return RewardOutcome("abandoned", math.nan, detail=why)


def _sendable_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a problem that JSON can hold."""
    found = {}
    for name, value in data.items():
        with suppress(TypeError, ValueError):
            json.dumps(value, allow_nan=False)
            found[name] = value
    return found
