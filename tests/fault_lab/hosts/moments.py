"""Moments of a run at which a test strikes: a process is stopped, so that the moment lasts.

moment        stopped     until
generating    engine      some tokens of a response have come, and others have not
training      trainer     the batch has arrived there
loading       engine      the request to load has arrived there
saving        trainer     the request to save has arrived there
copying       agent       the run asks the trainer's host for the checkpoint that it has written
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import psutil
import pytest

from areal_lab.cluster import files
from areal_lab.control.events import EngineId
from areal_lab.engines.client.engine_client import EngineClient
from areal_lab.engines.client.resubmit import PartialSamples
from areal_lab.engines.protocol import EngineUnreachable, GenerateRequest, PauseMode, WeightsFolder
from areal_lab.host.processes import RunningProcess
from areal_lab.pipeline.rollout.groups import Rollout
from areal_lab.pipeline.state import RunState
from areal_lab.training.process.client import TrainerProcess
from areal_lab.training.protocol import SaveRequest, TrainBatchRequest
from tests.fault_lab.hosts.faults import Moment
from tests.fault_lab.hosts.machines import signal_if_there, unread_bytes

T = TypeVar("T")
SHORT: Final = 8
"""Tokens of a response, at least, when its engine is stopped."""
POLL_S: Final = 0.005
_REQUESTS: Final = {TrainBatchRequest: Moment.TRAINING, SaveRequest: Moment.SAVING}


@dataclass(frozen=True, slots=True)
class Held:
    """What is stopped at a moment."""

    moment: Moment
    process: int
    engine: EngineId | None = None
    """The engine, if it is one."""

    def release(self) -> None:
        """It continues."""
        signal_if_there(self.process, signal.SIGCONT)


Strike = Callable[[Held], Awaitable[None]]


@dataclass(slots=True)
class Moments:
    """Holds a run at the moments that are claimed, and calls `strike` there; it has to release what
    is held, unless that is dead or to stay stopped."""

    state: RunState
    claim: Callable[[Moment], bool]
    """Whether to strike at this moment; not asked again at the same one."""
    strike: Strike
    before_step: Callable[[], Coroutine[Any, Any, None]] | None = None
    """Awaited before each training step."""
    copying: bool = False
    """Whether the moment of saving is that at which the checkpoint is copied to the run folder."""

    def arm(self, patch: pytest.MonkeyPatch) -> None:
        """Watch for them."""
        generate_all: Any = Rollout._generate
        ask: Any = TrainerProcess._request
        load_one: Any = EngineClient._load
        mirror: Any = files.mirror_async

        async def generate(
            rollout: Rollout,
            engine: EngineId,
            requests: Sequence[GenerateRequest],
            partial: PartialSamples,
        ) -> PartialSamples:
            work = generate_all(rollout, engine, requests, partial)
            if not requests[0].request_id.startswith("train"):
                return await work  # type: ignore[no-any-return]
            answering = asyncio.ensure_future(work)
            names = [one.request_id for one in requests]
            while not answering.done():
                begun = _tokens_so_far(rollout, engine, names) >= SHORT
                if begun and self.claim(Moment.GENERATING):
                    pid = self._pid(engine)
                    signal_if_there(pid, signal.SIGSTOP)
                    await self.strike(Held(Moment.GENERATING, pid, engine))
                    break
                await asyncio.sleep(POLL_S)
            return await answering  # type: ignore[no-any-return]

        async def request(trainer: TrainerProcess, message: Any, kind: Any) -> Any:
            moment = _REQUESTS.get(type(message))
            if moment is Moment.TRAINING and self.before_step is not None:
                await self.before_step()
            work = ask(trainer, message, kind)
            if moment is None or (self.copying and moment is Moment.SAVING):
                return await work
            if not self.claim(moment):
                return await work
            port = _port_of(trainer._pipes[0])
            return await self._held(moment, work, trainer.child.pid, port, engine=None)

        async def load(client: EngineClient, weights: WeightsFolder, mode: PauseMode) -> int:
            work = load_one(client, weights, mode)
            alive = self.state.performer.servers.alive if self.state.performer else {}
            number = next((n for n, one in alive.items() if one.client is client), None)
            if number is None or not self.claim(Moment.LOADING):
                return await work  # type: ignore[no-any-return]
            port = urlsplit(client.base_url).port
            assert port is not None
            pid = self._pid(number)
            return await self._held(Moment.LOADING, work, pid, port, engine=number)

        async def copy(url: str, destination: Path, *args: Any, **named: Any) -> Any:
            work = mirror(url, destination, *args, **named)
            hosts = self.state.hosts
            if not self.copying or not self.claim(Moment.SAVING) or hosts is None:
                return await work
            host, port = hosts.trainer_host, urlsplit(url).port
            assert host is not None
            assert port is not None
            assert self.state.performer is not None
            agent = _agent_of(self.state.performer.trainer.child)
            return await self._held(Moment.SAVING, work, agent, port, engine=None)

        patch.setattr(Rollout, "_generate", generate)
        patch.setattr(TrainerProcess, "_request", request)
        patch.setattr(EngineClient, "_load", load)
        patch.setattr(files, "mirror_async", copy)

    def _pid(self, engine: EngineId) -> int:
        assert self.state.performer is not None
        child = self.state.performer.servers.alive[engine].child
        assert child is not None
        return child.pid

    async def _held(
        self,
        moment: Moment,
        work: Coroutine[Any, Any, T],
        process: int,
        port: int,
        *,
        engine: EngineId | None,
    ) -> T:
        """Stop a process, let a request arrive there, and strike."""
        signal_if_there(process, signal.SIGSTOP)
        before = unread_bytes(process, port)
        asking = asyncio.ensure_future(work)
        try:
            while unread_bytes(process, port) <= before:
                assert not asking.done(), f"{moment}: done before the strike"
                await asyncio.sleep(POLL_S)
            await self.strike(Held(moment, process, engine))
            return await asking
        finally:
            if not asking.done():
                asking.cancel()
                with suppress(BaseException):
                    await asking


def _tokens_so_far(rollout: Rollout, engine: EngineId, names: Sequence[str]) -> int:
    try:
        received = rollout.engines.engine(engine).received(names)
    except EngineUnreachable:
        return 0
    return sum(len(s.tokens) for one in received.values() for s in one.segments)


def _port_of(pipe: Connection) -> int:
    """Port of the run's end of a pipe."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as doubled:
        return int(doubled.getsockname()[1])


def _agent_of(trainer: RunningProcess) -> int:
    """The agent of a trainer's host: the parent of the trainer."""
    parent = psutil.Process(trainer.pid).parent()
    assert parent is not None
    return parent.pid
