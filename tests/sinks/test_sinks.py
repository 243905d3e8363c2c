"""Sinks that fail, hang or miss points leave the run alone, and are counted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from areal_lab.config.load import load_config
from areal_lab.foreign.record import Attempt, ImportedRun, Step
from areal_lab.live.presence import Present
from areal_lab.runlog.imported import import_into
from areal_lab.sinks import start, worker
from areal_lab.sinks.protocol import Point, Points
from areal_lab.sinks.start import Sinks, add_to_summary, check_sinks
from areal_lab.sinks.worker import Following, Status
from tests.host.test_claim import continue_elsewhere

ROOT = Path(__file__).parents[2]
LINES = 5
RECORDING_WORKER = """
import os, sys
from pathlib import Path
from areal_lab.host.claim import claim_of
from areal_lab.sinks import worker
from tests.sinks.test_sinks import Recording

tells = os.dup(1)

class Telling:
    def __init__(self, claim):
        self.claim = claim

    @property
    def taken(self):
        if taken := self.claim.taken:
            os.write(tells, b"taken\\n")
        return taken

worker._open = lambda *_: Recording()
worker.claim_of = lambda folder: Telling(claim_of(folder))
worker.main(Path(sys.argv[1]), "tensorboard", 5.0)
"""
"""The process of a sink whose tool is not installed here; it tells when it finds its run taken."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    (tmp_path / "held_out.jsonl").write_text('{"version": 0, "reward": 0.25}\n')
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, LINES + 1):
            line = {"step": step, "version": step, "time_s": 2.0 * step, "loss": 0.5, "mine": 1}
            line |= {"environment/steps": 4}
            file.write(json.dumps(line) + "\n")
    (tmp_path / "summary.json").write_text('{"status": "complete", "steps": 5}')
    return tmp_path


class Recording:
    """A sink that keeps what it gets, and fails at some steps."""

    where = "here"

    def __init__(self, fails_at: tuple[int, ...] = ()) -> None:
        self.points: list[Point] = []
        self.closed: list[tuple[Mapping[str, Any], bool]] = []
        self._fails_at = fails_at

    def log(self, point: Point) -> None:
        if point.step in self._fails_at:
            raise ConnectionError("no network")
        self.points.append(point)

    def picture(self, name: str, file: Path, step: int) -> None:
        raise AssertionError(f"there is no {name} of {step} in {file}")

    def close(self, summary: Mapping[str, Any], *, failed: bool) -> None:
        self.closed.append((summary, failed))


def test_points_are_read_once_with_their_groups(folder: Path) -> None:
    points = Points(folder)
    assert points.left() == 1 + LINES
    found = list(points.new())
    assert found[0] == Point(0, None, {"rewards/held_out_reward": 0.25})
    assert found[1] == Point(
        1,
        2.0,
        {
            "progress/time_s": 2.0,
            "optimizer/loss": 0.5,
            "custom/mine": 1.0,
            "environment/steps": 4.0,
        },
    )
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "time_s": 9')
    assert list(points.new()) == []  # not complete yet
    assert points.left() == 0


def test_points_of_an_imported_log_need_no_time(tmp_path: Path) -> None:
    steps = [Step(step=n, values={"reward_mean": 0.5 * n, "drift_kl": 0.25}) for n in (1, 2)]
    run = ImportedRun(framework="nemo-rl", attempts=[Attempt(steps=steps)])
    points = list(Points(import_into(run, tmp_path / "run")).new())
    assert [(one.step, one.time_s) for one in points] == [(1, None), (2, None)]
    assert points[1].values == {"rewards/reward_mean": 1.0, "custom/drift_kl": 0.25}


def test_failures_are_counted_and_the_rest_is_sent(folder: Path) -> None:
    sink, reported = Recording(fails_at=(2, 4)), list[str]()
    following = Following(Points(folder), lambda: sink, lambda s: reported.append(s.error))
    following.end(folder)
    assert [one.step for one in sink.points] == [0, 1, 3, 5]
    assert (following.status.points, following.status.failures) == (4, 2)
    assert following.status.error == "ConnectionError: no network"
    assert following.status.closed
    assert sink.closed == [({"status": "complete", "steps": 5}, False)]


