"""The trainer as a real process: start, step, save, stop, and every way to die."""

from __future__ import annotations

import asyncio
import dataclasses
import json
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
from transformers import AutoModelForCausalLM, Qwen2VLForConditionalGeneration

from areal_lab.data.tokenize import TextCodec
from areal_lab.host.processes import ChildDied
from areal_lab.models.locate import INCLUDED_MODELS, resolve_model_path
from areal_lab.training.process.client import TrainerProcess, TrainingError
from areal_lab.training.process.serve import train
from areal_lab.training.process.worker import remedy
from areal_lab.training.protocol import SaveRequest, TrainBatchRequest
from areal_lab.training.step import train_batch
from tests.training.tiny import learner_for, parameters, random_batch, save_model, settings_for
from tools import vision_model
from tools.vision_model import ACCURACY, MEASURE_EVERY, TESTED, accuracy, make


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


FOLDER = INCLUDED_MODELS["Reader-574K"]


def test_the_included_start_can_learn() -> None:
    assert resolve_model_path("Reader-574K") == FOLDER
    model = Qwen2VLForConditionalGeneration.from_pretrained(FOLDER, dtype=torch.float32)
    # The held-out pictures are drawn first, however many follow.
    problems = vision_model.rendered_sums(size=TESTED + 1, eval_size=TESTED, seed=vision_model.SEED)
    tested = vision_model.read_pictures(FOLDER, problems.held_out)
    sampled, greedy = (accuracy(model, tested, greedy=one) for one in (False, True))
    about = json.loads((FOLDER / "source.json").read_text())
    # Another version of Pillow may draw otherwise.
    assert about["accuracy_sampled"] == pytest.approx(sampled, abs=0.03)
    assert about["accuracy_greedy"] == pytest.approx(greedy, abs=0.03)
    assert ACCURACY - 0.03 < sampled < 0.55 < greedy < 0.7
    assert about["parameters"] == 574_208
    assert about["steps"] % MEASURE_EVERY == 0
    assert about["made_by"].startswith("python -m tools.vision_model")
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 1_200_000


def test_its_tokenizer_reads_its_own_text() -> None:
    """SGLang turns prompts with images into text and back."""
    codec = TextCodec.load(FOLDER)
    every = tuple(range(codec.vocabulary))
    assert codec.encode(codec.decode_all(every)) == every


def test_the_script_writes_the_same_model_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vision_model, "PICTURES", 40)
    monkeypatch.setattr(vision_model, "TESTED", 8)
    for folder in (tmp_path / "once", tmp_path / "again"):
        make(folder, most_steps=2)
    for file in ("model.safetensors", "config.json", "tokenizer.json", "preprocessor_config.json"):
        contents = [(tmp_path / one / file).read_bytes() for one in ("once", "again")]
        assert contents[0] == contents[1]
    assert (tmp_path / "once" / "tokenizer.json").read_bytes() == (
        FOLDER / "tokenizer.json"
    ).read_bytes()
