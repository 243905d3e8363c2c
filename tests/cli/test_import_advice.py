"""`areal-lab import` as docs/import.md shows it, run folders, advice, and what these refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from areal_lab.cli.app import app
from areal_lab.runlog.read_run import read_run
from tools.pages.imports import PAGE, page

SPECIMENS = Path(__file__).parents[1] / "foreign" / "specimens"


def areal_lab(*arguments, **given):
    return CliRunner().invoke(app, [str(one) for one in arguments], **given)


def test_the_page_shows_what_its_commands_print():
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tools.pages"


def test_advice_is_in_the_object():
    result = areal_lab(
        "import", SPECIMENS / "verl_sync.txt", "--json", "--advise", "gpus=16xH100", "seeds=1"
    )
    assert result.exit_code == 0
    advice = json.loads(result.stdout.splitlines()[-1])["advice"]
    assert {one["name"] for one in advice["options"]} >= {"asynchronous, eta 4"}


def test_advice_on_lag_is_in_the_object_if_the_log_tells_lag_and_drift():
    for name, hurts in (("skyrl_async.txt", True), ("skyrl_console.txt", None)):
        result = areal_lab("import", SPECIMENS / name, "--json")
        found = json.loads(result.stdout.splitlines()[-1])["lag_advice"]
        assert (found and found["advice"]["decoupled"]["hurts"]) is hurts


def test_the_run_folder_is_written_with_its_pictures(tmp_path):
    result = areal_lab("import", SPECIMENS / "slime_sync.txt", "--out", tmp_path / "run")
    assert result.exit_code == 0
    assert len(read_run(tmp_path / "run").steps) > 0
    assert (tmp_path / "run" / "timeline.png").is_file()
    assert areal_lab("trace", tmp_path / "run").exit_code == 0


def test_what_a_log_lacks_is_asked_for_before_anything_is_written(tmp_path):
    out = tmp_path / "run"
    result = areal_lab("import", SPECIMENS / "trl_console.txt", "--advise", "--out", out)
    assert result.exit_code != 0
    assert "model=Qwen/Qwen3-4B" in result.stderr
    assert "gpus=16xH100" in result.stderr
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["import", "gpus=16xH100", "--advise"], "no log is given"),
        (["import", SPECIMENS / "verl_sync.txt", "gpus=16xH100"], "settings need --advise"),
        (["import", SPECIMENS / "verl_sync.txt", "--advise", "gpus=16xH9000"], "H9000"),
        (["import", "nowhere.log"], "nowhere.log"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, reason):
    result = areal_lab(*arguments)
    assert result.exit_code != 0
    assert reason in result.stderr
    assert "Traceback" not in result.stderr
