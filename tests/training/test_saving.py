"""Checkpoints that are written while training continues: what they hold, and how they fail."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import AutoModelForCausalLM

from areal_lab.host.durable import WriteError
from areal_lab.models.checkpoint_files import FILE, checkpoint_fault, read_digests
from areal_lab.training.checkpoint import state_of_learner
from areal_lab.training.learner import Learner, make_learner
from areal_lab.training.lora import add_lora, target_modules
from areal_lab.training.model import load_policy
from areal_lab.training.process.client import TrainerProcess, TrainingError
from areal_lab.training.process.output import PreparedSave, prepare_save, save, save_folder
from areal_lab.training.process.threads import BackgroundSaves
from areal_lab.training.protocol import STATE_FOLDER, SaveRequest
from areal_lab.training.ranks import ALONE
from areal_lab.training.step import train_batch
from benchmarks.tiny_model import write_tiny_model
from tests.runlog.test_full_disk import files_of_at_most
from tests.training.tiny import learner_for, random_batch, save_model, settings_for

WITH_CRITIC: dict[str, Any] = {"advantage": "gae", "kl_ctl": 0.1, "kl_ctl_target": 6.0}


def files_of(folder: Path) -> dict[str, bytes]:
    """Content by name; of the state, whose files have a pickle's accidents, in another way."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and STATE_FOLDER not in file.relative_to(folder).parts
    }


def tensors_in(folder: Path, like: Learner) -> dict[str, Any]:
    """Everything in a saved state, flat."""
    metadata = FileSystemReader(folder).read_metadata()
    state = state_of_learner(like)
    load(state, checkpoint_id=str(folder), no_dist=True)
    flat: dict[str, Any] = {}

    def walk(value: Any, name: str) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, f"{name}.{key}")
        elif isinstance(value, torch.Tensor):
            flat[name] = value.detach().clone()
        else:
            flat[name] = value

    walk(state, "")
    assert len(metadata.state_dict_metadata) > 10
    return flat


def plain(folder: Path) -> Learner:
    return learner_for(folder, **WITH_CRITIC)


def with_adapters(folder: Path) -> Learner:
    policy = load_policy(folder)
    torch.manual_seed(1)
    add_lora(policy, rank=2, alpha=4, targets=target_modules(policy, ["all-linear"]))
    return make_learner(policy, settings_for(folder, use_lora=True))


@pytest.mark.parametrize("learner", [plain, with_adapters])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_is_saved_is_the_state_at_the_decision_although_training_went_on(
    tmp_path: Path, learner: Any
) -> None:
    model = save_model(tmp_path / "model")
    ours, theirs = (learner(model) for _ in range(2))
    for one in (ours, theirs):
        train_batch(one, random_batch(0))
    files = {"run.json": b"{}"}
    later = SaveRequest(tmp_path / "later", state=True, files=files, asynchronous=True)
    prepared = prepare_save(ours, later)
    for seed in (1, 2):
        train_batch(ours, random_batch(seed))
    prepared.write(ours.ranks)
    save(theirs, SaveRequest(tmp_path / "at_once", state=True, files=files))
    found, expected = (files_of(tmp_path / name) for name in ("later", "at_once"))
    assert found == expected
    assert "run.json" in found
    new = tmp_path / "new"
    new.touch()
    assert {file.stat().st_mode for file in (tmp_path / "later").rglob("*.*")} == {
        new.stat().st_mode
    }
    states = [
        tensors_in(tmp_path / name / STATE_FOLDER, learner(model)) for name in ("later", "at_once")
    ]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        same = (
            torch.equal(value, states[1][name])
            if torch.is_tensor(value)
            else (value == states[1][name])
        )
        assert same, name
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_one_checkpoint_is_written_at_a_time(tmp_path: Path) -> None:
    learner = learner_for(save_model(tmp_path / "model"))
    here, there = Pipe()
    saves = BackgroundSaves(ranks=ALONE, pipe=there, group=None, timeout_s=1.0)
    may_write = threading.Event()

    class Waits(PreparedSave):
        """Writes when it may."""

        def write(self, *args: Any) -> None:
            assert may_write.wait(60)
            super().write(*args)

    prepared = prepare_save(learner, SaveRequest(tmp_path / "one", asynchronous=True))
    fields = {f.name: getattr(prepared, f.name) for f in dataclasses.fields(prepared)}
    saves.start(Waits(**fields), 1)
    assert not (tmp_path / "one").exists()
    assert not here.poll()
    second = threading.Thread(
        target=saves.start,
        args=(prepare_save(learner, SaveRequest(tmp_path / "two", asynchronous=True)), 2),
    )
    second.start()
    may_write.set()
    assert [here.recv().version for _ in range(2)] == [1, 2]
    second.join()
    saves.wait()
    assert {path.name for path in tmp_path.iterdir()} == {"model", "one", "two"}


