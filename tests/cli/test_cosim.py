"""`areal-lab cosim`, called as by a user."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from areal_lab.cli import app as cli
from areal_lab.cli import cosim as command
from areal_lab.runlog.read_run import read_run
from tests.cosim.small import SMALL


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["cosim", *arguments])


def test_the_last_line_is_the_run_folder(tmp_path: Path) -> None:
    result = call("cosim", f"run_dir={tmp_path}", *SMALL, "total_train_steps=2", "objective=naive")
    assert result.exit_code == 0
    folder = Path(result.stdout.splitlines()[-1])
    assert folder.parent == tmp_path
    assert read_run(folder).summary["steps"] == 2
    assert "naive PPO, seed 1" in result.stdout
    assert "step   2/2" in result.stderr


def test_wrong_settings_are_one_line_each(tmp_path: Path) -> None:
    result = call("cosim", f"run_dir={tmp_path}", "etaa=1", "seed=x")
    assert result.exit_code == 2
    lines = result.stderr.splitlines()
    assert [line.split()[0] for line in lines] == ["error:"] * 2
    assert "did you mean 'eta'?" in lines[0]


def test_ctrl_c_leaves_a_readable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cosim.policy import Policy

    learn = Policy.learn

    def interrupted(self: Policy, groups: object) -> dict[str, float]:
        if self.version == 2:
            raise KeyboardInterrupt
        return learn(self, groups)  # type: ignore[arg-type]

    monkeypatch.setattr(Policy, "learn", interrupted)
    for mode in ("along", "live"):
        arguments = [f"run_dir={tmp_path / mode}", *SMALL, f"mode={mode}"]
        assert command.run_command("cosim", arguments) == 130
        (folder,) = (tmp_path / mode).iterdir()
        run = read_run(folder)
        assert run.summary["status"] == "stopped at once"
        assert run.summary["steps"] == len(run.metrics) == 2


def test_help_lists_its_settings_and_those_of_training() -> None:
    text = call("--help").stdout
    assert "simulator.preset = table_1_1.5b_asynchronous" in text
    assert "actor.optimizer.lr" in text
    assert "Staleness bound eta" in text
