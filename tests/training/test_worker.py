"""The trainer as a real process: start, step, save, stop, and every way to die."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from areal_lab.host.processes import ChildDied
from areal_lab.training.process.client import TrainerProcess, TrainingError
from areal_lab.training.process.serve import train
from areal_lab.training.process.worker import remedy
from areal_lab.training.protocol import SaveRequest, TrainBatchRequest
from areal_lab.training.step import train_batch
from tests.training.tiny import learner_for, parameters, random_batch, save_model, settings_for


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(tmp_path_factory.mktemp("tiny") / "model")
    (folder / "tokenizer.json").write_text('{"a tokenizer": "as it was"}')
    return folder


def with_trainer(
    folder: Path, tmp_path: Path, work: Callable[[TrainerProcess], Awaitable[None]]
) -> None:
    """Run `work` with a trainer, and see that nothing is left of it."""

    async def run() -> None:
        settings = settings_for(folder, weights_root=tmp_path / "weights")
        trainer = await TrainerProcess.start(settings, log_path=tmp_path / "trainer.log")
        try:
            await work(trainer)
        finally:
            await trainer.stop()
            await trainer.stop()
        with pytest.raises(ProcessLookupError):
            os.killpg(trainer.child.pid, 0)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_round_trip_trains_exports_and_saves(folder: Path, tmp_path: Path) -> None:
    async def work(trainer: TrainerProcess) -> None:
        assert trainer.ready.weights.version == 0
        assert trainer.ready.device == "cpu"
        first = load_file(trainer.ready.weights.path / "model.safetensors")

        result = await trainer.train(dataclasses.replace(random_batch(), version=0))
        assert result.version == 1
        export = await trainer.export()
        assert export.weights.version == 1
        assert [span.name for span in export.spans] == ["export weights"]
        exported = load_file(export.weights.path / "model.safetensors")
        assert any(not torch.equal(exported[name], first[name]) for name in first)

        saved = await trainer.save(SaveRequest(tmp_path / "final"))
        assert (saved.path, saved.version) == (tmp_path / "final", 1)
        assert (saved.path / "tokenizer.json").read_text() == '{"a tokenizer": "as it was"}'
        assert "areal_lab_tree" not in (saved.path / "config.json").read_text()
        loaded = AutoModelForCausalLM.from_pretrained(saved.path)
        for name, value in parameters(loaded).items():
            assert torch.equal(value, exported[name])

        # The same step in this process gives the same loss.
        request = dataclasses.replace(random_batch(), version=0)
        here = train_batch(learner_for(folder), request)
        assert result.metrics["loss"] == pytest.approx(here.metrics["loss"], abs=1e-6)

        await trainer.stop()
        assert trainer.child.process.returncode == 0

    with_trainer(folder, tmp_path, work)
    assert "stopping as requested" in (tmp_path / "trainer.log").read_text()


def test_a_request_for_another_version_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="asked to train version 7, but the trainer has 0"):
        train(learner_for(folder), TrainBatchRequest(7, ()), 0)


def test_a_killed_worker_is_an_error_that_names_the_signal(folder: Path, tmp_path: Path) -> None:
    async def work(trainer: TrainerProcess) -> None:
        os.kill(trainer.child.pid, signal.SIGKILL)
        with pytest.raises(ChildDied, match=r"trainer .* was killed by SIGKILL") as caught:
            await trainer.train(dataclasses.replace(random_batch(), version=0))
        assert "trainer: ready" in str(caught.value)

    with_trainer(folder, tmp_path, work)


def test_a_broken_loss_reaches_the_user_with_its_traceback(folder: Path, tmp_path: Path) -> None:
    settings = settings_for(
        folder,
        weights_root=tmp_path / "weights",
        loss_fn="tests.training.test_worker:broken_loss",
    )

    async def run() -> None:
        trainer = await TrainerProcess.start(settings, log_path=tmp_path / "trainer.log")
        try:
            with pytest.raises(TrainingError, match="nobody can learn from this") as caught:
                await trainer.train(dataclasses.replace(random_batch(), version=0))
        finally:
            await trainer.stop()
        assert "in broken_loss" in caught.value.remote_traceback

    asyncio.run(asyncio.wait_for(run(), 60))


def broken_loss(*args: Any, **kwargs: Any) -> Any:
    """An own loss with a mistake in it."""
    del args, kwargs
    raise RuntimeError("nobody can learn from this")


def test_a_trainer_that_runs_out_of_memory_says_what_to_change() -> None:
    with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert "actor.max_tokens_per_mb" in remedy(caught.value)
    assert "actor.max_tokens_per_mb" in remedy(torch.OutOfMemoryError("CUDA out of memory"))
    assert remedy(ValueError("version 3 was expected")) == ""


def test_a_stop_during_a_step_does_not_wait_for_it(folder: Path, tmp_path: Path) -> None:
    async def work(trainer: TrainerProcess) -> None:
        # Stopped by the kernel, the worker can neither finish the step nor reply.
        os.kill(trainer.child.pid, signal.SIGSTOP)
        step = asyncio.create_task(trainer.train(dataclasses.replace(random_batch(), version=0)))
        await asyncio.sleep(0)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        os.kill(trainer.child.pid, signal.SIGCONT)
        await trainer.stop()
        assert trainer.child.process.returncode == -signal.SIGTERM

    with_trainer(folder, tmp_path, work)


def test_a_model_that_cannot_be_loaded_is_said_at_the_start(tmp_path: Path) -> None:
    settings = settings_for(tmp_path / "nowhere", weights_root=tmp_path / "weights")

    async def run() -> None:
        with pytest.raises(TrainingError, match="nowhere") as caught:
            await TrainerProcess.start(settings, log_path=tmp_path / "trainer.log")
        assert "in load_policy" in caught.value.remote_traceback
        assert "in load_policy" in caught.value.__notes__[0]

    asyncio.run(asyncio.wait_for(run(), 60))


def test_the_pipelines_side_loads_no_torch() -> None:
    code = (
        "import sys, areal_lab.training.process.client, areal_lab.models.locate;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
