"""Weights from the trainer's memory into an engine, while the trainer is at work."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import psutil
import pytest
from safetensors.torch import load_file

from areal_lab.engines.client.engine_client import (
    EngineClient,
    EngineError,
    EngineUnreachable,
    VersionMismatch,
)
from areal_lab.engines.launch.backends import ServerOptions
from areal_lab.engines.launch.start import EngineProcess, launch_engine
from areal_lab.engines.protocol import PauseMode, WeightsFolder
from areal_lab.engines.weights.folder import checksum
from areal_lab.engines.weights.records import EngineFailure, EngineTarget, Phase, WeightsInMemory
from areal_lab.pipeline.servers.server import prepare_push_from
from areal_lab.training.process.client import TrainerProcess, TrainingError
from areal_lab.training.protocol import Pushed, PushRequest, SaveRequest, Span
from tests.training.tiny import random_batch, save_model, settings_for

T = TypeVar("T")


@dataclass
class Pair:
    """A trainer, and an engine that began with its first weights."""

    loop: asyncio.AbstractEventLoop
    root: Path
    transfer: str
    trainer: TrainerProcess
    engine: EngineProcess
    version: int = 0
    """The trainer's."""

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 120))

    async def step(self) -> None:
        batch = dataclasses.replace(random_batch(seed=self.version), version=self.version)
        await self.trainer.train(batch)
        self.version += 1

    async def exported(self) -> WeightsInMemory:
        """Of the next version."""
        await self.step()
        weights = (await self.trainer.export()).weights
        assert isinstance(weights, WeightsInMemory)
        assert weights.version == self.version
        return weights


@pytest.fixture(scope="module")
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """One of each way of transfer, and one to be killed of each."""
    transfer, *_ = request.param.split()
    root = tmp_path_factory.mktemp("transfer")
    settings = settings_for(
        save_model(root / "model"),
        weights_root=root / "weights",
        more={"rollout.transfer": transfer, "rollout.transfer_timeout_s": 60.0},
    )
    with asyncio.Runner() as runner:
        trainer = runner.run(TrainerProcess.start(settings, log_path=root / "trainer.log"))
        try:
            engine = runner.run(
                launch_engine(
                    "embedded",
                    ServerOptions(
                        model=trainer.ready.weights.path,
                        version=str(trainer.ready.weights.version),
                        max_running_requests=4,
                    ),
                    log_path=root / "engine.log",
                )
            )
            yield Pair(runner.get_loop(), root, transfer, trainer, engine)
            runner.run(engine.stop())
        finally:
            runner.run(trainer.stop())


def addresses(process: int) -> list[str]:
    """Where a process listens."""
    sockets = psutil.Process(process).net_connections("inet")
    return [one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN]


by_http = pytest.mark.parametrize("pair", ["http_tensor to be killed"], indirect=True)
by_broadcast = pytest.mark.parametrize("pair", ["distributed to be killed"], indirect=True)
by_both = pytest.mark.parametrize("pair", ["http_tensor", "distributed"], indirect=True)


@by_both
def test_an_engine_holds_the_exported_version_while_training_continues(pair: Pair) -> None:
    trainer, engine = pair.trainer, pair.engine

    async def work() -> None:
        first = await pair.exported()
        saved = await trainer.save(SaveRequest(pair.root / "v1"))
        assert first.checksum == checksum(load_file(saved.path / "model.safetensors"))
        # The next step changes the parameters meanwhile, but a copy is sent.
        bring = prepare_push_from(trainer)(first, [engine.client], PauseMode.RETRACT)
        await asyncio.gather(bring(engine.client), pair.step())
        assert await engine.client.version() == first.version == 1
        digest = await engine.client.digest()
        assert digest is not None
        assert digest.value == first.checksum
        second = (await trainer.export()).weights
        assert second.version == 2
        assert second.checksum != first.checksum
        # Requesting a version that is no longer held is the caller's error; the trainer continues.
        target = (EngineTarget(engine.base_url, key=engine.client.key),)
        with pytest.raises(TrainingError, match=r"asked to push version 1, but held are \[2\]"):
            await trainer.push(PushRequest(1, target, flush_cache=True))
        pushed = await trainer.push(PushRequest(2, target, flush_cache=True))
        assert pushed.failures == ()
        assert pushed.span.name == "push weights"
        assert set(pushed.span.args) == {"open", "send", "close", "verify"}
        assert await engine.client.version() == 2

    pair.run(work())
    # The store and gloo know no key.
    by_trainer, by_engine = (addresses(one.child.pid) for one in (trainer, engine))
    assert {*by_trainer, *by_engine} == {"127.0.0.1"}
    assert bool(by_trainer) == (pair.transfer == "distributed")


