"""Adapters to libraries that no other test needs: in an environment of their own."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

from areal_lab.config.load import load_config
from areal_lab.config.problem import attempt
from areal_lab.data.sources import load_problems
from areal_lab.resolve.functions import check_functions, workflow_of

ROOT = Path(__file__).parents[2]
EXTRAS = ("reasoning-gym", "textarena")


def test_a_library_that_is_not_installed_is_refused_with_its_command() -> None:
    config = load_config(
        "tiny",
        {
            "dataset.type": "reasoning_gym",
            "reward.fn": "areal_lab.rewards.reasoning_gym:ReasoningGym",
            "rollout.workflow": {"name": "textarena", "game": "GuessTheNumber-v0"},
        },
    )
    with pytest.raises(ValueError, match=r"pip install 'areal_lab\[reasoning-gym\]'"):
        load_problems(config.dataset, seed=1)
    problems = list(check_functions(config))
    attempt(problems, lambda: workflow_of(config), "rollout.workflow")
    found = {problem.setting: str(problem) for problem in problems}
    assert "pip install 'areal_lab[reasoning-gym]'" in found["reward.kwargs"]
    assert "pip install 'areal_lab[textarena]'" in found["rollout.workflow"]


@pytest.mark.slow
def test_the_adapters_work_with_the_libraries(tmp_path: Path) -> None:
    """Installs both (needs the network, and a C compiler for pycosat of Reasoning Gym)."""
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    (packages,) = (tmp_path / "venv").glob("lib/python3*/site-packages")
    # What is installed here is seen there, and not installed again.
    (packages / "here.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [one for extra in EXTRAS for one in project["optional-dependencies"][extra]]
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, *wanted], check=True, cwd=tmp_path)
    checks = Path(__file__).with_name("adapter_checks.py")
    options = ("-q", "-p", "no:cacheprovider", "-m", "not slow")
    subprocess.run([python, "-m", "pytest", *options, str(checks)], check=True, cwd=ROOT)
