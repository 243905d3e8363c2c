"""Runs on drawn sums: what was trained on is what the engines saw, and a resumed run loses none."""

from __future__ import annotations

import asyncio
import gzip
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from areal_lab.config.load import load_config
from areal_lab.config.schema import TrainConfig
from areal_lab.data.images import PlacedImage, image_of_bytes
from areal_lab.data.problems import PromptSource
from areal_lab.data.small_tasks import rendered_sums
from areal_lab.models.image_features import ImagePixels
from areal_lab.models.locate import INCLUDED_MODELS
from areal_lab.models.vision import placeholder_tokens
from areal_lab.pipeline.model_evaluation import evaluate, prepare_evaluation
from areal_lab.pipeline.resume.saved_run import GROUPS_FILE, read_open_tokens
from areal_lab.pipeline.train import resume_run
from areal_lab.runlog.token_files import read_samples
from areal_lab.shell.display import Silent
from tests.pipeline.resume.killed_run import check_folder
from tests.pipeline.tiny_run import do_run, trained_samples

FOLDER = INCLUDED_MODELS["Reader-574K"]


def image_config(folder: Path, *overrides: str) -> TrainConfig:
    return load_config(
        "rendered_sums",
        [
            f"run_dir={folder / 'runs'}",
            "rollout.threads=1",
            "actor.threads=1",
            "dataset.size=40",
            "dataset.eval_size=8",
            "dataset.batch_size=3",
            "gconfig.n_samples=4",
            "evaluation.samples_per_problem=1",
            "plots=false",
            *overrides,
        ],
    )


def rescored(folder: Path, model: Any, sample: dict[str, Any]) -> torch.Tensor:
    """Log-probs of a trained sample, from the files of its run alone."""
    pixels = ImagePixels(FOLDER)
    placed = [
        PlacedImage(
            image_of_bytes((folder / "images" / f"{one['sha256']}.png").read_bytes()),
            one["start"],
            one["rows"],
            one["columns"],
        )
        for one in sample["images"]
    ]
    assert [one.image.digest for one in placed] == [one["sha256"] for one in sample["images"]]
    response = [token for part in sample["parts"] for token in part["tokens"]]
    ids = torch.tensor([[*sample["prompt_tokens"], *response]])
    model.model.rope_deltas = None
    with torch.no_grad():
        logits = model(
            input_ids=ids,
            pixel_values=torch.cat([pixels.of(i.image, i.rows, i.columns) for i in placed]),
            image_grid_thw=torch.tensor([[1, 2 * i.rows, 2 * i.columns] for i in placed]),
            mm_token_type_ids=(ids == model.config.image_token_id).int(),
        ).logits[0, len(sample["prompt_tokens"]) - 1 : -1]
    logits[:, list(placeholder_tokens(model.config))] = -torch.inf
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


def test_a_run_trains_on_what_its_engine_saw_and_resumes_without_loss(tmp_path: Path) -> None:
    config = image_config(
        tmp_path, "total_train_steps=3", "save_every_steps=1", "checkpoint.open_groups=tokens"
    )
    result = do_run(config)
    folder = result.folder
    saved = sorted((folder / "checkpoints").glob("step-*"))
    models = {
        version: AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
        for version, path in enumerate((FOLDER, *saved))
    }
    samples = [sample for step in trained_samples(folder) for sample in step]
    assert len(samples) == 3 * 3 * 4
    for sample in samples:
        begin = 0
        for part in sample["parts"]:
            exact = rescored(folder, models[part["version"]], sample)
            end = begin + len(part["tokens"])
            error = (exact[begin:end] - torch.tensor(part["logprobs"])).abs().max()
            assert error < 1e-4, sample
            begin = end
    assert {len(row.images) for row in read_samples(folder).rows} == {1}

    killed = tmp_path / "killed"
    shutil.copytree(folder, killed, symlinks=True)
    shutil.rmtree(killed / "checkpoints" / "step-00003")
    source = PromptSource(
        rendered_sums(size=40, eval_size=8, seed=config.seed).train, seed=config.seed
    )
    checkpoint = killed / "checkpoints" / "step-00002"
    kept = read_open_tokens(checkpoint, source)
    for group, scored in kept.finished.items():
        assert [one.image for one in scored.images] == list(source[group].images)
    if kept.finished:  # by their hashes: the files are in the data
        assert b"PNG" not in gzip.decompress((checkpoint / GROUPS_FILE).read_bytes())
    run = resume_run(killed)
    assert [report.step for report in run] == [3]
    check_folder(killed, 3, largest_lag=5)


@pytest.mark.slow
def test_at_eta_0_a_resumed_run_is_bit_equal(tmp_path: Path) -> None:
    config = image_config(
        tmp_path,
        "total_train_steps=3",
        "eta=0",
        "save_every_steps=1",
        "rollout.max_running_requests=1",
    )
    whole = do_run(config).folder
    killed = tmp_path / "killed"
    shutil.copytree(whole, killed, symlinks=True)
    shutil.rmtree(sorted((killed / "checkpoints").iterdir())[-1])
    assert [report.step for report in resume_run(killed)] == [3]
    weights = [
        (one / "checkpoints" / "step-00003" / "model.safetensors").read_bytes()
        for one in (whole, killed)
    ]
    assert weights[0] == weights[1]
    assert trained_samples(whole) == trained_samples(killed)


@pytest.mark.slow
def test_a_second_turn_sees_the_image_too(tmp_path: Path) -> None:
    config = image_config(
        tmp_path,
        "total_train_steps=2",
        "rollout.workflow={name: multi_turn, feedback: '?'}",
        "save_every_steps=1",
    )
    folder = do_run(config).folder
    samples = [sample for step in trained_samples(folder) for sample in step]
    assert any(len(sample.get("turns", ())) > 1 for sample in samples)
    assert all(len(sample["images"]) == 1 for sample in samples)
    model = AutoModelForImageTextToText.from_pretrained(FOLDER, dtype=torch.float32)
    for sample in samples:
        whole = [{"tokens": p.get("tokens", p.get("observation"))} for p in sample["parts"]]
        exact = rescored(folder, model, {**sample, "parts": whole})
        begin = 0
        for part in sample["parts"]:
            end = begin + len(part.get("tokens", part.get("observation")))
            if part.get("version") == 0:
                assert (exact[begin:end] - torch.tensor(part["logprobs"])).abs().max() < 1e-4
            begin = end


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("actor.use_lora=true",),
        ("rollout.transfer=http_tensor",),
        ("rollout.pause_mode=abort", "rollout.engines=2"),
        ("actor.kl_loss_coef=0.01", "actor.ppo_n_minibatches=3"),
        ("actor.advantage=gae", "critic.share_body=true"),
        ("actor.dtype=bfloat16", "rollout.dtype=bfloat16"),
    ],
)
def test_other_settings_do_with_images(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    summary = do_run(image_config(tmp_path, "total_train_steps=3", *overrides)).summary
    assert (summary["status"], summary["steps"]) == ("complete", 3)


@pytest.mark.slow
def test_a_model_is_evaluated_on_pictures(tmp_path: Path) -> None:
    config = image_config(tmp_path)
    evaluation = prepare_evaluation(config, samples=2, out=tmp_path / "out")
    results = asyncio.run(evaluate(evaluation, Silent()))
    assert (results["problems"], results["samples"]) == (8, 16)
