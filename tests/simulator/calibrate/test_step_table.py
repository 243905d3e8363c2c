"""`calibrate --step-table`: known factors are found again, and wrong tables are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from areal_lab.cli.app import app
from simulator.calibrate.step_table import fit_step_table
from simulator.catalogue.gpu import find_gpu
from simulator.catalogue.models import find_model
from simulator.config.load import load_simulation
from simulator.config.schema import TrainerConfig
from simulator.costs.training import training_cost

SETTINGS = (
    "trainer.kind=megatron",
    "model=Llama-3.1-8B",
    "cluster.gpu=H100",
    "trainer.pipeline_parallel=2",
    "workload.minibatches=2",
)
LAYOUT = {"kind": "megatron", "pipeline_parallel": 2}


def table(folder: Path, rows: list[tuple[int, int, int]], factor: float, fixed_s: float) -> Path:
    """A table of steps that take `factor` times the model's passes and `fixed_s` more."""
    lines = ["seconds, tokens, sequences, GPUs, micro_batch_tokens"]
    for tokens, sequences, gpus in rows:
        layout = TrainerConfig(
            **LAYOUT, micro_batch_tokens=8192, time_factor=factor, fixed_s=fixed_s
        )
        cost = training_cost(layout, find_model("Llama-3.1-8B"), find_gpu("H100"), gpus)
        each, more = divmod(tokens, sequences)
        lengths = [each + (k < more) for k in range(sequences)]
        seconds = cost.step(lengths, minibatches=2).seconds
        lines.append(f"{seconds!r}, {tokens}, {sequences}, {gpus}, 8192")
    path = folder / "steps.csv"
    path.write_text("# measured\n" + "\n".join(lines) + "\n", encoding="utf-8")
    return path


ROWS = [(2_000_000, 1024, 8), (1_000_000, 512, 8), (2_000_000, 1024, 16), (3_000_001, 1024, 8)]


def test_a_factor_and_a_fixed_time_are_found_again(tmp_path: Path) -> None:
    fit = fit_step_table(table(tmp_path, ROWS, 1.3, 4.0), SETTINGS)
    assert fit.time_factor == pytest.approx(1.3, rel=1e-4)
    assert fit.fixed_s == pytest.approx(4.0, rel=1e-3)
    assert fit.error < 1e-3
    assert fit.kind == "megatron"


def test_one_row_gives_a_factor(tmp_path: Path) -> None:
    fit = fit_step_table(table(tmp_path, ROWS[:1], 0.8, 0.0), SETTINGS)
    assert fit.time_factor == pytest.approx(0.8, rel=1e-4)
    assert fit.fixed_s == 0
    assert not fit.left_out.size
    assert "the error is unknown" in "\n".join(fit.lines())


def test_rows_of_one_size_give_no_fixed_time(tmp_path: Path) -> None:
    fit = fit_step_table(table(tmp_path, [ROWS[0]] * 3, 1.0, 20.0), SETTINGS)
    assert fit.fixed_s == 0
    assert fit.time_factor > 1.2


def test_lengths_may_be_listed(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text("Seconds,Lengths\n3.0,4096 8000 1000 500\n", encoding="utf-8")
    fit = fit_step_table(
        path, (*SETTINGS, "gpus=12", "rollout_gpus=8", "trainer.micro_batch_tokens=8192")
    )
    assert fit.predicted_s == pytest.approx([3.0])


def test_simulate_takes_the_file_and_says_where_the_speed_is_from(tmp_path: Path) -> None:
    path = table(tmp_path, ROWS, 1.3, 4.0)
    run = CliRunner().invoke(app, ["calibrate", "--step-table", str(path), *SETTINGS])
    assert run.exit_code == 0, run.output
    assert "factor 1.3, 4 s per step" in run.output
    written = tmp_path / "steps.yaml"
    config = load_simulation(str(written))
    assert config.trainer.time_factor == pytest.approx(1.3, rel=1e-4)
    assert config.trainer.kind == "megatron"
    assert config.calibration.source == "megatron fitted to 4 steps of steps.csv"
    options = ("workload.answers.mean_tokens=1000", "workload.answers.max_tokens=4000")
    small = ("cluster.gpus=16", "rollout_gpus=8", "workload.prompts_per_batch=8")
    steps = ("steps=4", "warmup_steps=1", "schedule.eta=1")
    told = CliRunner().invoke(
        app, ["simulate", str(written), *options, *small, *steps, "--seeds", "1"]
    )
    assert told.exit_code == 0, told.output
    assert "megatron, TP 1, PP 2" in told.output
    assert "megatron times 1.3" in told.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seconds,tokens\n1,2\n", "needs the columns seconds, and tokens and sequences"),
        ("seconds,tokens,sequences\n", "has a header but no rows"),
        ("", "it has none"),
        ("seconds,tokens,sequences\n1,many,4\n", "line 2: tokens is 'many', but must be > 0"),
        ("seconds,tokens,sequences\n0,100,4\n", "line 2: seconds is '0', but must be > 0"),
        ("seconds,tokens,sequences\n1,3,4\n", "tokens is 3, but must be >= sequences"),
        ("seconds,lengths\n1,10 -3\n", "lengths must be whole numbers >= 1"),
        ("seconds,lengths\n1,99999 99999\n", "micro_batch_tokens"),
    ],
)
def test_wrong_tables_are_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message) as refused:
        fit_step_table(path, SETTINGS)
    assert "\n" not in str(refused.value)


def test_a_missing_table_and_a_missing_source_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        fit_step_table(tmp_path / "none.csv")
    run = CliRunner().invoke(app, ["calibrate"])
    assert run.exit_code != 0
