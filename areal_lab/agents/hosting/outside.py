"""Samples from outside sessions: each waits for a session, its end and its reward.

    POST /rl/start_session (admin key)  -->  the oldest waiting sample: its key, its problem
    calls of the model, /rl/set_reward, /rl/end_session (key of the session)
    ended, with a reward                -->  the sample

    task             waits for                             unblocked by
    run (each)       a session                             `/rl/start_session`
                     its end, its reward                   the client, or time
    expire           the last sessions of a task's group   time, from the start of the last one

A session without a reward is not a sample. If it has no task, the next session takes its place. If
it has a task, its group lacks a sample and is not trained on, because there may never be another
session on that task. The outcome is then `abandoned`, which is not a failure of the run.

Samples that wait for a session from outside, and which of them the next session gets.

    group 7   * * .      of task "a": the next session on "a" gets its waiting sample
    group 8   . . .      of nothing yet: the next session on another task, or on none
    group 9   . . .      later

A group is of one task, or of sessions without a task, because advantages compare its samples. Older
groups come first. Nothing here waits: `online` does.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from areal_lab.agents.conversation import TreeConversation
from areal_lab.agents.gateway.errors import ApiError
from areal_lab.agents.gateway.service import Service
from areal_lab.agents.gateway.sessions import Session
from areal_lab.agents.hosting.conversations import Conversations, Serving, episode_of
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
    """Samples of a run, and the service whose sessions produce them."""

    def __init__(
        self,
        conversations: Conversations,
        serving: Serving,
        *,
        admin_key: str,
        model: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without samples."""
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
        """Ended sessions by outcome, and those that never began."""
        self._conversations = conversations
        self._serving = serving
        self._expiring: dict[str, asyncio.TimerHandle] = {}

    def close(self) -> None:
        """Stop all timers."""
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
        """Outcome of a session for this sample, and whether it has a task."""
        try:
            session = await self._session(sample)
        except _GivenUp as error:
            return _abandoned(str(error)), True
        outcome = await self._ended(session)
        if outcome.status != "ok" and session.task_id:
            self._give_up(sample.group, outcome.detail)
        return outcome, bool(session.task_id)

    async def _session(self, sample: _Sample) -> Session:
        """Wait for the session that starts for this sample."""
        self.waiting.add(sample.group, sample)
        try:
            return await sample.session
        except asyncio.CancelledError:
            future = sample.session
            if not future.cancelled() and future.exception() is None:
                # It started just when the run stopped needing the sample.
                self.service.end_session(future.result(), "gateway")
            raise
        finally:
            self.waiting.remove(sample.group, sample)

    async def _ended(self, session: Session) -> RewardOutcome:
        """Outcome of a session, once it has ended."""
        try:
            await self.service.settled(session)
        finally:
            # If the run no longer needs it, the client learns so at its next call.
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
        """Stop waiting for a group's other samples if its task starts no further session."""
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
        """Stop waiting for a group's samples."""
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
    """Fields of a problem that JSON can hold."""
    found = {}
    for name, value in data.items():
        with suppress(TypeError, ValueError):
            json.dumps(value, allow_nan=False)
            found[name] = value
    return found


S = TypeVar("S")


@dataclass(slots=True)
class _Group(Generic[S]):
    samples: int = 0
    """Samples of the group that have not ended."""
    task: str | None = None
    """Task of its sessions, empty if they have none; None before the first."""
    waiting: deque[S] = field(default_factory=deque)


class WaitingSamples(Generic[S]):
    """Samples of a run that wait for a session."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group[S]] = {}  # by their start

    def __len__(self) -> int:
        return sum(len(group.waiting) for group in self._groups.values())

    def __contains__(self, name: object) -> bool:
        return name in self._groups

    @contextmanager
    def member(self, name: str) -> Iterator[None]:
        """Register a sample of a group: the group is dropped when its last sample ends."""
        group = self._groups.setdefault(name, _Group())
        group.samples += 1
        try:
            yield
        finally:
            group.samples -= 1
            if not group.samples:
                del self._groups[name]

    def add(self, name: str, sample: S) -> None:
        """Start waiting for a session of a sample; raises KeyError if it is not a `member`."""
        self._groups[name].waiting.append(sample)

    def remove(self, name: str, sample: S) -> None:
        """Stop waiting; does nothing if the sample does not wait."""
        if sample in self._groups[name].waiting:
            self._groups[name].waiting.remove(sample)

    def next(self, task: str) -> S | None:
        """Sample that a session on this task (empty for none) gets; None without one."""
        found = self._group_for(task)
        return None if found is None else found.waiting[0]

    def take(self, task: str) -> S:
        """Take a sample out; its group belongs to this task from now on."""
        found = self._group_for(task)
        if found is None:
            raise LookupError(f"no sample waits for a session on {task!r}")
        found.task = task
        return found.waiting.popleft()

    def of_group(self, name: str) -> tuple[S, ...]:
        """Waiting samples of a group."""
        group = self._groups.get(name)
        return () if group is None else tuple(group.waiting)

    def unfilled(self) -> dict[str, int]:
        """Tasks with an incomplete group, and the number of missing sessions."""
        found: dict[str, int] = {}
        for group in self._groups.values():
            if group.task and group.waiting:
                found[group.task] = found.get(group.task, 0) + len(group.waiting)
        return found

    def _group_for(self, task: str) -> _Group[S] | None:
        waiting = [group for group in self._groups.values() if group.waiting]
        begun = (group for group in waiting if group.task == task)
        return next(begun, None) or next((group for group in waiting if group.task is None), None)
