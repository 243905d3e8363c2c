"""The packaged runs are what their tool would record, and its reward does what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from areal_lab.config.load import load_config
from areal_lab.runlog.read_run import read_run
from tools.record_responses import (
    ETAS,
    INTO,
    STEPS,
    haiku_problems,
    haiku_reward,
    overrides,
)

RUNS = [(eta, INTO / f"haiku-eta{eta:g}") for eta in ETAS]


def test_a_haiku_gets_all_three_parts() -> None:
    haiku = "Rain falls on the roof\nand the old dog hears it too\nhe does not wake up\n"
    assert haiku_reward(haiku, {"answer": "rain"}) == {
        "three_lines": 1.0,
        "short_lines": 1.0,
        "on_subject": 1.0,
    }
    prose = "It was a dark and stormy night in the city, and nobody cared."
    assert sum(haiku_reward(prose, {"answer": "rain"}).values()) == 0
    assert haiku_reward("a\nb\n" + 8 * "c ", {"answer": "b"})["short_lines"] == pytest.approx(2 / 3)
    assert haiku_reward("", {"answer": "b"})["short_lines"] == 0


@pytest.mark.parametrize(("eta", "folder"), RUNS)
def test_a_packaged_run_has_the_settings_of_the_tool(eta: float, folder: Path) -> None:
    # Settings that came later have their defaults, with which a run does the same.
    recorded = load_config(folder / "config.yaml").model_dump(mode="json")
    settings = load_config(None, overrides(eta)).model_dump(mode="json")
    named = yaml.safe_load((folder / "config.yaml").read_text())
    assert {name: settings[name] for name in named} == {name: recorded[name] for name in named}


@pytest.mark.parametrize(("eta", "folder"), RUNS)
def test_a_packaged_run_is_complete_and_small(eta: float, folder: Path) -> None:
    run = read_run(folder)
    assert run.summary["status"] == "complete"
    assert len(run.steps) == STEPS
    assert set(run.samples["step"]) == set(range(1, STEPS + 1))
    assert run.tokens["lag"].max() <= eta
    assert all(run.tokens.has_text(row) for row in range(len(run.samples)))
    assert run.samples["advantage"].notna().all()
    assert set(run.samples["prompt"]) <= {problem.prompt for problem in haiku_problems().train}
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 400_000
    assert not any(str(Path.home()) in text for text in map(str, run.settings.values()))
