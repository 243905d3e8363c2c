"""Dynamic sampling in complete runs with real processes on a tiny model."""

from __future__ import annotations

import io
import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from areal_lab.config.problem import ConfigError
from areal_lab.control.events import GroupFiltered, Train
from areal_lab.control.sampling import EQUAL_REWARDS
from areal_lab.pipeline.console import summary_table
from areal_lab.pipeline.resume.recovery import find_recovery
from areal_lab.pipeline.train import resume_run
from areal_lab.runlog.read_run import read_events
from areal_lab.runlog.records import ActionRecord, EventRecord, Log, RunHeader
from areal_lab.runlog.replay import check_replay
from areal_lab.runlog.summary import build_summary
from areal_lab.shell.display import describe
from areal_lab.shell.step_report import StepReport
from tests.pipeline.resume.killed_run import comparable
from tests.pipeline.resume.test_resume import ONE_BY_ONE
from tests.pipeline.tiny_run import do_run, metrics, tiny_config, trained_samples

REWARDS = "tests.pipeline.rewards"
STEPS, GROUPS = 4, 3
ON = ("rollout.dynamic_sampling.enabled=true", f"total_train_steps={STEPS}")


@pytest.mark.slow
def test_equal_groups_are_replaced_also_after_a_kill(tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path,
        *(*ON, "eta=0", "save_every_steps=1", ONE_BY_ONE),
        f"reward.fn={REWARDS}:even_digits_of_some",
    )
    result = do_run(config)
    folder, summary = result.folder, result.summary
    assert summary["filtered_by_reason"] == {EQUAL_REWARDS: summary["filtered"]}
    assert summary["filtered"] >= STEPS
    lines = metrics(folder)
    assert [line["trained_groups"] for line in lines] == [GROUPS] * STEPS
    assert sum(line["filtered_groups"] for line in lines) == summary["filtered"]
    for step in trained_samples(folder):
        for group in {sample["group"] for sample in step}:
            assert len({s["reward"] for s in step if s["group"] == group}) > 1
    assert check_replay(read_events(folder)).agrees

    killed = tmp_path / "killed"
    shutil.copytree(folder, killed, symlinks=True)
    for checkpoint in sorted((killed / "checkpoints").iterdir())[3:]:
        shutil.rmtree(checkpoint)
    assert find_recovery(killed).version == 3
    run = resume_run(killed)
    assert [report.step for report in run] == [4]
    assert comparable(killed) == comparable(folder)
    assert run.summary["filtered"] == summary["filtered"]
    assert check_replay(read_events(killed)).agrees


def test_a_run_that_finds_nothing_says_so_and_ends(tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path, *ON, "rollout.dynamic_sampling.max_batches=2", f"reward.fn={REWARDS}:nothing"
    )
    with pytest.raises(ConfigError, match="step 1 needs 3 groups with different rewards") as error:
        do_run(config)
    (folder,) = (tmp_path / "runs").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("failed", str(error.value))
    assert "raise gconfig.n_samples" in summary["error"]
    log = read_events(folder)
    reasons = Counter(r.event.reason for r in log.events if isinstance(r.event, GroupFiltered))
    assert reasons[EQUAL_REWARDS] == summary["filtered"] >= 2 * GROUPS
    assert check_replay(log).agrees


def test_what_was_filtered_is_shown() -> None:
    report = StepReport(
        step=2,
        total_steps=9,
        version=2,
        time_s=1.0,
        step_s=0.5,
        tokens_per_s=10.0,
        reward_mean=0.5,
        loss=0.0,
        lag_token_mean=0.0,
        lag_token_max=0.0,
        metrics={"filtered_groups": 3},
    )
    assert describe(report).endswith("0.5 s  3 groups filtered")
    assert describe(replace(report, metrics={"filtered_groups": 0})).endswith("0.5 s")
    header = RunHeader(
        mode="train", started_at=0.0, limits={"batch_groups": 2, "eta": 1.0}, processes=()
    )
    log = Log(
        header,
        (
            EventRecord(1.0, GroupFiltered(0, EQUAL_REWARDS)),
            EventRecord(1.0, GroupFiltered(1, EQUAL_REWARDS)),
            EventRecord(1.0, GroupFiltered(2, "reward timeout")),
            ActionRecord(1.0, Train(0, (3, 4))),
            ActionRecord(2.0, Train(1, (5,))),
        ),
    )
    told = build_summary(log, reward_before=None, reward_after=None, wall_s=0.0, backend="none")
    out = io.StringIO()
    Console(file=out, width=200).print(summary_table(told))
    (line,) = [line for line in out.getvalue().splitlines() if "filtered" in line]
    assert line.split("groups ", 1)[1].strip() == (
        "0 dropped, 3 filtered (2 all rewards equal, 1 reward timeout); 1 smaller batch"
    )
