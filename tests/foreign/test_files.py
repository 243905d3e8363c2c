"""Files of trackers and dumps of samples: the values that were logged, and damaged files."""

from __future__ import annotations

import io
import json
import pickle
import random
import sqlite3
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from areal_lab.foreign.read import read_run
from areal_lab.foreign.record import as_json
from tests.foreign.expected import FOLDER
from tests.fuzz import damaged_bytes, mutations, refused

EVENTS = FOLDER / "events.out.tfevents.toy"
"""Written by tensorboard 2.20's EventFileWriter; step 3 twice, as after a restart."""
OFFLINE = FOLDER / "offline.wandb"
"""History and configuration as wandb 0.31 wrote them, without its records of the machine."""

SWANLAB = FOLDER / "offline.swanlab"
"""Columns and scalars as swanlab 0.10.3 wrote them, without its records of the machine."""


def imported(*paths: Path) -> dict[str, Any]:
    return as_json(read_run(paths))


def test_event_files_give_the_numbers_that_were_logged() -> None:
    found = imported(EVENTS)
    assert found["framework"] == "verl"
    assert [one["step_time_s"] for one in found["steps"]] == [101.5, 102.5, 110.5]
    assert [one["generation_s"] for one in found["steps"]] == [60.1] * 3  # not 60.0999985
    assert found["steps"][0]["time_s"] == 1790000100.0


def test_wandb_offline_files_give_history_and_settings() -> None:
    found = imported(OFFLINE)
    assert found["framework"] == "verl"
    assert (found["model"], found["gpus"], found["samples_per_prompt"]) == ("Qwen3-8B", 8, 16)
    assert [one["step_time_s"] for one in found["steps"]] == [101.5, 102.5, 103.5]
    assert [one["reward_mean"] for one in found["steps"]] == [0.25, None, 0.75]


def test_swanlab_offline_files_give_the_numbers_that_were_logged() -> None:
    found = imported(SWANLAB)
    assert found["framework"] == "verl"
    assert [one["step"] for one in found["steps"]] == [1, 2, 3]
    assert [one["step_time_s"] for one in found["steps"]] == [71.5, 72.5, 73.5]
    assert [one["reward_mean"] for one in found["steps"]] == [0.25, 0.5, 0.75]
    assert [one["truncated_fraction"] for one in found["steps"]] == [0.0625] * 3
    assert found["unread"] == 0


@pytest.mark.parametrize("path", [EVENTS, OFFLINE, SWANLAB], ids=lambda path: path.name)
@mutations
def test_damaged_tracker_files_end_in_fewer_values_or_one_error(
    path: Path, tmp_path: Path, count: int
) -> None:
    rng = random.Random(7)
    content = path.read_bytes()
    for _ in range(count // 4):
        damaged = tmp_path / path.name
        damaged.write_bytes(damaged_bytes(rng, content))
        refused(lambda: imported(damaged))  # noqa: B023  # called at once


@pytest.mark.parametrize("path", [EVENTS, OFFLINE, SWANLAB], ids=lambda path: path.name)
def test_cut_tracker_files_give_the_steps_before_their_end(path: Path, tmp_path: Path) -> None:
    content = path.read_bytes()
    whole = imported(path)["steps"]
    for end in range(60, len(content), 41):
        cut = tmp_path / path.name
        cut.write_bytes(content[:end])
        for one, full in zip(imported(cut)["steps"], whole, strict=False):
            for name, value in one.items():
                # The restart's value of step 3 may be cut off.
                assert value in (None, full[name], 103.5) or name == "time_s"


def trackio_file(path: Path, runs: tuple[str, ...] = ("one",)) -> Path:
    with sqlite3.connect(path) as connection:
        connection.execute(
            "create table metrics (id integer primary key autoincrement, run_id text not null, "
            "timestamp text not null, run_name text not null, step integer not null, metrics text "
            "not null, log_id text, space_id text)"
        )
        for step, run in enumerate(runs * 2 if len(runs) == 1 else runs, 1):
            metrics = {
                "train/reward": 0.5 * step,
                "train/completions/mean_length": 100.5,
                "train/step_time": 12.25,
                "train/loss": 0.1,
                "train/global_step": step * 5,
            }
            connection.execute(
                "insert into metrics (run_id, timestamp, run_name, step, metrics) values "
                "('1', '2026-08-01T10:00:00+00:00', ?, ?, ?)",
                (run, step, json.dumps(metrics)),
            )
    connection.close()
    return path


def test_trackio_gives_steps_by_the_trainers_number(tmp_path: Path) -> None:
    found = imported(trackio_file(tmp_path / "toy.db"))
    assert found["framework"] == "trl"
    assert [(one["step"], one["reward_mean"]) for one in found["steps"]] == [(5, 0.5), (10, 1.0)]
    assert found["steps"][0]["response_length_mean"] == 100.5


def test_trackio_with_several_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="2 runs"):
        imported(trackio_file(tmp_path / "toy.db", ("one", "two")))


