"""What was computed is shown when a command is stopped, by Ctrl-C or SIGTERM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest


def stopped(number: signal.Signals, line: str, *arguments: str) -> tuple[int, str]:
    """Exit code and output of a command that gets a signal once it has printed a line."""
    command = [sys.executable, "-m", "areal_lab", *arguments]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    ) as process:
        assert process.stdout is not None, "a pipe"
        said = ""
        for one in process.stdout:
            said += one
            if line and line in one:
                line = ""
                # A terminal sends Ctrl-C to all processes of the group.
                send = os.killpg if number == signal.SIGINT else os.kill
                send(process.pid, number)
    return process.returncode, said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_plan_shows_its_recommendation(number: signal.Signals) -> None:
    # Much is left when the line is read, however slowly.
    changes = ("candidates.gpu=[H100]", "search.sensitivity=40", "search.steps=20")
    code, said = stopped(number, "sensitivity: ", "plan", "plan_small", *changes, "--workers", "2")
    assert code == 130
    assert "Pareto front" in said
    assert "stopped, as requested: this is the best answer so far" in said
    assert "Traceback" not in said


def test_a_stopped_simulation_shows_the_seeds_that_are_done(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "{cluster: {gpus: 8}, workload: {prompts_per_batch: 64, samples_per_prompt: 16, steps: 5,"
        " answers: {mean_tokens: 100, max_tokens: 400}}}"
    )
    code, said = stopped(signal.SIGINT, "simulated 2 of", "simulate", str(file), "seeds=2000")
    assert code == 130
    assert "of 2000 seeds were simulated" in said
    assert "step time" in said
    assert "Traceback" not in said
