"""The recorded pair: calibrated on the synchronous run, the asynchronous one is predicted."""

from __future__ import annotations

import json
import re
from datetime import UTC, date, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from areal_lab.cli import app as cli
from areal_lab.runlog.read_run import read_run
from benchmarks.harness import Arguments
from benchmarks.tiny_model import write_tiny_model
from reproductions.record_pair import (
    CAP_TOKENS,
    KINDS,
    MEAN_TOKENS,
    RECORDED,
    answer_tokens,
    run_command,
)
from reproductions.recorded_run import IDLE_BAR, STEP_BAR, reproduce
from reproductions.report.records import Reproduction, to_json
from simulator.workload.recorded_run import response_tokens as recorded_tokens

PAGE = Path(__file__).parents[2] / "docs" / "calibrate.md"
FULL = Arguments(
    json=False,
    quick=False,
    repeats=1,
    command="python -m reproductions.recorded_run",
    started=datetime(2026, 1, 1, tzinfo=UTC),
    load_average=(0.0, 0.0, 0.0),
)


@pytest.fixture(scope="module")
def result() -> Reproduction:
    return reproduce(FULL)


def test_the_asynchronous_run_is_predicted_from_the_synchronous_one(result: Reproduction) -> None:
    rows = {row.name: row for row in result.rows}
    assert (STEP_BAR, IDLE_BAR) == (0.15, 0.10)
    predicted = [row for row in result.rows if row.bar is not None]
    assert [row.name for row in predicted] == [
        "asynchronous: step time",
        "asynchronous: trainer idle",
        "asynchronous: engines idle",
    ]
    assert all(row.within and not row.fitted for row in predicted)
    assert rows["synchronous: step time"].fitted
    # That is no feat of runs that are alike: asynchrony saves a good part of each step.
    assert rows["asynchronous: step time"].paper < 0.85 * rows["synchronous: step time"].paper  # type: ignore[operator]


def test_its_json_is_the_contract_and_says_what_contention_did(result: Reproduction) -> None:
    told = json.loads(json.dumps(to_json(result), allow_nan=False))
    assert {"name", "paper", "ours", "gap", "interval", "fitted"} <= told["rows"][0].keys()
    assert {"rollout.decode_step_s", "trainer.step_s"} <= {
        one["name"] for one in told["parameters"]
    }
    assert all(one["fitted"] for one in told["parameters"])
    assert [one["in the asynchronous run"] for one in told["sensitivity"]] == [
        "decode steps",
        "passes with a prefill",
        "training steps",
    ]
    assert any(why.startswith("Recorded 20") for why in told["why"])


@pytest.mark.slow
def test_the_fewest_steps_that_may_be_recorded_are_enough(tmp_path: Path) -> None:
    model, into = tmp_path / "model", tmp_path / "pair"
    write_tiny_model(model)
    run_command(["--model", str(model), "--steps", "7", "--into", str(into)])
    found = reproduce(FULL, into)
    assert all(row.ours.low < row.ours.mean < row.ours.high for row in found.rows if not row.fitted)


def test_recordings_tell_where_they_come_from() -> None:
    for kind in KINDS:
        told = json.loads((RECORDED / kind / "recording.json").read_text())
        assert told["command"].startswith("python -m reproductions.record")
        assert re.fullmatch(r"[0-9a-f]{12}\+?", told["commit"])
        assert date.fromisoformat(told["date"]) >= date(2026, 11, 21)
        assert told["cores"] == 2
        assert told["others"] is None or 0 <= told["others"] < 0.5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("synchronos",), "no schedule 'synchronos'; one of synchronous, asynchronous"),
        (("--steps", "6"), "--steps is 6, but must be at least 7"),
    ],
)
def test_what_cannot_be_recorded_is_refused_in_a_line(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run_command(words)
    assert said in capsys.readouterr().err


def test_both_runs_had_the_same_answers_and_name_no_path() -> None:
    runs = [read_run(RECORDED / kind) for kind in KINDS]
    tokens = [recorded_tokens(run.log) for run in runs]
    for group in tokens[0].keys() & tokens[1].keys():
        assert tokens[0][group] == tokens[1][group]
        assert tokens[0][group] == [answer_tokens(group, sample) for sample in range(2)]
    for run in runs:
        assert "run_dir" not in run.settings
        assert run.settings["rollout.threads"] == run.settings["actor.threads"] == 1
    size = sum(path.stat().st_size for path in RECORDED.rglob("*") if path.is_file())
    assert size < 300_000


def test_the_lengths_asked_for_have_the_mean_and_the_cap() -> None:
    drawn = [answer_tokens(group, sample) for group in range(2000) for sample in range(2)]
    assert sum(drawn) / len(drawn) == pytest.approx(MEAN_TOKENS, rel=0.03)
    assert max(drawn) == CAP_TOKENS


def test_the_page_shows_what_the_commands_print(tmp_path: Path) -> None:
    page = PAGE.read_text()
    out = tmp_path / "synchronous.yaml"
    for arguments in (
        ["calibrate", str(RECORDED / "synchronous"), "--out", str(out)],
        ["simulate", str(out), "--against", str(RECORDED / "asynchronous")],
    ):
        printed = CliRunner().invoke(cli.app, arguments)
        assert printed.exit_code == 0, printed.stderr
        assert "\n".join(line.rstrip() for line in printed.stdout.rstrip().splitlines()) in page
