"""The reward service: scores completions off the event loop, in processes that can be killed.

    score(group) --> an idle worker --(one request)--> function(completion, example) each
                                    <--(an outcome as each ends)--

A timeout or a crash of a worker costs one completion and a new worker, which scores the rest of the
group; other groups are not affected. A worker that ended while it was idle is only replaced.
Failures are counted, not scored 0: their reward is NaN. Workers end with this process, however it
ends. Nothing from a worker is unpickled; a worker that sends an invalid reply is also ended.
"""

from __future__ import annotations

import asyncio
import math
import pickle
import select
import socket
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeAlias, get_args

from areal_lab.config.functions import pickle_function
from areal_lab.config.schema import RewardConfig
from areal_lab.control.liveness import Silence
from areal_lab.data.problems import Problem
from areal_lab.host.isolation import LevelSetting
from areal_lab.host.owned_folders import remove_tree
from areal_lab.host.processes import Child, start_child
from areal_lab.host.silence import starves, unless_silent
from areal_lab.rewards.wire import (
    LENGTH,
    BadReply,
    Failed,
    Ready,
    Reply,
    Scored,
    ScoreRequest,
    Status,
    by_name,
    read_reply,
    reply_size,
)

RewardFunction: TypeAlias = Callable[[str, Mapping[str, Any]], Any]
"""`(completion, example) -> float | dict[str, float] | None`, or an awaitable of these; None is
no reward."""

START_TIMEOUT_S = 120.0
"""Longest wait until a worker has loaded the function; not part of the function's timeout."""

_EXIT_GRACE_S = 2.0  # between the end of the connection and the end of the process

_SOFT_TIMEOUT_GRACE_S = 1.0  # an async function is stopped inside its worker first


@dataclass(frozen=True, slots=True)
class RewardOutcome:
    """Result of scoring one completion."""

    status: Status | Literal["abandoned"]
    """A sample of programs outside of the run is `abandoned` if they end it without a reward,
    which is not a failure of the run."""
    reward: float
    """Reward to train on; NaN unless `status` is ok."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Named parts, if the function returned some; `reward` is the part of that name, else their
    weighted sum."""
    detail: str = ""
    """Traceback of the function, or the exit of the worker."""


@dataclass(slots=True)
class _Worker:
    """One worker process and our end of its socket."""

    child: Child
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    is_async: bool = False
    requests: int = 0

    @property
    def usable(self) -> bool:
        """True if it waits for a request; False if it has ended, or has sent something
        unexpected.
        """
        if self.reader.at_eof() or self.writer.is_closing():
            return False
        # Includes data that the event loop has not read yet.
        poll = select.poll()
        poll.register(self.writer.get_extra_info("socket").fileno(), select.POLLIN)
        return not poll.poll(0)

    async def receive(self) -> Reply:
        header = await self.reader.readexactly(LENGTH.size)
        return read_reply(await self.reader.readexactly(reply_size(header)))

    async def receive_within(self, limit_s: float) -> Reply:
        """Next reply; time in which the worker waits for a CPU does not count."""
        silence = Silence(limit_s)
        return await unless_silent(
            self.receive(), silence.passed, starves(self.child.pid), limit_s=limit_s
        )

    def send(self, message: object) -> None:
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self.writer.write(LENGTH.pack(len(data)) + data)

    async def stop(self) -> None:
        self.writer.close()
        await self.child.stop()


