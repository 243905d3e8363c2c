"""SmolLM2-135M-Instruct learns to call the tool of a taskset of verifiers: twelve steps, from the
command line, with one server of tools for all samples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.real_environments.environments import LIBRARIES
from tests.real_environments.play import PACKAGES

pytestmark = pytest.mark.environments


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_model_learns_to_call_a_tool(tmp_path: Path, seed: int) -> None:
    settings = (
        "environment=products-v1",
        f"environment.python={LIBRARIES.python_of('verifiers')}",
        "rollout.workflow={name: agent, mode: environment, tool_call_parser: hermes, "
        "describe_tools: false}",
        "environment.max_turns=3",
        "gconfig.max_new_tokens=40",
        "dataset.eval_size=32",
        "total_train_steps=12",
        "plots=false",
        f"seed={seed}",
    )
    command = [sys.executable, "-m", "areal_lab", "train", "verifiers", *settings]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PACKAGES), *sys.path[1:]])}
    subprocess.run(command, cwd=tmp_path, env=variables, check=True)
    (summary,) = tmp_path.glob("runs/*/summary.json")
    told = json.loads(summary.read_text(encoding="utf-8"))
    before, after = told["reward_before"], told["reward_after"]
    print(f"seed {seed}: {before} to {after} in {told['wall_s']:.0f} s")
    assert before["mean"] < 0.3
    assert after["mean"] > 0.8
