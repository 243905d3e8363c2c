"""summary.json of a failed run: all fields, the known ones filled; it never hides the error."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from areal_lab.config.load import load_config
from areal_lab.config.schema import TrainConfig
from areal_lab.control.coordinator import Limits
from areal_lab.control.schedule import asynchronous
from areal_lab.engines.protocol import PauseMode, WeightsFolder
from areal_lab.pipeline.outcome import SummaryInputs, summary_of_failure
from areal_lab.pipeline.servers.health import HealthLimits
from areal_lab.pipeline.servers.pool import ServerPool
from areal_lab.resolve.allocation import layout_of
from areal_lab.resolve.limits import Threads, limits_of
from areal_lab.resolve.resolved import Resolved
from areal_lab.runlog.file import read_log_file
from areal_lab.runlog.summary import build_summary
from tests.pipeline.fake_run import FakeRun
from tests.runlog.test_summary import CONTRACT

LIMITS = Limits(batch_groups=4, max_in_flight=8, train_steps=3, schedule=asynchronous(2))


def unchecked(config: TrainConfig) -> Resolved:
    """A resolved run with the parts that a summary reads."""
    engines, limits = layout_of(config).engines, limits_of(config)
    return cast(Resolved, SimpleNamespace(config=config, engines=engines, limits=limits))


def failed(path: Path, inputs: SummaryInputs, config: TrainConfig | None = None) -> dict[str, Any]:
    """The summary of a run in this folder that failed, but for status and error."""
    resolved = unchecked(config or load_config(None, []))
    summary = summary_of_failure(path, resolved, inputs, wall_s=5.0)
    assert {*summary, "error"} >= {*CONTRACT, "engine_version", "training_s", "processes"}
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
