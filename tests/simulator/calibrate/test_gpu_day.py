"""`calibrate --gpu-day`: known costs are found again, and wrong lines are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from areal_lab.cli.app import app
from simulator.calibrate.gpu_day import calibrate_day, read_day
from simulator.catalogue.gpu import find_gpu
from simulator.catalogue.models import find_model
from simulator.config.load import load_simulation
from simulator.config.schema import TrainerConfig
from simulator.costs.training import training_cost
from tools.gpu_day.__main__ import main

MODEL = "Qwen2.5-1.5B"
STEP_S, SEQUENCE_S, TOKEN_S = 9e-3, 20e-6, 8e-9
PASS_S, PROMPT_TOKEN_S = 5e-3, 4e-6
MACHINE = {"fact": "machine", "gpu": "H100", "card": "NVIDIA H100 80GB HBM3"}


def train_step(groups: int, factor: float, fixed_s: float, **about: Any) -> dict[str, Any]:
    """A step that takes `factor` times the model's and `fixed_s` more."""
    layout = TrainerConfig(
        kind="areal_lab",
        micro_batch_tokens=16384,
        proximal_logprobs=False,
        time_factor=factor,
        fixed_s=fixed_s,
    )
    cost = training_cost(layout, find_model(MODEL), find_gpu("H100"), 1)
    seconds = cost.step([2048] * (8 * groups), minibatches=1).seconds
    case = {"attention": "varlen", "checkpointing": "selective", "compiled": True}
    return {
        "fact": "train step",
        "model": MODEL,
        "prompt_tokens": 1,
        "sequence_tokens": 2048,
        "sequences": 8 * groups,
        "micro_batch_tokens": 16384,
        "step_s": seconds,
        **case,
        **about,
    }


def engine() -> list[dict[str, Any]]:
    grid = [(1, 512), (1, 4096), (16, 1024), (64, 512), (64, 2048), (256, 512), (256, 2048)]
    steps = [
        {
            "fact": "decode step",
            "model": MODEL,
            "rows": rows,
            "context": context,
            "step_s": STEP_S + SEQUENCE_S * rows + TOKEN_S * rows * context,
        }
        for rows, context in grid
    ]
    prefills = [
        {
            "fact": "prefill",
            "model": MODEL,
            "tokens": tokens,
            "pairs": tokens * (tokens + 1) // 2,
            "step_s": STEP_S + SEQUENCE_S + TOKEN_S * tokens + PASS_S + PROMPT_TOKEN_S * tokens,
        }
        for tokens in (256, 1024, 2048, 4096, 8192)
    ]
    return [*steps, *prefills]


def written(folder: Path, facts: list[dict[str, Any]]) -> Path:
    path = folder / "day.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in facts), encoding="utf-8")
    return path


def whole_day() -> list[dict[str, Any]]:
    return [
        MACHINE,
        {"fact": "product", "rows": 8192, "tflops": 742.0},
        {"fact": "product", "rows": 64, "tflops": 90.0},
        train_step(8, 2.0, 0.5, compiled=False),
        train_step(8, 1.3, 0.5),
        train_step(4, 1.3, 0.5),
        {"fact": "train step", "model": MODEL, "attention": "flex", "failed": "TypeError: x"},
        *engine(),
        {"fact": "decode step", "model": MODEL, "rows": 256, "skipped": "budget of 400 s"},
        {"fact": "decode step", "model": "Qwen2.5-0.5B", "rows": 1, "context": 9, "step_s": 7.0},
        {"fact": "end", "device": "cuda", "tiny": False, "facts": 9, "failed": 0, "skipped": 0},
    ]


def test_known_costs_are_found_again(tmp_path: Path) -> None:
    fit = calibrate_day(written(tmp_path, whole_day()))
    found = fit.settings
    assert found["model"] == MODEL
    assert found["cluster.gpu"] == "H100"
    assert found["trainer.kind"] == "areal_lab"
    assert found["trainer.time_factor"] == pytest.approx(1.3, rel=1e-3)
    assert found["trainer.fixed_s"] == pytest.approx(0.5, rel=1e-2)
    assert found["rollout.decode_step_s"] == pytest.approx(STEP_S, rel=1e-3)
    assert found["rollout.decode_sequence_s"] == pytest.approx(SEQUENCE_S, rel=1e-2)
    assert found["rollout.decode_context_token_s"] == pytest.approx(TOKEN_S, rel=1e-3)
    assert found["rollout.prefill_pass_s"] == pytest.approx(PASS_S, rel=1e-2)
    assert found["rollout.prefill_token_s"] == pytest.approx(PROMPT_TOKEN_S, rel=1e-2)
    assert "trainer.proximal_logprobs" not in found, "a setting of the measured steps, not a cost"
    notes = "\n".join(fit.notes)
    assert "measured on one NVIDIA H100" in notes
    assert "large products reach 75% of the peak; the simulator has 77%" in notes
    assert "2 of 21 facts failed or were skipped" in notes
    assert "varlen attention, checkpointing selective, compiled, prompts of 1 tokens" in notes


