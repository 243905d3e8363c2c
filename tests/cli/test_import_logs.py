"""`areal-lab import`: what it prints, exit codes, and that a log cannot write on the terminal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from areal_lab.cli.app import app
from tests.foreign.expected import FOLDER, SPECIMENS, compared, expected_of


def invoke(*arguments: str, text: bytes = b"") -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["import", *arguments], input=text)
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("path", SPECIMENS[::4], ids=lambda path: path.name)
def test_json_is_one_object_as_the_last_line(path: Path) -> None:
    code, output, _ = invoke(str(path), "--json")
    assert code == 0
    assert compared(json.loads(output.splitlines()[-1]), expected_of(path)) == []


def test_text_names_framework_steps_parts_and_what_is_missing() -> None:
    code, output, _ = invoke(str(FOLDER / "verl_sync.txt"))
    assert code == 0
    assert output.startswith("verl, synchronous\n3 records, steps 1 to 3, counted from 1")
    assert "generation_s" in output
    assert "51%" in output  # 457.08 of 901.18 seconds
    assert "not in the log: wait_for_batch_s, lag_mean" in output


def test_standard_input_is_a_log() -> None:
    log = (FOLDER / "openrlhf.txt").read_bytes()
    code, output, _ = invoke("-", "--json", text=log)
    assert code == 0
    assert json.loads(output)["framework"] == "openrlhf"


def test_a_refused_log_exits_with_1_and_says_why() -> None:
    code, output, _ = invoke("-", text=b"nothing\n")
    assert code == 1
    assert "not imported. No line is a training step" in output
    code, output, _ = invoke("-", "--json", text=b"nothing\n")
    assert code == 1
    assert "No line" in json.loads(output)["refused"]


def test_wrong_names_and_two_frameworks_exit_with_2() -> None:
    code, _, errors = invoke("-", "--framework", "areal_lab", text=b"")
    assert code == 2
    assert "--framework is areal_lab, but must be one of verl, trl" in errors
    both = (FOLDER / "verl_one_step_off.txt").read_bytes() + (
        FOLDER / "trl_console.txt"
    ).read_bytes()
    code, output, errors = invoke("-", "--json", text=both)
    assert code == 2
    assert "choose with --framework NAME" in errors
    assert "verl" in json.loads(output)["refused"]


def test_a_missing_file_exits_with_1() -> None:
    code, _, errors = invoke("nowhere.log")
    assert code == 1
    assert "nowhere.log" in errors


def test_escapes_and_markup_of_a_log_do_not_reach_the_terminal() -> None:
    log = (
        "step:1 - timing_s/gen:1.5 - timing_s/step:2.5 - evil/[red]\x1b]0;title\x07\x9b2Jkey:1.0 - "
        "x/<script>:2.0\n"
        "(TaskRunner pid=1) {'actor_rollout_ref': {'model': {'path': 'a/\x1b[31mred'}}}\n"
    )
    for arguments in ((), ("--json",)):
        code, output, _ = invoke("-", *arguments, text=log.encode())
        assert code == 0
        assert "\x1b" not in output
        assert "\x9b" not in output
        assert "\x07" not in output


def test_several_files_are_one_run(tmp_path: Path) -> None:
    lines = (FOLDER / "prime_rl_0_3.txt").read_text().split("\n")
    orchestrator, trainer = tmp_path / "orchestrator.log", tmp_path / "trainer.log"
    orchestrator.write_text("\n".join(one for one in lines if "Loss" not in one))
    trainer.write_text("\n".join(one for one in lines if "Loss" in one) + "\n")
    code, output, _ = invoke(str(orchestrator), str(trainer), "--json")
    assert code == 0
    assert compared(json.loads(output), expected_of(FOLDER / "prime_rl_0_3.txt")) == []


def test_a_log_and_the_configuration_of_its_run() -> None:
    code, output, _ = invoke(
        str(FOLDER / "wandb_config.yaml"), str(FOLDER / "wandb_history.csv"), "--json"
    )
    assert code == 0
    found = json.loads(output)
    assert (found["framework"], found["model"], found["gpus"]) == ("verl", "Qwen3-8B", 8)
    assert len(found["steps"]) == 3


def test_the_command_loads_no_torch() -> None:
    code = (
        "import sys; from areal_lab.cli.import_logs import run_import; "
        f"run_import([{str(FOLDER / 'verl_sync.txt')!r}], framework='', as_json=True); "
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)
