"""summary.json of a failed run: all fields, the known ones filled; it never hides the error."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from areal_lab.config.load import load_config
from areal_lab.config.schema import TrainConfig
from areal_lab.control.coordinator import Limits
from areal_lab.control.schedule import asynchronous
from areal_lab.engines.protocol import PauseMode, WeightsFolder
from areal_lab.pipeline.outcome import SummaryInputs, write_failure
from areal_lab.pipeline.servers.health import HealthLimits
from areal_lab.pipeline.servers.pool import ServerPool
from areal_lab.preflight.limits import Threads
from areal_lab.runlog.file import read_log_file
from areal_lab.runlog.folder import RunFolder
from areal_lab.runlog.summary import build_summary
from tests.pipeline.fake_run import FakeRun
from tests.runlog.test_summary import CONTRACT

LIMITS = Limits(batch_groups=4, max_in_flight=8, train_steps=3, schedule=asynchronous(2))


def failed(path: Path, inputs: SummaryInputs, config: TrainConfig | None = None) -> dict[str, Any]:
    """What a run in this folder leaves when it fails."""
    told: list[str] = []
    config = config or load_config(None, [])
    write_failure(
        RuntimeError("boom"), RunFolder(path), config, inputs, wall_s=5.0, note=told.append
    )
    assert told == []
    summary: dict[str, Any] = json.loads((path / "summary.json").read_text())
    assert summary.keys() >= {*CONTRACT, "engine_version", "training_s", "processes"}
    assert (summary["status"], summary["error"]) == ("failed", "boom")
    assert summary["wall_s"] == 5
    return summary


def servers() -> ServerPool:
    """Servers that were asked who they are, one of which lied about its version."""
    return ServerPool(
        sources={},
        health=HealthLimits(interval_s=1, timeout_s=1, stall_s=1),
        max_restarts=0,
        pause_mode=PauseMode.RETRACT,
        weights=WeightsFolder(path=Path(), version=0, checksum="", size_bytes=0),
        prepare_push=lambda *_: None,  # type: ignore[arg-type,return-value]
        note=print,
        counts=Counter({"version_mismatches": 1}),
        backend="sglang",
        engine_version="0.5.23",
    )


def test_a_run_that_fails_before_its_log_names_what_its_configuration_says(tmp_path: Path) -> None:
    config = load_config(None, ["rollout.backend=vllm:d2", "eta=inf", "seed=7"])
    summary = failed(tmp_path, SummaryInputs(), config)
    assert (summary["backend"], summary["schedule"]) == ("vllm", "asynchronous")
    assert (summary["eta"], summary["seed"]) == ("inf", 7)
    for count in ("steps", "trained_tokens", "interruptions", "multi_version_share", "dropped"):
        assert summary[count] == 0
    for unknown in ("engine_version", "reward_before", "threads", "rewards", "saved_version"):
        assert summary[unknown] is None


def test_reports_of_servers_before_there_is_a_log_are_kept(tmp_path: Path) -> None:
    inputs = SummaryInputs(servers=servers(), threads=Threads(engine=1, trainer=2))
    summary = failed(tmp_path, inputs)
    assert (summary["backend"], summary["engine_version"]) == ("sglang", "0.5.23")
    assert summary["version_mismatches"] == 1
    assert summary["threads"] == {"trainer": 2, "engine": 1}


def test_the_log_of_a_failed_run_is_counted(tmp_path: Path) -> None:
    FakeRun(tmp_path, LIMITS).run()
    lines = (tmp_path / "events.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "events.jsonl").write_text("".join(lines[: len(lines) * 3 // 4]) + '{"ki')
    log = read_log_file(tmp_path / "events.jsonl")
    whole = build_summary(log, reward_before=None, reward_after=None, wall_s=0, backend="")
    summary = failed(tmp_path, SummaryInputs())
    assert 0 < summary["steps"] < 3
    assert summary["interruptions"] > 0
    for name in ("steps", "interruptions", "multi_version_share", "lag", "trained_tokens"):
        assert summary[name] == whole[name]


def test_counts_of_a_damaged_log_are_unknown_and_not_0(tmp_path: Path) -> None:
    FakeRun(tmp_path, LIMITS).run()
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write("damaged\ndamaged\n")
    summary = failed(tmp_path, SummaryInputs(servers=servers()))
    for name in ("steps", "interruptions", "multi_version_share", "lag", "recomputed_tokens"):
        assert summary[name] is None
    assert summary["version_mismatches"] == 1
    assert summary["backend"] == "sglang"


def test_a_summary_that_cannot_be_written_is_noted_in_one_line(tmp_path: Path) -> None:
    told: list[str] = []
    config = load_config(None, [])
    folder = RunFolder(tmp_path / "gone")
    write_failure(
        asyncio.CancelledError(), folder, config, SummaryInputs(), wall_s=1, note=told.append
    )
    (line,) = told
    assert line.startswith("summary.json was not written: ")
    assert "No such file" in line


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (asyncio.CancelledError(), "stopped at once", "CancelledError"),
        (KeyError(), "failed", "KeyError"),
    ],
)
def test_an_error_without_words_is_named(
    tmp_path: Path, error: BaseException, status: str, words: str
) -> None:
    config = load_config(None, [])
    write_failure(error, RunFolder(tmp_path), config, SummaryInputs(), wall_s=1, note=print)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == (status, words)
