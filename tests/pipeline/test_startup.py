"""Trainer and engines start at the same time, and none of them outlives the failure of another."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_lab.engines.client.dialect import Call, GenerateOptions
from areal_lab.engines.client.sglang import SGLANG
from areal_lab.engines.launch.start import EngineProcess
from areal_lab.engines.protocol import GenerateRequest
from areal_lab.host.processes import Child
from areal_lab.pipeline.fleet import Fleet
from areal_lab.pipeline.servers import sources
from areal_lab.training.process import client
from tests.pipeline.rewards import even_digits
from tests.pipeline.tiny_run import do_run, metrics, tiny_config

_PATIENCE_S = 60.0


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Watch the launch of engines: when it begins, and what it returns."""
    seen: dict[str, Any] = {"begun": asyncio.Event(), "ready": asyncio.Event(), "engines": []}
    launch = sources.launch_engine

    async def watched(*arguments: Any, **options: Any) -> EngineProcess:
        seen["begun"].set()
        engine = await launch(*arguments, **options)
        seen["engines"].append(engine)
        seen["ready"].set()
        return engine

    monkeypatch.setattr(sources, "launch_engine", watched)
    return seen


def test_engines_start_while_the_trainer_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launched: dict[str, Any]
) -> None:
    start = Fleet.start_trainer

    async def once_an_engine_starts(self: Fleet, *arguments: Any, **options: Any) -> Any:
        async with asyncio.timeout(_PATIENCE_S):
            await launched["begun"].wait()
        return await start(self, *arguments, **options)

    monkeypatch.setattr(Fleet, "start_trainer", once_an_engine_starts)
    asked: list[int] = []

    def generate(requests: Sequence[GenerateRequest], options: GenerateOptions) -> Call:
        asked.append(options.stream_interval)
        return SGLANG.generate(requests, options)

    watched = replace(SGLANG, generate=generate)
    monkeypatch.setattr("areal_lab.engines.launch.start.dialect_of", lambda *_: watched)
    result = do_run(tiny_config(tmp_path, "total_train_steps=1", "rollout.stream_interval=5"))
    assert result.summary["status"] == "complete"
    assert set(asked) == {5}


def test_an_engine_stops_if_the_trainer_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launched: dict[str, Any]
) -> None:
    async def fails(self: Fleet, *arguments: Any, **options: Any) -> Any:
        del self, arguments, options
        async with asyncio.timeout(_PATIENCE_S):
            await launched["ready"].wait()
        raise RuntimeError("the trainer has no memory")

    monkeypatch.setattr(Fleet, "start_trainer", fails)
    with pytest.raises(RuntimeError, match="the trainer has no memory"):
        do_run(tiny_config(tmp_path, "total_train_steps=1"))
    (engine,) = launched["engines"]
    assert engine.child.process.returncode is not None


def test_the_trainer_stops_if_an_engine_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainers: list[Child] = []
    started = asyncio.Event()
    start = client.start_child

    async def watched(*arguments: Any, **options: Any) -> Child:
        trainers.append(await start(*arguments, **options))
        started.set()
        return trainers[-1]

    async def fails(*arguments: Any, **options: Any) -> EngineProcess:
        del arguments, options
        async with asyncio.timeout(_PATIENCE_S):
            await started.wait()
        raise ValueError("the engine has no port")

    monkeypatch.setattr(client, "start_child", watched)
    monkeypatch.setattr(sources, "launch_engine", fails)
    with pytest.raises(ValueError, match="the engine has no port"):
        do_run(tiny_config(tmp_path, "total_train_steps=1"))
    (trainer,) = trainers
    assert trainer.process.returncode is not None


def test_engines_wait_for_weights_that_only_the_trainer_can_read(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "total_train_steps=1")
    model = Path(config.actor.path)
    weights = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    torch.save(weights, model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    result = do_run(config, reward_fn=even_digits)
    assert result.summary["status"] == "complete"
    (step,) = metrics(result.folder)
    # Fresh tokens: their log-probs in the engine are those of the trainer's first version.
    assert step["sampler_gap_max"] < 1e-4
