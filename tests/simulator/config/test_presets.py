"""Every preset runs, here with a small batch; its screen has what a reader looks for."""

from __future__ import annotations

import math

import pytest
from typer.testing import CliRunner

from areal_lab.cli import app as cli
from simulator.assembly.simulate import simulate
from simulator.config.load import load_simulation, presets

BRIEF = (
    "workload.prompts_per_batch=16",
    "workload.steps=3",
    "workload.warmup_steps=1",
    "schedule.max_concurrent_prompts=32",
    "seeds=1",
)


@pytest.mark.parametrize("name", presets())
def test_every_preset_runs(name: str) -> None:
    result = simulate(load_simulation(name, BRIEF))
    assert math.isfinite(result.step_s)
    assert result.step_s > 0
    assert result.tokens_per_s > 0


def test_what_a_preset_simulates_is_on_the_screen() -> None:
    arguments = ["simulate", "--preset", "figure_6b_7b", *BRIEF]
    shown = CliRunner().invoke(cli.app, arguments)
    assert shown.exit_code == 0, shown.stderr
    for said in ("R1-Distill-Qwen-7B on 32 H800", "24 generate", "8 train", "eta inf"):
        assert said in shown.stdout


def test_two_presets_stand_side_by_side() -> None:
    names = ["table_1_7b_synchronous", "table_1_7b_asynchronous"]
    shown = CliRunner().invoke(cli.app, ["simulate", "--compare", *names, *BRIEF])
    assert shown.exit_code == 0, shown.stderr
    for said in (*names, "step time", "throughput"):
        assert said in shown.stdout
