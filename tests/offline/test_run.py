"""A run learns, writes what happened, keeps the best and the last model, and continues."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from areal_lab.config.problem import ConfigError
from areal_lab.data.tokenize import TextCodec
from areal_lab.models.locate import resolve_model_path
from areal_lab.offline.checkpoints import FILE
from areal_lab.offline.job import Note, Phase
from areal_lab.offline.resume import find_resumable
from areal_lab.offline.run import run
from areal_lab.offline.start import begin, resolve_offline
from areal_lab.pipeline.resume.recovery import find_recovery
from areal_lab.training.protocol import STATE_FOLDER
from tests.offline.small import adder, config_for, metrics_of, run_here, stop_after, write_rows
from tools import tiny_model

KINDS = ("sft", "rm", "dpo")


def weights(path: Path) -> Any:
    return load_file(path / "model.safetensors")


def same_weights(one: Path, other: Path) -> bool:
    left, right = weights(one), weights(other)
    return left.keys() == right.keys() and all((left[n] == right[n]).all() for n in left)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_continues_equals_one_that_was_not_stopped(tmp_path: Path, kind: str) -> None:
    config = config_for(
        kind, tmp_path,
        eval_every_steps=2, total_train_steps=7, actor__optimizer__lr_scheduler_type="linear",
    )  # fmt: skip
    summary, whole = run_here(config)
    assert summary["status"] == "complete"

    stop, emit = stop_after(3)
    stopped, cut = run_here(config, stop=stop, emit=emit)
    assert (stopped["status"], stopped["steps"]) == ("stopped", 3)
    found = find_resumable(kind, cut.folder)
    assert found.checkpoint == cut.folder / "checkpoints/step-00003"
    check_damage(kind, cut.folder, found.checkpoint)
    shutil.copytree(found.checkpoint, cut.folder / "checkpoints/step-00003-copy")
    found = find_resumable(kind, cut.folder)
    assert found.changes == (
        "checkpoints/step-00003-copy was not written by the run and is ignored",
    )
    again, job = run_here(found.config, resumable=found)
    assert job.folder == cut.folder
    assert metrics_of(cut.folder) == metrics_of(whole.folder)
    assert [line["step"] for line in metrics_of(cut.folder)] == list(range(8))
    assert same_weights(cut.folder / "model", whole.folder / "model")
    timed = ("training_s", "peak_rss_bytes")
    assert {k: v for k, v in again.items() if k not in timed} == {
        k: v for k, v in summary.items() if k not in timed
    }


def check_damage(kind: str, folder: Path, checkpoint: Path) -> None:
    """One flipped bit in any file is refused, before anything changes."""
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    assert {FILE, "model.safetensors", ".metadata"} < {file.name for file in files}
    there = set(folder.rglob("*"))
    for file in files:
        sound = file.read_bytes()
        middle = len(sound) // 2
        file.write_bytes(sound[:middle] + bytes([sound[middle] ^ 16]) + sound[middle + 1 :])
        with pytest.raises(ConfigError, match=rf"step-00003 is damaged: .*{file.name}") as raised:
            find_resumable(kind, folder)
        assert "\n" not in str(raised.value)
        assert set(folder.rglob("*")) == there
        file.write_bytes(sound)


def test_what_a_killed_run_wrote_after_its_checkpoint_is_removed(tmp_path: Path) -> None:
    config = config_for("sft", tmp_path, save_every_steps=2, total_train_steps=6)
    _, whole = run_here(config)

    class Killed(BaseException):
        """As by a signal: nothing is cleaned up."""

    def die() -> bool:
        nonlocal steps
        steps += 1
        if steps == 5:
            raise Killed
        return False

    steps = 0
    job = begin(resolve_offline(config))
    with pytest.raises(Killed):
        run(job, job.rows, emit=lambda _: None, stop=die)
    with (job.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "time_s": 1.0, "los')  # half a line
    (job.folder / "checkpoints" / ".step-00006.writing-x").mkdir()
    found = find_resumable("sft", job.folder)
    assert found.checkpoint is not None
    assert found.checkpoint.name == "step-00004"
    run_here(found.config, resumable=found)
    assert metrics_of(job.folder) == metrics_of(whole.folder)
    assert same_weights(job.folder / "model", whole.folder / "model")
    assert not list((job.folder / "checkpoints").glob(".*"))


def test_the_best_and_the_newest_checkpoints_stay(tmp_path: Path) -> None:
    # At this rate the held-out loss rises again.
    config = config_for(
        "sft", tmp_path,
        total_train_steps=12, eval_every_steps=1, save_every_steps=1,
        checkpoint__keep=2, actor__optimizer__lr=0.05,
    )  # fmt: skip
    summary, job = run_here(config)
    losses = {int(n["step"]): n["held_out_loss"] for n in metrics_of(job.folder) if n["step"]}
    best = min(losses, key=losses.__getitem__)
    assert best < 11
    assert summary["best_step"] == best
    there = sorted(path.name for path in (job.folder / "checkpoints").iterdir())
    assert there == [f"step-{step:05d}" for step in (best, 11, 12)]
    assert (job.folder / "best").resolve().name == f"step-{best:05d}"
    assert (job.folder / "model").resolve().name == "step-00012"
    resumable = {path.parent.name for path in job.folder.glob(f"checkpoints/*/{FILE}")}
    assert resumable == {"step-00011", "step-00012"}
    assert not (job.folder / "best" / STATE_FOLDER).exists()


def test_a_new_best_is_saved_though_nothing_else_is(tmp_path: Path) -> None:
    config = config_for(
        "sft", tmp_path, total_train_steps=12, eval_every_steps=1, actor__optimizer__lr=0.05
    )
    summary, job = run_here(config)
    assert summary["best_step"] < 12
    assert (job.folder / "best").resolve().name == f"step-{summary['best_step']:05d}"


def test_demonstrations_improve_held_out_answers(tmp_path: Path) -> None:
    told: list[Any] = []
    config = adder("sft", tmp_path, total_train_steps=40, actor__optimizer__lr=1e-3)
    summary, job = run_here(config, emit=told.append)
    # The model was made to write wrong digits now and then.
    before, after = sampled_right("Adder-75K"), sampled_right(job.folder / "model")
    assert after > before + 0.1
    assert summary["held_out_after"]["loss"] < 0.6 * summary["held_out_before"]["loss"]
    assert any(isinstance(one, Phase) for one in told)
    lines = metrics_of(job.folder)
    assert lines[-1]["held_out_loss"] == summary["held_out_after"]["loss"]
    assert [line["step"] for line in lines] == list(range(41))


def sampled_right(model: Path | str) -> float:
    """Share of held-out sums that a sampled response has right."""
    folder = resolve_model_path(model)
    loaded = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    lines = tiny_model.read_lines(TextCodec.load(folder))
    return tiny_model.accuracy(loaded, lines, greedy=False)


def test_pairs_move_a_policy_towards_the_chosen_responses(tmp_path: Path) -> None:
    summary, _ = run_here(adder("dpo", tmp_path, total_train_steps=20, actor__optimizer__lr=5e-4))
    before, after = summary["held_out_before"], summary["held_out_after"]
    assert (before["accuracy"], before["margin"]) == (0.5, 0.0)
    assert before["loss"] == pytest.approx(math.log(2))
    assert after["accuracy"] > 0.85
    assert after["margin"] > 0.05
    assert after["margin"] == pytest.approx(after["chosen_reward"] - after["rejected_reward"])


def test_a_reward_model_finds_an_easy_rule(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{n}=", "chosen": str(2 * n), "rejected": str(2 * n + 1)}
        for n in range(100, 400)
    ]  # even numbers are better
    path = write_rows(tmp_path / "rows.jsonl", *rows)
    summary, _ = run_here(
        config_for(
            "rm", tmp_path,
            dataset__type="jsonl", dataset__path=str(path), dataset__eval_size=60,
            dataset__batch_size=16, total_train_steps=30, actor__optimizer__lr=3e-3,
        )
    )  # fmt: skip
    assert summary["held_out_before"]["accuracy"] == 0.5
    assert summary["held_out_after"]["accuracy"] > 0.95


def test_epochs_visit_each_row_equally_often(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(10, 30)]
    path = write_rows(tmp_path / "rows.jsonl", *rows)
    config = config_for(
        "sft", tmp_path,
        dataset__type="jsonl", dataset__path=str(path), dataset__eval_size=4,
        dataset__batch_size=5, total_train_steps=0, total_train_epochs=2.5,
    )  # fmt: skip
    summary, _ = run_here(config)
    assert summary["steps"] == math.ceil(2.5 * 16 / 5)
    assert summary["trained_tokens"] == 5 * summary["steps"] * 3  # two digits and the end


def test_rows_that_are_left_out_are_told(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(10, 30)]
    path = write_rows(tmp_path / "rows.jsonl", *rows, {"prompt": "1", "response": "1" * 50})
    told: list[Any] = []
    config = config_for(
        "sft", tmp_path,
        dataset__type="jsonl", dataset__path=str(path), dataset__max_tokens=20,
        dataset__too_long="drop",
    )  # fmt: skip
    summary, _ = run_here(config, emit=told.append)
    assert summary["rows"]["left_out"] == {"longer than 20 tokens": 1}
    assert Note("1 rows left out: longer than 20 tokens") in told
    with pytest.raises(ConfigError, match="line 21 has 52 tokens"):
        run_here(config.with_settings({"dataset.too_long": "refuse"}))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("sft", {"dataset__batch_size": 500}, "dataset: batch_size is 500, but there are 92 rows"),
        ("sft", {"actor__path": "Adder-76K"}, "actor.path: Adder-76K is neither"),
        ("sft", {"actor__device": "cuda"}, "actor.device is cuda, but"),
        ("sft", {"actor__processes": 7}, "actor.processes is 7, but a batch has 6 rows"),
        ("sft", {"actor__processes": 4, "actor__shard_ranks": 3}, "must divide actor.processes"),
        ("sft", {"dataset__type": "jsonl"}, "dataset: path is empty"),
        ("dpo", {"loss": "ipo", "label_smoothing": 0.1}, "but loss=ipo has no smoothing"),
        ("dpo", {"ref__path": "Adder-74K"}, "ref.path: Adder-74K is neither"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_loaded(
    tmp_path: Path, kind: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_offline(config_for(kind, tmp_path, **changes))
    assert not (tmp_path / "runs").exists()


def test_a_run_keeps_its_data_loss_and_model(tmp_path: Path) -> None:
    config = config_for("dpo", tmp_path, total_train_steps=2)
    _, job = run_here(config)
    with pytest.raises(ConfigError, match=r"beta is 0.5, but was 0.1: it cannot change"):
        find_resumable("dpo", job.folder, ["beta=0.5"])
    with pytest.raises(ConfigError, match="is a run of areal-lab dpo"):
        find_resumable("sft", job.folder)
    with pytest.raises(ConfigError, match="continue it by areal-lab dpo --resume"):
        find_recovery(job.folder)
    with pytest.raises(ConfigError, match="has trained 2 of 2 steps; raise total_train_steps"):
        find_resumable("dpo", job.folder)
    found = find_resumable("dpo", job.folder, ["total_train_steps=3"])
    assert found.changes == ("total_train_steps is 3 from now on (was 2)",)
    summary, _ = run_here(found.config, resumable=found)
    assert summary["steps"] == 3


def test_other_data_than_before_is_refused(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(10, 30)]
    path = write_rows(tmp_path / "rows.jsonl", *rows)
    config = config_for("sft", tmp_path, dataset__type="jsonl", dataset__path=str(path))
    _, job = run_here(config)
    write_rows(path, *rows[:-1], {**rows[-1], "response": "0"})
    found = find_resumable("sft", job.folder, ["total_train_steps=9"])
    before = (job.folder / "metrics.jsonl").read_text()
    with pytest.raises(ConfigError, match="the rows are not those"):
        run_here(found.config, resumable=found)
    assert (job.folder / "metrics.jsonl").read_text() == before


def test_a_run_without_states_says_how_to_continue(tmp_path: Path) -> None:
    config = config_for("sft", tmp_path, checkpoint__resumable=False)
    _, job = run_here(config)
    with pytest.raises(ConfigError, match=r"start a run with actor\.path="):
        find_resumable("sft", job.folder)
    shutil.rmtree(job.folder / "checkpoints")
    os.unlink(job.folder / "model")
    with pytest.raises(ConfigError, match="has trained 5 steps, but has no checkpoint to continue"):
        find_resumable("sft", job.folder)
    assert len(metrics_of(job.folder)) == 6
    (job.folder / "metrics.jsonl").unlink()  # as of a run that was killed before its first step
    found = find_resumable("sft", job.folder)
    assert found.checkpoint is None
    run_here(found.config, resumable=found)
    assert [line["step"] for line in metrics_of(job.folder)] == list(range(6))


def test_a_chain_hands_its_models_on(tmp_path: Path) -> None:
    _, first = run_here(config_for("sft", tmp_path))
    _, second = run_here(config_for("rm", tmp_path, actor__path=str(first.folder / "model")))
    assert json.loads((second.folder / "model/reward_model.json").read_text())["end_token"] == 1
    _, third = run_here(config_for("dpo", tmp_path, actor__path=str(first.folder / "model")))
    saved = json.loads((third.folder / "model" / FILE).read_text())
    assert saved["config"]["beta"] == 0.1  # its own file, and not that of the first run
    _, fourth = run_here(config_for("rm", tmp_path, actor__path=str(second.folder / "model")))
    assert (fourth.folder / "model/reward_model.json").is_file()
