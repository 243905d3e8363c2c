"""Runs of mlflow, as its file store and its database have them (written as mlflow 3.17 does)."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from areal_lab.foreign.read import read_run
from areal_lab.foreign.record import as_json

_METRICS = {
    "timing_s/step": ("101.5", "102.5", "103.5"),
    "critic/score/mean": ("0.25", "0.5", "0.75"),
    "actor/entropy": ("0.5", "nan", "0.25"),
    "actor/grad_norm": ("1.5", "1.25", "inf"),
    "val-core/toy/acc/mean_at_1": ("0.125", "0.25", "0.5"),
}
_PARAMETERS = {"data/train_batch_size": "128", "actor_rollout_ref/rollout/n": "8"}


def imported(path: Path) -> dict[str, Any]:
    return as_json(read_run([path]))


def run_of_files(folder: Path) -> Path:
    for name, values in _METRICS.items():
        file = folder / "metrics" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"{1_700_000_000_000 + 500 * n} {one} {n}\n" for n, one in enumerate(values, 1)]
        file.write_text("".join(lines))
    for name, value in _PARAMETERS.items():
        file = folder / "params" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(value)
    return folder


def run_of_database(path: Path, runs: tuple[str, ...] = ("a",)) -> Path:
    largest = 1.7976931348623157e308
    with sqlite3.connect(path) as connection:
        connection.execute(
            "create table metrics (key text, value real, timestamp integer, run_uuid text, "
            "step integer, is_nan integer)"
        )
        connection.execute("create table params (key text, value text, run_uuid text)")
        for run in runs:
            for key, values in _METRICS.items():
                for step, text in enumerate(values, 1):
                    value = 0.0 if text == "nan" else largest if text == "inf" else float(text)
                    time_ms = 1_700_000_000_000 + 500 * step
                    row = (key, value, time_ms, run, step, int(text == "nan"))
                    connection.execute("insert into metrics values (?, ?, ?, ?, ?, ?)", row)
            for row in _PARAMETERS.items():
                connection.execute("insert into params values (?, ?, ?)", (*row, run))
    connection.close()
    return path


@pytest.mark.parametrize("kind", ["files", "database", "root"])
def test_a_run_gives_its_steps_and_settings(tmp_path: Path, kind: str) -> None:
    if kind == "database":
        path = run_of_database(tmp_path / "mlflow.db")
    else:
        run_of_files(tmp_path / "mlruns" / "1" / "abc")
        path = tmp_path / "mlruns" / ("1/abc" if kind == "files" else "")
    found = imported(path)
    assert (found["framework"], found["prompts_per_step"]) == ("verl", 128)
    assert [one["step_time_s"] for one in found["steps"]] == [101.5, 102.5, 103.5]
    assert [one["reward_mean"] for one in found["steps"]] == [0.25, 0.5, 0.75]
    assert [one["entropy"] for one in found["steps"]] == [0.5, None, 0.25]
    assert [one["grad_norm"] for one in found["steps"]] == [1.5, 1.25, None]
    assert [one["time_s"] for one in found["steps"]] == [1.7e9 + n / 2 for n in (1, 2, 3)]
    assert found["steps"][0]["other"]["val-core/toy/acc/mean@1"] == 0.125


def test_a_value_that_was_logged_again_replaces_the_first(tmp_path: Path) -> None:
    run = run_of_files(tmp_path / "run")
    with (run / "metrics" / "timing_s" / "step").open("a") as file:
        file.write("1700000009000 77.5 2\n1700000000001 1.0 3\nnot a line\n1700")
    found = imported(run)
    assert [one["step_time_s"] for one in found["steps"]] == [101.5, 77.5, 103.5]
    assert found["unread"] == 2


def test_folders_and_databases_with_several_runs_or_none_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no run of mlflow"):
        imported(tmp_path)
    for name in ("a", "b"):
        run_of_files(tmp_path / "1" / name)
    with pytest.raises(ValueError, match="2 runs"):
        imported(tmp_path)
    with pytest.raises(ValueError, match="2 runs"):
        imported(run_of_database(tmp_path / "mlflow.db", ("a", "b")))


def test_links_in_a_folder_are_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("1 7.5 1\n")
    run = run_of_files(tmp_path / "run")
    (run / "metrics" / "actor" / "pg_clipfrac").symlink_to(secret)
    assert "clip_fraction" not in imported(run)["steps"][0]
