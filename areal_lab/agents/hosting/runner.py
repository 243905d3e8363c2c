"""Runners: environments of other libraries, each in a process of its own Python.

    Runners.run(task, address) --a line of JSON--> loop.py, by the environment's Python
                               <--a line of JSON-- reward, or the reason why there is none

A runner has many samples at once. A sample that takes too long is canceled; the others continue. A
runner that ends, sends something other than replies, or does not reply to a cancellation is killed
with all processes that it has started. Its samples then have no reward, and the next sample starts
it again. A failure is never a reward of 0.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import socket
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from areal_lab.config.sections import EnvironmentConfig
from areal_lab.data.runners.loop import LINE_BYTES, end_marked
from areal_lab.data.runners.tasks import START_TIMEOUT_S, command, hello, python_of, said, variables
from areal_lab.host.owned_folders import remove_tree
from areal_lab.host.processes import Child, exit_text, start_command
from areal_lab.rewards.service import RewardError, RewardOutcome

CANCEL_GRACE_S: Final = 30.0
"""Longest wait for the answer to a cancellation, after which a runner counts as hung."""
_EXIT_GRACE_S: Final = 2.0
_SHOWN: Final = 80
"""Bytes of a wrong line in an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A sample of an environment."""

    outcome: RewardOutcome
    truncated: bool = False
    """It met a limit of the environment, such as its most turns, and has a reward nonetheless."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the environment measured besides."""
    stop: str = ""
    """Why it ended, in the words of the environment's library."""


class RunnerLost(RuntimeError):
    """The runner has ended, or was killed; the message has the reason."""


class _Refused(RuntimeError):
    """The runner replied with an error."""