def test_a_process_trains_on_and_tells_the_end_or_the_error_of_its_checkpoint(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        settings = settings_for(save_model(tmp_path / "model"), weights_root=tmp_path / "weights")
        trainer = await TrainerProcess.start(settings, log_path=tmp_path / "trainer.log")
        try:
            batches = [dataclasses.replace(random_batch(), version=v) for v in range(3)]
            await trainer.train(batches[0])
            copied = await trainer.start_save(SaveRequest(tmp_path / "saved", state=True))
            assert (copied.version, copied.span.name) == (1, "copy for checkpoint")
            assert (await trainer.train(batches[1])).version == 2
            saved = await trainer.saved()
            assert (saved.version, saved.path) == (1, tmp_path / "saved")
            assert saved.span.start_s >= copied.span.start_s
            assert (tmp_path / "saved" / STATE_FOLDER / ".metadata").is_file()
            # A file in a folder that is not there.
            wrong = SaveRequest(tmp_path / "wrong", files={"nowhere/file": b""})
            await trainer.start_save(wrong)
            with pytest.raises(TrainingError, match=r"wrong was not written: FileNotFoundError"):
                await trainer.saved()
            assert not (tmp_path / "wrong").exists()
            assert list(tmp_path.glob(".wrong*")) == []
            assert (await trainer.train(batches[2])).version == 3
        finally:
            await trainer.stop()
        assert trainer.child.process.returncode == 0

    asyncio.run(asyncio.wait_for(run(), 60))


def test_what_has_the_name_of_a_checkpoint_is_kept_and_the_checkpoint_written(
    tmp_path: Path,
) -> None:
    source, folder = tmp_path / "model", tmp_path / "checkpoints"
    write_tiny_model(source)
    model = AutoModelForCausalLM.from_pretrained(source)
    folder.mkdir()
    (folder / "step-00001").write_text("a file")
    (folder / "step-00002").symlink_to("nowhere")
    (folder / "step-00003").mkdir()
    (folder / "step-00003" / "mine").write_text("notes")
    for step in (1, 2, 3):
        path = folder / f"step-{step:05d}"
        save_folder(model, source, path)
        digests = read_digests(path)
        assert digests is not None
        assert digests.step == step
        files = {str(one.relative_to(path)) for one in path.rglob("*") if one.is_file()}
        assert digests.files.keys() == files - {FILE}
        assert checkpoint_fault(path, step) == ""
    kept = [next(folder.glob(f"step-0000{step}.before-*")) for step in (1, 2, 3)]
    assert kept[0].read_text() == "a file"
    assert kept[1].is_symlink()
    assert (kept[2] / "mine").read_text() == "notes"
    # A run that starts from a checkpoint has its own digests.
    save_folder(model, folder / "step-00003", tmp_path / "exported")
    assert not (tmp_path / "exported" / FILE).exists()


def test_a_checkpoint_that_does_not_fit_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    source, path = tmp_path / "model", tmp_path / "checkpoints" / "step-00001"
    write_tiny_model(source)
    model = AutoModelForCausalLM.from_pretrained(source)
    bytes_needed = sum(value.nbytes for value in model.parameters())
    with files_of_at_most(20_000), pytest.raises(WriteError) as raised:
        save_folder(model, source, path)
    said = str(raised.value)
    assert said.startswith(f"{path} cannot be written: it would be larger than the limit for one")
    assert f"({bytes_needed:,} bytes are needed, " in said
    assert not list(path.parent.iterdir())