class RewardService:
    """Run one reward function in worker processes.

    >>> async with RewardService("my_rewards:score", timeout_s=10, workers=2) as rewards:
    ...     outcomes = await rewards.score(completions, problem)

    Args:
        function: a callable, which may be defined in a notebook or script; `module:function`; or
            the address of a service (`rewards.http`).
        timeout_s: time limit of one completion. A sync function scores the completions of a group
            in order, an async one all concurrently.
        workers: groups scored concurrently.
        weights: factors of the named numbers that the function returns (1 if missing); the sum is
            the reward.
        kwargs: keyword arguments of a function that is given by name, or of a class.
        sandbox: containment of model code, for a function with a parameter of this name.
        max_error_rate: share of failed and timed-out calls among the last 100 above which `score`
            raises. Missing calls count as successful.
        log_folder: for the function's output; None uses a temporary folder.
    """

    def __init__(
        self,
        function: RewardFunction | str,
        *,
        timeout_s: float = 10.0,
        workers: int = 1,
        weights: Mapping[str, float] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        sandbox: LevelSetting = "auto",
        max_error_rate: float = 0.1,
        log_folder: Path | None = None,
    ) -> None:
        if not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s}, but must be > 0 (seconds)")
        if workers < 1:
            raise ValueError(f"workers is {workers}, but must be >= 1")
        if not 0 <= max_error_rate <= 1:
            raise ValueError(f"max_error_rate is {max_error_rate}, but must be in [0, 1]")
        self._function, self._kwargs = function, dict(kwargs or {})
        if isinstance(function, str):
            self._function, self._kwargs = by_name(function, self._kwargs)
        self._timeout_s = timeout_s
        self._workers = workers
        self._weights = dict(weights or {})
        self._sandbox: LevelSetting = sandbox
        self._log_folder = log_folder
        self._worker_arguments: list[str] = []
        self._failures = FailureRate("the reward function", max_error_rate)
        self._counts: Counter[str] = Counter()
        self._idle: asyncio.Queue[_Worker | None] = asyncio.Queue()  # None: start one when needed
        self._alive: list[_Worker] = []
        self._started = 0
        self._stack = AsyncExitStack()

    @classmethod
    def of(
        cls,
        config: RewardConfig,
        function: RewardFunction | str = "",
        *,
        log_folder: Path,
        max_error_rate: float | None = None,
    ) -> RewardService:
        """Create the service of a configuration; a `function` replaces `config.fn` unless it is
        empty.
        """
        return cls(
            function or config.fn,
            kwargs=config.kwargs,
            sandbox=config.sandbox,
            timeout_s=config.timeout_s,
            workers=config.workers,
            weights=config.weights,
            max_error_rate=config.max_error_rate if max_error_rate is None else max_error_rate,
            log_folder=log_folder,
        )

    @property
    def counts(self) -> dict[str, int]:
        """Number of calls by status: `ok`, `timeout` (took too long), `error` (failed),
        `refused` (returned None).
        """
        return {status: self._counts[status] for status in get_args(Status)}

    async def __aenter__(self) -> RewardService:
        """Start the workers."""
        if self._log_folder is None:
            folder = tempfile.mkdtemp(prefix="areal-reward-")
            self._stack.callback(remove_tree, folder)
            self._log_folder = Path(folder)
            self._worker_arguments = [folder]
        self._stack.push_async_callback(self._stop_all)
        try:
            async with asyncio.TaskGroup() as group:
                starts = [group.create_task(self._start()) for _ in range(self._workers)]
        except BaseExceptionGroup as errors:
            await self._stack.aclose()
            raise errors.exceptions[0] from None
        except BaseException:
            await self._stack.aclose()
            raise
        for start in starts:
            self._idle.put_nowait(start.result())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the workers."""
        await self._stack.aclose()

    async def score(
        self, completions: Sequence[str], example: Problem | Mapping[str, Any]
    ) -> list[RewardOutcome]:
        """Score the completions of one problem; returns the outcomes in the same order."""
        if isinstance(example, Problem):
            example = example.as_example()
        worker = await self._idle.get()
        outcomes: dict[int, RewardOutcome] = {}
        one_by_one = False
        try:
            if worker is not None and not worker.usable:
                await self._discard(worker)
                worker = None
            while len(outcomes) < len(completions):
                if worker is None:
                    worker = await self._start()
                left = [i for i in range(len(completions)) if i not in outcomes]
                together = worker.is_async and not one_by_one
                broken = await self._score(
                    worker, left, completions, example, outcomes, together=together
                )
                if broken is None:
                    continue
                await self._discard(worker)
                worker = None
                # To find the one that crashed the worker, score them one by one.
                if together and len(left) > 1:
                    one_by_one = True
                else:
                    culprit = next(index for index in left if index not in outcomes)
                    outcomes[culprit] = broken
        except BaseException:
            # A worker in the middle of a request cannot take the next one.
            if worker is not None:
                await asyncio.shield(self._discard(worker))
                worker = None
            raise
        finally:
            self._idle.put_nowait(worker)
        result = [outcomes[index] for index in range(len(completions))]
        self._count(result)
        return result

    async def _score(
        self,
        worker: _Worker,
        left: Sequence[int],
        completions: Sequence[str],
        example: Mapping[str, Any],
        outcomes: dict[int, RewardOutcome],
        *,
        together: bool,
    ) -> RewardOutcome | None:
        """Score the completions `left` into `outcomes`; returns a failure of the worker, if any."""
        chosen = tuple(completions[index] for index in left)
        worker.requests += 1
        request = ScoreRequest(worker.requests, chosen, example, together, self._timeout_s)
        worker.send(request)
        # Longer than the timeout of an async function, which the worker itself enforces.
        allowance_s = self._timeout_s + (_SOFT_TIMEOUT_GRACE_S if worker.is_async else 0.0)
        started_s = time.monotonic()
        for _ in left:
            try:
                scored = await worker.receive_within(allowance_s)
                index = _index(scored, request, left, outcomes)
            except TimeoutError:
                waited_s = time.monotonic() - started_s
                return RewardOutcome(
                    "timeout", math.nan, detail=f"no reward after {waited_s:.3g} s; stopped"
                )
            except (asyncio.IncompleteReadError, ConnectionError):
                return RewardOutcome("error", math.nan, detail=await _exit_reason(worker))
            except BadReply as error:
                detail = f"{worker.child.name} sent {error}; stopped"
                return RewardOutcome("error", math.nan, detail=detail)
            assert isinstance(scored, Scored), "checked by _index"
            outcomes[index] = RewardOutcome(
                scored.status, scored.reward, scored.rewards, scored.detail
            )
            started_s = time.monotonic()
        return None

    async def _start(self) -> _Worker:
        """Start a worker; returns it once it has loaded the function."""
        assert self._log_folder is not None, "the service was not entered"
        ours, theirs = socket.socketpair()
        name = f"reward worker {self._started}"
        log_path = self._log_folder / f"reward-{self._started}.log"
        self._started += 1
        with theirs:
            fds = [theirs.fileno()]
            arguments = [str(fds[0]), *self._worker_arguments]
            # First: nothing would end a process that starts before a cancellation here.
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            try:
                child = await start_child(
                    name, "areal_lab.rewards.worker", arguments, log_path=log_path, pass_fds=fds
                )
            except BaseException:
                writer.close()
                raise
        worker = _Worker(child, reader, writer)
        self._alive.append(worker)
        try:
            settings = (self._kwargs, self._weights, self._sandbox)
            worker.send((sys.path, *self._portable_function(), *settings))
            reply = await worker.receive_within(START_TIMEOUT_S)
        except TimeoutError:
            await self._discard(worker)
            raise RewardError(
                f"the reward function was not loaded within {START_TIMEOUT_S:g} s"
            ) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            ended = await _exit_reason(worker)
            await self._discard(worker)
            raise RewardError(f"the reward function could not be loaded: {ended}") from None
        except BadReply as error:
            await self._discard(worker)
            raise RewardError(f"the reward function's worker sent {error}") from None
        except BaseException:
            await self._discard(worker)
            raise
        if isinstance(reply, Failed):
            await self._discard(worker)
            raise RewardError(f"the reward function could not be loaded:\n{reply.traceback}")
        if not isinstance(reply, Ready):
            await self._discard(worker)
            raise RewardError("the reward function's worker sent a reward before it was asked")
        worker.is_async = reply.is_async
        return worker

    def _portable_function(self) -> tuple[bool, str | bytes]:
        """Return whether the function is sent by name, and its name or pickle."""
        if isinstance(self._function, str):
            return True, self._function
        return False, pickle_function(self._function)

    async def _discard(self, worker: _Worker) -> None:
        if worker in self._alive:
            self._alive.remove(worker)
            await worker.stop()

    async def _stop_all(self) -> None:
        await asyncio.gather(*(self._discard(worker) for worker in list(self._alive)))

    def _count(self, outcomes: Sequence[RewardOutcome]) -> None:
        """Update the counts; raise if too many of the last calls failed."""
        self._counts.update(outcome.status for outcome in outcomes)
        for one in outcomes:
            self._failures.add("" if one.status == "ok" else f"{one.status}: {one.detail}")


def _index(
    reply: Reply, request: ScoreRequest, left: Sequence[int], outcomes: Mapping[int, RewardOutcome]
) -> int:
    """Index in the group of the completion that a reply is about."""
    if not isinstance(reply, Scored) or reply.request != request.number:
        raise BadReply("a reply to something else")
    if not 0 <= reply.index < len(left) or left[reply.index] in outcomes:
        raise BadReply(f"a reply about completion {reply.index}, which was not waited for")
    return left[reply.index]


async def _exit_reason(worker: _Worker) -> str:
    """Exit of the worker's process, after its socket closed."""
    try:
        async with asyncio.timeout(_EXIT_GRACE_S):
            return str(await worker.child.died())
    except TimeoutError:
        return f"{worker.child.name} (process {worker.child.pid}) closed its connection"


WINDOW = 100
"""Number of recent calls over which the share is computed."""


class RewardError(RuntimeError):
    """A reward function or workflow failed too often, or could not be loaded; has a traceback."""


@dataclass(slots=True)
class FailureRate:
    """Count failures among the last 100 calls; missing calls count as successful."""

    what: str = "the workflow"
    """Subject of the error's message."""
    largest: float = 0.1
    """Share above which `add` raises."""
    failed: int = 0
    """Failures since the start."""
    first: str = ""
    """Detail of the first failure."""
    _recent: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, failure: str) -> None:
        """Count a call; `failure` is its reason, or empty.

        Raises RewardError, with the first failure, if too many of the last calls failed.
        """
        self._recent.append(bool(failure))
        if failure:
            self.failed += 1
            self.first = self.first or failure
        failed = sum(self._recent)
        if failed > self.largest * WINDOW:
            raise RewardError(
                f"{self.what} failed or timed out in {failed} of the last "
                f"{len(self._recent)} calls (max_error_rate {self.largest:g} allows "
                f"{self.largest * WINDOW:g} of {WINDOW}); "
                f"first failure: {self.first}"
            )
