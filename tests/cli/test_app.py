"""The command line: exit codes, one-line errors, light imports."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from areal_lab.cli import app as cli
from areal_lab.config.problem import refusal
from areal_lab.config.schema import TrainConfig
from areal_lab.config.shipped import recipes
from areal_lab.host.processes import ChildDied
from areal_lab.training.objective.formula_index import formulas
from areal_lab.training.objective.formulas import Role
from tools.pages import losses
from tools.pages.settings import PAGE, page

CONFIG = Path(__file__).parents[2] / "configs" / "arithmetic.yaml"


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


def test_train_runs_the_merged_settings_and_returns_the_exit_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[TrainConfig] = []

    def run_to_end(config: TrainConfig) -> int:
        given.append(config)
        return 130

    monkeypatch.setattr("areal_lab.pipeline.console.run_to_end", run_to_end)
    result = call("train", str(CONFIG), "eta=0.5", "seed=3")
    assert result.exit_code == 130
    assert (given[0].seed, given[0].rollout.max_head_offpolicyness) == (3, 0.5)
    assert "note:" not in result.stderr  # the run itself prints notes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eta=-1"], "error: rollout.max_head_offpolicyness is -1"),
        (["rollout.max_lags=1"], "error: unknown setting 'rollout.max_lags'"),
        (["seed"], "error: override 'seed' is not of the form"),
    ],
)
def test_wrong_settings_end_with_2_and_one_line(arguments: list[str], message: str) -> None:
    result = call("train", str(CONFIG), *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ChildDied("engine 0 was killed by SIGKILL"), 1, "error: engine 0 was killed by SIGKILL\n"),
        (ExceptionGroup("several", [OSError("disk full")]), 1, "error: disk full\n"),
        (refusal("seed", "too late"), 2, "error: too late\n"),
        (KeyError("surprise"), 1, "Traceback"),
    ],
)
def test_a_failed_run_ends_with_its_message(
    monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, message: str
) -> None:
    def run_to_end(_: TrainConfig) -> int:
        raise error

    monkeypatch.setattr("areal_lab.pipeline.console.run_to_end", run_to_end)
    result = call("train", str(CONFIG))
    assert result.exit_code == code
    assert message in result.stderr


def test_trace_prints_the_run_and_exports_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def export_trace(run_dir: Path, out: Path) -> Path:
        out.write_text(run_dir.name)
        return out

    (tmp_path / "events.jsonl").touch()
    monkeypatch.setattr("areal_lab.pipeline.report.format_run", lambda run_dir: f"about {run_dir}")
    monkeypatch.setattr("areal_lab.pipeline.report.export_trace", export_trace)
    result = call("trace", str(tmp_path))
    assert result.exit_code == 0
    assert result.stdout == f"about {tmp_path}\ntrace: {tmp_path / 'trace.json'}\n"
    assert (tmp_path / "trace.json").exists()
    call("trace", str(tmp_path), "--out", str(tmp_path / "other.json"))
    assert (tmp_path / "other.json").exists()


def test_trace_refuses_a_folder_that_is_not_a_run(tmp_path: Path) -> None:
    result = call("trace", str(tmp_path))
    assert result.exit_code == 2
    assert "is not a run folder" in result.stderr


PLAN = """\
objective: hours
steps: 100
simulation: small
candidates: {gpus: [4], eta: [0, 1], rollout_share: [0.5]}
search: {seeds: 2, sensitivity: 0}
"""


def test_plan_prints_tables_or_one_json_object(tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    file.write_text(PLAN)
    table = call("plan", str(file), "--workers", "1")
    assert table.exit_code == 0
    assert "shortest time for 100 steps" in table.stdout
    output = json.loads(call("plan", str(file), "--workers", "1", "--json").stdout)
    assert output["candidates"]["combinations"] == 2
    assert output["best"]["settings"]["cluster.gpus"] == 4


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["objective=money"], "error: objective is 'money', but must be one of gpus"),
        (["candidates.gpu=[H1000]"], "unknown GPU 'H1000'; did you mean 'H100'"),
        (["candidates.etas=[1]"], "error: unknown setting 'candidates.etas'"),
        (["xyzzy=1"], "error: unknown setting 'xyzzy' in the overrides; --help lists all"),
        (["simulation=nosuch"], "error: unknown preset 'nosuch'; known are small"),
        (["limits.deadline_h=nan"], "error: limits.deadline_h is 'nan'"),
    ],
)
def test_a_wrong_plan_ends_with_2_and_one_line(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    file = tmp_path / "file.yaml"
    file.write_text(PLAN)
    result = call("plan", str(file), *overrides)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "setting"),
    [
        ("plan", "candidates.eta = []"),
        ("plan", "base.model = R1-Distill-Qwen-1.5B"),
        ("calibrate", "cluster.gpu = H800"),
    ],
)
def test_help_of_a_command_lists_its_settings(command: str, setting: str) -> None:
    assert setting in call(command, "--help").stdout


def test_config_and_the_help_of_train_list_the_training_settings() -> None:
    listed = call("config").stdout
    assert "rollout.max_head_offpolicyness = 4.0  (a number >= 0, in versions)" in listed
    helped = call("train", "--help").stdout
    assert "a.b=c" in helped
    assert listed.strip() in helped


def test_without_a_command_the_help_is_shown() -> None:
    shown = call().output
    for command in ("train", "simulate", "trace", "config", "doctor"):
        assert re.search(rf"^  {command} ", shown, re.MULTILINE)


def test_help_needs_neither_torch_nor_the_pipeline() -> None:
    script = (
        "import sys, areal_lab.cli.app as cli\n"
        "sys.argv = ['areal-lab', '--help']\n"
        "try:\n    cli.main()\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'torch', 'numpy', 'pandas', 'matplotlib', 'simpy', 'scipy', 'omegaconf'}\n"
        "heavy |= {'yaml', 'tokenizers', 'asyncio', 'simulator', 'areal_lab.resolve.check'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert ended.stdout.splitlines()[-1] == "[]"


def test_ctrl_c_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupted)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 130


def test_a_closed_pipe_is_no_traceback() -> None:
    ended = subprocess.run(
        [f"{sys.executable} -m areal_lab.cli.app config | head -1"],
        shell=True,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == "A training run.\n"
    assert ended.stderr == ""


def test_the_reference_of_settings_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tools.pages"


def test_the_page_of_losses_is_current_and_has_all_of_them() -> None:
    text = losses.page()
    assert losses.PAGE.read_text(encoding="utf-8") == text, "run: python -m tools.pages"
    for name in (*formulas(Role.LOSS), *recipes()):
        assert f"| `{name}` |" in text
    assert "- `remax` needs the reward of a greedy response" in text


def test_the_help_of_train_lists_losses_and_advantages() -> None:
    text = CliRunner().invoke(cli.app, ["train", "--help"]).stdout
    assert "  gspo  clip_epsilon=[3e-4, 4e-4], correct=unbounded\n" in text
    assert "  rloo\n" in text