def test_a_damaged_database_is_one_error(tmp_path: Path) -> None:
    path = trackio_file(tmp_path / "toy.db")
    path.write_bytes(path.read_bytes()[:2000])
    assert "not a readable database" in refused(lambda: imported(path))


def test_slime_dumps_are_read_with_weights_only(tmp_path: Path) -> None:
    samples = [
        {"response_length": 10 * one, "reward": 0.5, "status": state, "tokens": [1, 2]}
        for one, state in ((1, "completed"), (3, "truncated"))
    ]
    path = tmp_path / "4.pt"
    torch.save({"rollout_id": 4, "samples": samples}, path)
    (step,) = imported(path)["steps"]
    assert step["step"] == 4
    assert (step["response_length_mean"], step["response_length_max"]) == (20, 30)
    assert (step["reward_mean"], step["truncated_fraction"]) == (0.5, 0.5)


class _Marker:
    """Leaves a file behind if a pickle of it is executed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("saved", ["torch", "pickle"])
def test_pickles_are_not_executed(tmp_path: Path, saved: str) -> None:
    path, marker = tmp_path / "1.pt", tmp_path / "executed"
    content = {"rollout_id": 1, "samples": [{"reward": _Marker(marker)}]}
    if saved == "torch":
        torch.save(content, path)
    else:
        path.write_bytes(pickle.dumps(content))
    assert "would have to be executed" in imported(path)["refused"]
    assert not marker.exists()


def test_dumped_samples_of_verl_give_rewards_by_step(tmp_path: Path) -> None:
    path = tmp_path / "3.jsonl"
    rows = [{"input": "a", "output": "b", "gts": "c", "score": one, "step": 3} for one in (1, 0)]
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    found = imported(path)
    assert found["framework"] == "verl"
    assert found["steps"][0]["reward_mean"] == 0.5
    assert found["steps"][0]["samples_per_step"] == 2


def test_dumped_samples_of_nemo_rl_give_lengths(tmp_path: Path) -> None:
    path = tmp_path / "train_data_step12.jsonl"
    rows = [
        {
            "content": "secret",
            "rewards": one,
            "token_ids": [1, 2, 3, 4],
            "token_loss_mask": [0, 1, 1, one],
        }
        for one in (0, 1)
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    found = imported(path)
    (step,) = found["steps"]
    assert (found["framework"], step["step"]) == ("nemo-rl", 12)
    assert (step["reward_mean"], step["response_length_mean"]) == (0.5, 2.5)
    assert "secret" not in json.dumps(found)


def test_completions_of_trl_give_samples_and_the_only_reward(tmp_path: Path) -> None:
    path = tmp_path / "completions_00012.parquet"
    columns = {
        "step": [12, 12],
        "prompt": ["a", "b"],
        "completion": ["c", "d"],
        "accuracy": [1.0, 0.0],
        "advantage": [1.0, -1.0],
    }
    pq.write_table(pa.table(columns), path)
    (step,) = imported(path)["steps"]
    assert (step["step"], step["samples_per_step"], step["reward_mean"]) == (12, 2, 0.5)
    pq.write_table(pa.table({**columns, "format": [1.0, 1.0]}), path)
    found = imported(path)
    assert found["steps"][0].get("reward_mean") is None
    assert "reward_mean" in found["ambiguous"]


def test_an_exported_history_may_be_a_json_array() -> None:
    rows = [
        {"_step": one, "timing_s/step": 3.5, "timing_s/gen": 2.0, "critic/score/mean": None}
        for one in (1, 2)
    ]
    for text in (json.dumps(rows), json.dumps(rows, indent=1)):
        found = as_json(read_run([Path("-")], stdin=io.BytesIO(text.encode())))
        assert [one["step_time_s"] for one in found["steps"]] == [3.5, 3.5]


def test_a_folder_or_a_pipe_is_one_error(tmp_path: Path) -> None:
    assert "is not a file" in refused(lambda: imported(tmp_path))