class Runner:
    """One process, and the calls that wait for its replies."""

    def __init__(self, number: int, environment: EnvironmentConfig, folder: Path) -> None:
        self.lost = ""
        """Why it is of no more use."""
        self.samples = 0
        """Samples that it runs."""
        self._name = f"environment runner {number}"
        self._environment = environment
        self._log = folder / f"environment-{number}.log"
        self._mark = secrets.token_hex(16)
        self._calls = 0
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._dropped: set[int] = set()
        self._child: Child | None = None
        self._stopped: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process, and load the environment.

        Raises:
            RunnerLost: it ended, or took too long.
            _Refused: the environment cannot be served.
        """
        python = python_of(self._environment)
        ours, theirs = socket.socketpair()
        with theirs:
            # First: nothing would end a process that starts before a cancellation here.
            reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=LINE_BYTES)
            try:
                self._child = await start_command(
                    self._name,
                    command(python, theirs.fileno()),
                    log_path=self._log,
                    environment=variables(python, self._mark),
                    pass_fds=[theirs.fileno()],
                )
            except BaseException as error:
                self.lost = f"{self._name} could not start: {error}"
                self._writer.close()
                raise
        self._reading = asyncio.create_task(self._read(reader, self._child), name=self._name)
        self._watching = asyncio.create_task(self._watch(self._child), name=self._name)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self.call(**hello(self._environment))
        except TimeoutError:
            await self.stop(f"did not load the environment in {START_TIMEOUT_S:g} s")
            raise RunnerLost(self.lost) from None
        except BaseException as error:
            self._lose(f"could not load the environment: {error}")
            await self.stop()
            raise

    async def call(self, call: str, **fields: Any) -> Any:
        """Value of the reply to a call."""
        number, future = self._send(call, fields)
        try:
            return await asyncio.shield(future)
        finally:
            self._drop(number)

    async def run(self, timeout_s: float, fields: Mapping[str, Any]) -> Any:
        """Value of a sample.

        Raises:
            TimeoutError: it took too long, and is canceled.
        """
        number, future = self._send("run", fields)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(future)
        except TimeoutError:
            await self._cancel(number)
            raise
        except asyncio.CancelledError:
            if not self.lost:
                self._send("cancel", {"of": number})  # whose reply nobody needs
            raise
        finally:
            self._drop(number)

    async def stop(self, reason: str = "was stopped") -> None:
        """End the process and all that it has started. Idempotent."""
        self._lose(reason)
        if self._stopped is not None:
            await asyncio.shield(self._stopped)

    async def close(self) -> None:
        """Let the environment end what it has started, then end the process. Idempotent."""
        if self._child is not None and not self.lost:
            self._send("close", {})
            with suppress(TimeoutError):
                async with asyncio.timeout(_EXIT_GRACE_S):
                    await self._child.ended()
        await self.stop()

    def _send(self, call: str, fields: Mapping[str, Any]) -> tuple[int, asyncio.Future[Any]]:
        if self.lost:
            raise RunnerLost(self.lost)
        self._calls += 1
        future = asyncio.get_running_loop().create_future()
        # The error of a call that nobody waits for any more is no error of the run.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._pending[self._calls] = future
        request = {"id": self._calls, "call": call, **fields}
        self._writer.write(json.dumps(request).encode() + b"\n")
        return self._calls, future

    def _drop(self, number: int) -> None:
        """Wait no more for a reply, which may still come."""
        future = self._pending.pop(number, None)
        if future is not None and not future.done():
            self._dropped.add(number)
            future.cancel()

    async def _cancel(self, number: int) -> None:
        """Cancel a sample; a runner that does not answer that is hung."""
        if self.lost:
            return
        try:
            async with asyncio.timeout(CANCEL_GRACE_S):
                await self.call("cancel", of=number)
        except TimeoutError:
            await self.stop(f"did not answer for {CANCEL_GRACE_S:g} s, and was killed")
        except (RunnerLost, _Refused):
            pass

    async def _read(self, reader: asyncio.StreamReader, child: Child) -> None:
        """Give replies to the calls that wait for them, until there are no more."""
        line = b""
        try:
            while line := await reader.readline():
                reply = json.loads(line)
                number, failed = reply["id"], "error" in reply
                value = reply["error" if failed else "value"]
                if number in self._dropped:
                    self._dropped.discard(number)
                    continue
                future = self._pending.pop(number)
                if future.done():
                    continue
                if failed:
                    future.set_exception(_Refused(str(value)))
                else:
                    future.set_result(value)
            reason = await self._exit(child)
        except (ValueError, KeyError, TypeError, RecursionError):
            shown = line[:_SHOWN]  # empty if it was longer than a line may be
            reason = f"sent {shown!r}, which is no reply, and was killed"
        except ConnectionError:
            reason = await self._exit(child)
        self._lose(reason)

    async def _watch(self, child: Child) -> None:
        """Notice the end of the process also where something that it has forked keeps the
        connection open."""
        await child.ended()
        await asyncio.wait([self._reading], timeout=_EXIT_GRACE_S)  # what it sent before
        if not self.lost:
            self._lose(await self._exit(child))

    async def _exit(self, child: Child) -> str:
        try:
            async with asyncio.timeout(_EXIT_GRACE_S):
                return f"{exit_text(await child.process.wait())}; {said(self._log)}"
        except TimeoutError:
            return "closed its connection, and was killed"

    def _lose(self, reason: str) -> None:
        """Take no more calls, and begin to end the process."""
        self.lost = self.lost or f"{self._name} {reason}"
        if self._stopped is None and self._child is not None:
            self._stopped = asyncio.create_task(self._stop(self._child))

    async def _stop(self, child: Child) -> None:
        self._writer.close()
        await child.stop(at_once=True)
        await asyncio.to_thread(end_marked, self._mark)
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        for future in self._pending.values():
            if not future.done():
                future.set_exception(RunnerLost(self.lost))
        self._pending.clear()


class Runners:
    """The processes of an environment: samples run in the one that has the fewest.

    Args:
        environment: settings.

    Raises:
        ValueError: they name no environment, or no Python; in one line.
    """

    def __init__(self, environment: EnvironmentConfig) -> None:
        hello(environment)
        python_of(environment)
        self._environment = environment
        self._runners: list[Runner] = []
        self._starting = [asyncio.Lock() for _ in range(environment.workers)]
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Runners:
        """Start all processes."""
        folder = tempfile.mkdtemp(prefix="areal-environment-")
        self._folder = Path(folder)
        self._stack.callback(remove_tree, folder)
        self._stack.push_async_callback(self._close)
        numbers = range(self._environment.workers)
        self._runners = [Runner(n, self._environment, self._folder) for n in numbers]
        try:
            await asyncio.gather(*(one.start() for one in self._runners))
        except BaseException as error:
            await self._stack.aclose()
            if isinstance(error, RunnerLost | _Refused | OSError):
                raise RewardError(f"environment {self._environment.name}: {error}") from None
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop all processes."""
        await self._stack.aclose()

    async def run(self, task: str, address: str) -> Played:
        """Run one sample of a task, by its id; `address` is the base URL of the model, with the key
        of the sample.
        """
        settings = self._environment
        number = min(range(len(self._runners)), key=lambda n: self._runners[n].samples)
        fields = {
            "task": task, "base_url": address, "model": "policy", "max_turns": settings.max_turns,
        }  # fmt: skip
        self._runners[number].samples += 1
        try:
            runner = await self._ready(number)
            return played(await runner.run(settings.timeout_s, fields))
        except TimeoutError:
            detail = f"the environment took more than {settings.timeout_s:g} s"
            return Played(outcome=RewardOutcome("timeout", math.nan, detail=detail))
        except (RunnerLost, _Refused, OSError, ValueError) as error:
            return _failed(str(error))
        finally:
            self._runners[number].samples -= 1

    async def _ready(self, number: int) -> Runner:
        """The runner of this number, started again if it is lost."""
        async with self._starting[number]:
            runner = self._runners[number]
            if runner.lost:
                await runner.stop()
                again = Runner(number, self._environment, self._folder)
                again.samples = runner.samples
                self._runners[number] = again
                await again.start()
            return self._runners[number]

    async def _close(self) -> None:
        await asyncio.gather(*(one.close() for one in self._runners), return_exceptions=True)