def test_simulate_takes_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, whole_day())
    run = CliRunner().invoke(
        app, ["calibrate", "--gpu-day", str(path), "trainer.pipeline_parallel=1"]
    )
    assert run.exit_code == 0, run.output
    config = load_simulation(str(tmp_path / "day.yaml"))
    assert config.trainer.time_factor == pytest.approx(1.3, rel=1e-3)
    assert "day.jsonl" in (config.calibration.source or "")
    sizes = ("cluster.gpus=2", "rollout_gpus=1", "workload.prompts_per_batch=8", "steps=4")
    lengths = ("workload.answers.mean_tokens=500", "workload.answers.max_tokens=2000")
    told = CliRunner().invoke(
        app,
        [
            "simulate",
            str(tmp_path / "day.yaml"),
            *sizes,
            *lengths,
            "warmup_steps=1",
            "--seeds",
            "1",
        ],
    )
    assert told.exit_code == 0, told.output
    assert "areal_lab times 1.3" in told.output


def test_a_model_may_be_chosen_and_a_card_given(tmp_path: Path) -> None:
    facts = [one for one in whole_day() if one["fact"] != "machine"]
    with_card = calibrate_day(written(tmp_path, facts), ("cluster.gpu=H200",))
    assert with_card.settings["cluster.gpu"] == "H200"
    without = calibrate_day(written(tmp_path, facts))
    assert "trainer.time_factor" not in without.settings
    assert "training steps need a known model and card" in "\n".join(without.notes)
    with pytest.raises(ValueError, match=r"no training step and too few decode steps of Qwen2.5-0"):
        calibrate_day(written(tmp_path, facts), ("model=Qwen2.5-0.5B",))


def test_one_size_of_steps_gives_a_factor_and_no_decode_steps_are_no_error(tmp_path: Path) -> None:
    fit = calibrate_day(written(tmp_path, [MACHINE, train_step(8, 1.7, 0.0)]))
    assert fit.settings["trainer.time_factor"] == pytest.approx(1.7, rel=1e-3)
    assert fit.settings["trainer.fixed_s"] == 0
    assert not fit.parts
    run = CliRunner().invoke(app, ["calibrate", "--gpu-day", str(tmp_path / "day.jsonl"), "--json"])
    assert run.exit_code == 0, run.output


def test_a_day_on_a_cpu_says_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = ["facts", "kernels", "train", "decode"]
    assert main([*parts, "--device", "cpu", "--tiny", "--out", str(tmp_path)]) == 0
    path = tmp_path / "day.jsonl"
    path.write_text("".join((tmp_path / f"{part}.jsonl").read_text() for part in parts))
    assert path.read_text() == capsys.readouterr().out
    fit = calibrate_day(path)
    assert float(fit.settings["rollout.decode_step_s"]) > 0
    assert [part.name for part in fit.parts] == ["decode", "prefill"]
    notes = "\n".join(fit.notes)
    assert "measured with tiny shapes or on a CPU: costs of no GPU" in notes
    assert "the simulator has no model tiny" in notes
    assert "failed or were skipped" not in notes
    run = CliRunner().invoke(app, ["calibrate", "--gpu-day", str(path)])
    assert run.exit_code == 0, run.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; python -m tools.gpu_day train decode writes facts"),
        ("{\n", "line 1 is not valid JSON"),
        (
            '\n{"batch": 3}\n',
            'line 2 is not a fact of tools.gpu_day: it must be an object with a "',
        ),
        ('{"fact": "machine"}\n', "has no fact of a model"),
        (
            json.dumps({**MACHINE}) + "\n" + json.dumps({**train_step(8, 1, 0), "step_s": "x"}),
            'line 2: step_s is "x", but must be a number > 0',
        ),
        (
            "\n".join(json.dumps({**one, "rows": 0} if "rows" in one else one) for one in engine()),
            "line 1: rows is 0, but must be a number > 0",
        ),
    ],
)
def test_wrong_files_are_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "day.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message) as refused:
        calibrate_day(path)
    assert "\n" not in str(refused.value)


def test_a_missing_file_and_two_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        read_day(tmp_path / "none.jsonl")
    day, table = str(tmp_path / "day.jsonl"), str(tmp_path / "steps.csv")
    run = CliRunner().invoke(app, ["calibrate", "--gpu-day", day, "--step-table", table])
    assert run.exit_code != 0