@by_http
def test_a_lost_engine_is_reported_and_does_not_end_the_trainer(pair: Pair) -> None:
    async def work() -> None:
        weights = await pair.exported()
        os.kill(pair.engine.child.pid, signal.SIGKILL)
        await pair.engine.child.died()
        bring = prepare_push_from(pair.trainer)(weights, [pair.engine.client], PauseMode.RETRACT)
        with pytest.raises(EngineUnreachable, match="opening the update failed") as raised:
            await bring(pair.engine.client)
        assert "\n" not in str(raised.value)
        await pair.step()

    pair.run(work())


@by_broadcast
def test_a_trainer_that_dies_while_it_pushes_is_named(pair: Pair) -> None:
    async def work() -> None:
        weights = await pair.exported()
        os.kill(pair.engine.child.pid, signal.SIGSTOP)
        bring = prepare_push_from(pair.trainer)(weights, [pair.engine.client], PauseMode.RETRACT)
        pushing = asyncio.create_task(bring(pair.engine.client))
        await asyncio.sleep(0)
        os.kill(pair.trainer.child.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match=r"trainer .* was killed by SIGKILL"):
            await pushing

    pair.run(work())


# --- the courier, without processes ---


class FakeTrainer:
    """Answers pushes with given failures."""

    def __init__(self, *failures: EngineFailure) -> None:
        self.failures = failures
        self.requests: list[PushRequest] = []

    async def push(self, request: PushRequest) -> Pushed:
        self.requests.append(request)
        return Pushed(self.failures, Span("push weights", 0.0, 1.0))


class FakeClient:
    """Records its calls."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self.key = f"key of {base_url}"
        self.told: list[object] = []

    async def confirm_push(self, version: int, mode: PauseMode) -> None:
        self.told.append((version, mode))

    async def load_weights(self, weights: WeightsFolder, mode: PauseMode) -> None:
        self.told.append((weights, mode))


def outcomes(trainer: FakeTrainer, clients: list[FakeClient], mode: PauseMode) -> list[object]:
    async def run() -> list[object]:
        bring = prepare_push_from(trainer, ranks=2)(  # type: ignore[arg-type]
            WeightsInMemory(version=4, checksum="", size_bytes=0),
            clients,  # type: ignore[arg-type]
            mode,
        )
        asked = [bring(client) for client in clients]  # type: ignore[arg-type]
        return await asyncio.gather(*asked, return_exceptions=True)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("problem", "error"),
    [("refused", EngineError), ("unreachable", EngineUnreachable), ("mismatch", VersionMismatch)],
)
def test_all_engines_get_one_push_and_each_its_own_end(
    problem: str, error: type[EngineError]
) -> None:
    failure = EngineFailure(
        engine="http://b",
        phase=Phase.SEND,
        problem=problem,  # type: ignore[arg-type]
        message="why",
    )
    trainer, clients = FakeTrainer(failure), [FakeClient("http://a"), FakeClient("http://b")]
    first, second = outcomes(trainer, clients, PauseMode.IN_PLACE)
    assert first is None
    assert type(second) is error
    assert str(second) == "why"
    (request,) = trainer.requests
    assert request.engines == (
        EngineTarget("http://a", 2, "key of http://a"),
        EngineTarget("http://b", 2, "key of http://b"),
    )
    assert not request.flush_cache
    assert clients[0].told == [(4, PauseMode.IN_PLACE)]
    assert clients[1].told == []


def test_a_folder_is_read_by_each_engine(tmp_path: Path) -> None:
    weights = WeightsFolder(path=tmp_path, version=1, checksum="", size_bytes=0)
    client, trainer = FakeClient("http://a"), FakeTrainer()
    bring = prepare_push_from(trainer)(weights, [client], PauseMode.ABORT)  # type: ignore[arg-type, list-item]
    asyncio.run(bring(client))  # type: ignore[arg-type]
    assert client.told == [(weights, PauseMode.ABORT)]
    assert trainer.requests == []


def test_the_client_compares_the_version_itself() -> None:
    def handler(_: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, json={"weight_version": "3"})

    async def run() -> None:
        client = EngineClient("http://a", transport=httpx2.MockTransport(handler))
        await client.confirm_push(3, PauseMode.RETRACT)
        with pytest.raises(VersionMismatch, match="was sent version 4 but holds 3"):
            await client.confirm_push(4, PauseMode.RETRACT)
        await client.close()

    asyncio.run(run())