def played(value: Any) -> Played:
    """The sample of a reply to `run`: it has a reward only if that is valid.

    >>> played({"ok": True, "reward": 0.5, "rewards": {"sum": 0.5}}).outcome.reward
    0.5
    >>> played({"ok": True, "reward": None}).outcome.status
    'error'
    """
    if not isinstance(value, Mapping) or not isinstance(value.get("ok"), bool):
        return _failed(f"the runner replied {value!r:.200}, which is no result")
    if not value["ok"]:
        return _failed(f"the environment failed: {value.get('error') or 'without a reason'}")
    reward, rewards = _number(value.get("reward")), _numbers(value.get("rewards"))
    if reward is None:
        given = value.get("reward")
        return _failed(f"the environment's reward is {given!r:.60}, but must be a finite number")
    if None in rewards.values():
        return _failed(
            f"the environment's rewards are {value['rewards']!r:.60}, but must be finite"
        )
    metrics = _numbers(value.get("metrics"))
    return Played(
        outcome=RewardOutcome("ok", reward, _known(rewards)),
        truncated=value.get("truncated") is True,
        metrics=_known(metrics),
        stop=str(value.get("stop") or ""),
    )


def _numbers(found: Any) -> dict[str, float | None]:
    if not isinstance(found, Mapping):
        return {}
    return {str(name): _number(one) for name, one in found.items()}


def _known(found: Mapping[str, float | None]) -> dict[str, float]:
    return {name: one for name, one in found.items() if one is not None}


def _number(value: Any) -> float | None:
    """A finite number, else None."""
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
    except OverflowError:  # of an integer
        return None


def _failed(detail: str) -> Played:
    return Played(outcome=RewardOutcome("error", math.nan, detail=detail))
