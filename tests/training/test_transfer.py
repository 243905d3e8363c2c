"""Weights from the trainer's memory into an engine, while the trainer is at work."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file

from areal_lab.engines.client import EngineClient, EngineError, EngineUnreachable, VersionMismatch
from areal_lab.engines.launch import EngineProcess, launch_engine
from areal_lab.engines.protocol import PauseMode, WeightsFolder
from areal_lab.engines.transfer.records import EngineFailure, EngineTarget, Phase, WeightsInMemory
from areal_lab.engines.weights import checksum
from areal_lab.pipeline.courier import courier_from
from areal_lab.training.client import TrainerProcess, TrainingError
from areal_lab.training.protocol import Pushed, PushRequest, SaveRequest, Span
from tests.training.tiny import random_batch, save_model, settings_for

Work = Callable[[TrainerProcess, EngineProcess], Awaitable[None]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny") / "model")


def with_both(folder: Path, tmp_path: Path, work: Work, transfer: str) -> None:
    """Run `work` with a trainer and an engine that has its first weights."""

    async def run() -> None:
        settings = settings_for(
            folder,
            weights_root=str(tmp_path / "weights"),
            transfer=transfer,
            transfer_timeout_s=3.0,
        )
        trainer = await TrainerProcess.start(settings, log_path=tmp_path / "trainer.log")
        try:
            engine = await launch_engine(
                "embedded",
                index=0,
                weights=trainer.ready.weights,
                port=0,
                threads=1,
                dtype="float32",
                max_running_requests=4,
                context_length=None,
                log_path=tmp_path / "engine.log",
            )
            try:
                await work(trainer, engine)
            finally:
                await engine.stop()
        finally:
            await trainer.stop()

    asyncio.run(asyncio.wait_for(run(), 120))


async def step(trainer: TrainerProcess, version: int) -> None:
    await trainer.train(dataclasses.replace(random_batch(seed=version), version=version))


@pytest.mark.parametrize("transfer", ["http_tensor", "distributed"])
def test_an_engine_holds_what_was_exported_while_the_trainer_goes_on(
    folder: Path, tmp_path: Path, transfer: str
) -> None:
    async def work(trainer: TrainerProcess, engine: EngineProcess) -> None:
        await step(trainer, 0)
        first = (await trainer.export()).weights
        assert isinstance(first, WeightsInMemory)
        saved = await trainer.save(SaveRequest(tmp_path / "v1"))
        assert first.checksum == checksum(load_file(saved.path / "model.safetensors"))
        # The next step changes the parameters under way: what is sent is a copy.
        bring = courier_from(trainer)(first, [engine.client], PauseMode.RETRACT)
        await asyncio.gather(bring(engine.client), step(trainer, 1))
        assert await engine.client.version() == first.version == 1
        assert await engine.client.digest() == first.checksum
        second = (await trainer.export()).weights
        assert second.version == 2
        assert second.checksum != first.checksum
        # A version that is no longer held is the caller's mistake, and the trainer lives on.
        target = (EngineTarget(engine.base_url),)
        with pytest.raises(TrainingError, match=r"asked to push version 1, but held are \[2\]"):
            await trainer.push(PushRequest(1, target, flush_cache=True))
        pushed = await trainer.push(PushRequest(2, target, flush_cache=True))
        assert pushed.failures == ()
        assert pushed.span.name == "push weights"
        assert set(pushed.span.args) == {"open", "send", "close", "verify"}
        assert await engine.client.version() == 2

    with_both(folder, tmp_path, work, transfer)


def test_an_engine_that_is_gone_is_an_answer_and_not_the_trainers_end(
    folder: Path, tmp_path: Path
) -> None:
    async def work(trainer: TrainerProcess, engine: EngineProcess) -> None:
        await step(trainer, 0)
        weights = (await trainer.export()).weights
        os.kill(engine.child.pid, signal.SIGKILL)
        await engine.child.died()
        bring = courier_from(trainer)(weights, [engine.client], PauseMode.RETRACT)
        with pytest.raises(EngineUnreachable, match="opening the update failed") as raised:
            await bring(engine.client)
        assert "\n" not in str(raised.value)
        await step(trainer, 1)

    with_both(folder, tmp_path, work, "http_tensor")


def test_a_trainer_that_dies_while_it_pushes_is_named(folder: Path, tmp_path: Path) -> None:
    async def work(trainer: TrainerProcess, engine: EngineProcess) -> None:
        await step(trainer, 0)
        weights = (await trainer.export()).weights
        os.kill(engine.child.pid, signal.SIGSTOP)
        bring = courier_from(trainer)(weights, [engine.client], PauseMode.RETRACT)
        pushing = asyncio.create_task(bring(engine.client))
        await asyncio.sleep(0)
        os.kill(trainer.child.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match=r"trainer .* was killed by SIGKILL"):
            await pushing

    with_both(folder, tmp_path, work, "http_tensor")


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
    """Notes what it is told."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self.told: list[object] = []

    async def took_weights(self, version: int, mode: PauseMode) -> None:
        self.told.append((version, mode))

    async def load_weights(self, weights: WeightsFolder, mode: PauseMode) -> None:
        self.told.append((weights, mode))


def outcomes(trainer: FakeTrainer, clients: list[FakeClient], mode: PauseMode) -> list[object]:
    async def run() -> list[object]:
        bring = courier_from(trainer, ranks=2)(  # type: ignore[arg-type]
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
    assert request.engines == (EngineTarget("http://a", 2), EngineTarget("http://b", 2))
    assert not request.flush_cache
    assert clients[0].told == [(4, PauseMode.IN_PLACE)]
    assert clients[1].told == []


def test_a_folder_is_read_by_each_engine(tmp_path: Path) -> None:
    weights = WeightsFolder(path=tmp_path, version=1, checksum="", size_bytes=0)
    client, trainer = FakeClient("http://a"), FakeTrainer()
    bring = courier_from(trainer)(weights, [client], PauseMode.ABORT)  # type: ignore[arg-type, list-item]
    asyncio.run(bring(client))  # type: ignore[arg-type]
    assert client.told == [(weights, PauseMode.ABORT)]
    assert trainer.requests == []


def test_the_client_compares_the_version_itself() -> None:
    def handler(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"weight_version": "3"})

    async def run() -> None:
        client = EngineClient("http://a", transport=httpx.MockTransport(handler))
        await client.took_weights(3, PauseMode.RETRACT)
        with pytest.raises(VersionMismatch, match="was sent version 4 but holds 3"):
            await client.took_weights(4, PauseMode.RETRACT)
        await client.close()

    asyncio.run(run())