def test_a_sink_that_cannot_be_opened_is_told_and_left(folder: Path) -> None:
    def broken() -> Recording:
        raise SystemExit("log in first")

    reports: list[Status] = []
    following = Following(Points(folder), broken, reports.append)
    following.send()
    following.end(folder)
    assert (following.status.points, following.status.failures) == (0, 1)
    assert following.status.error == "SystemExit: log in first"


def test_a_missing_package_is_refused_with_its_command() -> None:
    (problem,) = check_sinks(load_config(None, ["sinks=[swanlab]"]))
    assert str(problem).endswith("run: pip install 'areal_lab[swanlab]'")
    twice = [str(one) for one in check_sinks(load_config(None, ["sinks=[wandb,wandb]"]))]
    assert any("twice" in one for one in twice)


def started(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str, close_s: float) -> Sinks:
    """A sink whose process runs this code."""
    real = start.subprocess.Popen

    def popen(command: list[str], **options: Any) -> Any:
        assert command[-2] == "wandb"
        return real([sys.executable, "-c", code], **options)

    monkeypatch.setattr(start.subprocess, "Popen", popen)
    settings = ["sinks=[wandb]", f"stats_logger.close_timeout_s={close_s}"]
    return Sinks(load_config(None, settings), folder, notes.append)


notes: list[str] = []


def test_a_sink_that_hangs_is_ended_and_its_points_are_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sinks = started(folder, monkeypatch, "import time; time.sleep(600)", 0.2)
    report = sinks.close()["wandb"]
    assert (report["points"], report["missing_points"], report["closed"]) == (0, 6, False)
    add_to_summary(folder, {"wandb": report})
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 5
    assert summary["sinks"]["wandb"]["missing_points"] == 6


def test_the_first_failure_is_told_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes.clear()
    lines = [json.dumps({"failures": n, "error": "no network"}) for n in (1, 2, 3)]
    code = "import sys; print(" + repr("\n".join(lines)) + "); sys.stdin.read()"
    sinks = started(folder, monkeypatch, code, 20)
    report = sinks.close()["wandb"]
    assert report["failures"] == 3
    (note,) = notes
    assert note.startswith("wandb failed and the run continues: no network")


def test_every_sink_has_a_class() -> None:
    for sink, name in worker.CLASSES.items():
        file = Path(worker.__file__).with_name(f"{sink}.py")
        assert f"class {name}:" in file.read_text()


@pytest.mark.timeout(60)  # so long it would wait for a process that does not look
def test_a_sink_sends_nothing_that_another_process_writes(folder: Path) -> None:
    config = load_config(None, ["sinks=[tensorboard]"])
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(config.model_dump()))
    Present(folder).enter("training")
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", RECORDING_WORKER, str(folder)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=ROOT) as process:
        assert process.stdout is not None
        while json.loads(process.stdout.readline())["points"] < 1 + LINES:
            pass
        continue_elsewhere(folder)
        assert process.stdout.readline() == b"taken\n"
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 6, "version": 6, "time_s": 12.0, "loss": 0.5}) + "\n")
        rest, _ = process.communicate()
    assert process.returncode == 0
    assert rest == b"taken\n"


def test_a_measurement_of_several_versions_says_so(folder: Path) -> None:
    (folder / "held_out.jsonl").write_text(
        '{"version": 3, "reward": 0.5, "later_tokens": 0.25, "pass_at": {"4": 0.75}}\n'
    )
    assert next(Points(folder).new()) == Point(
        3,
        None,
        {
            "rewards/held_out_reward": 0.5,
            "rewards/held_out_later_tokens": 0.25,
            "rewards/held_out_pass_at_4": 0.75,
        },
    )
