"""Run folders of imported logs: what readers of run folders find in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from areal_lab.foreign.read import read_run as read_logs
from areal_lab.foreign.record import Attempt, ImportedRun, Step
from areal_lab.pipeline.report import format_run, write_report
from areal_lab.runlog.activity import NOT_IN_THE_LOG, WAIT_BATCH, idle_by_cause
from areal_lab.runlog.imported import health, import_into, metric_lines
from areal_lab.runlog.read_run import find_runs, read_run

SPECIMENS = Path(__file__).parents[1] / "foreign" / "specimens"
LOGS = sorted(
    one for one in SPECIMENS.iterdir() if not one.name.endswith((".expected.json", ".yaml"))
)


def imported(name: str, folder: Path):
    return read_run(import_into(read_logs([SPECIMENS / name]), folder / "run"))


def made(steps, **fields):
    return ImportedRun(framework="verl", attempts=[Attempt(steps=steps)], **fields)


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.name)
def test_every_log_becomes_a_run_that_its_readers_accept(log, tmp_path):
    found = read_logs([log])
    run = read_run(import_into(found, tmp_path / "run"))
    numbers = sorted({one.step for one in found.steps})
    assert list(run.steps.index) == numbers
    assert len(run.groups) == len(run.samples) == 0
    text = format_run(tmp_path / "run")
    assert "imported: no events, groups or samples" in text
    assert find_runs(tmp_path) == [tmp_path / "run"]
    rewards = {one.step: one.number("reward_mean") for one in found.steps if one.values}
    for step, value in rewards.items():
        if value is not None and not any(one.role for one in found.steps):
            assert run.steps.loc[step, "reward_mean"] == value


def test_parts_of_a_synchronous_step_follow_each_other_and_fill_it(tmp_path):
    run = imported("verl_sync.txt", tmp_path)
    use = idle_by_cause(run.log)
    assert list(use) == ["all parts"]
    steps = run.steps
    assert use["all parts"].total_s == pytest.approx(steps["step_s"].sum())
    busy = use["all parts"].busy_s
    assert busy["generate"] == pytest.approx(steps["generation_s"].sum())
    assert busy["forward/backward"] == pytest.approx(steps["training_s"].sum())
    assert busy["update weights"] == pytest.approx(steps["weight_sync_s"].sum())
    known = sum(busy.values()) + sum(use["all parts"].idle_s.values())
    assert known == pytest.approx(steps["step_s"].sum())
    order = [span.name for span in run.log.spans if span.args["step"] == 2]
    assert order == [
        "update weights",
        "generate",
        "score",
        "proximal log-probs",
        "reference log-probs",
        "advantages",
        "forward/backward",
        "evaluate",
        NOT_IN_THE_LOG,
    ]


def test_an_asynchronous_log_has_the_waits_of_its_trainer(tmp_path):
    run = imported("nemo_rl_async.txt", tmp_path)
    use = idle_by_cause(run.log)["trainer"]
    assert use.idle_s[WAIT_BATCH] == pytest.approx(run.steps["wait_for_batch_s"].sum())
    assert "generate" not in use.busy_s
    assert run.steps["lag_token_mean"].tolist() == [1.4, 1.4]


def test_parts_longer_than_their_step_end_with_it(tmp_path):
    run = made([Step(step=1, values={"step_time_s": 10.0, "generation_s": 8.0, "training_s": 9.0})])
    read = read_run(import_into(run, tmp_path / "run"))
    assert [(span.name, span.t_s, span.end_s) for span in read.log.spans] == [
        ("generate", 0.0, 8.0),
        ("forward/backward", 8.0, 10.0),
    ]


def test_time_stamps_are_the_axis_if_every_step_has_one_in_order():
    def steps(*stamps):
        return [
            Step(step=n, time_s=at, values={"step_time_s": 10.0}) for n, at in enumerate(stamps, 1)
        ]

    def ends(run):
        return [line["time_s"] for line in metric_lines(run)]

    assert ends(made(steps(100.0, 130.0, 150.0))) == [10.0, 40.0, 60.0]
    assert ends(made(steps(100.0, None, 150.0))) == [10.0, 20.0, 30.0]
    past_midnight = made(steps(86_390.0, 20.0, 40.0))
    assert ends(past_midnight) == [10.0, 20.0, 30.0]


def test_a_quantity_that_is_not_in_the_log_is_in_no_file(tmp_path):
    run = made([Step(step=1, values={"reward_mean": None, "entropy": float("nan")})])
    folder = import_into(run, tmp_path / "run")
    (line,) = [json.loads(one) for one in (folder / "metrics.jsonl").read_text().splitlines()]
    assert line == {"step": 1, "version": 1}


def test_names_that_mean_something_else_here_are_renamed():
    (line,) = metric_lines(made([Step(step=1, values={"tokens": 5000, "samples": 64})]))
    assert line["logged_tokens"] == 5000
    assert "tokens" not in line
    assert "samples" not in line


def test_keys_without_a_meaning_are_kept_by_their_name():
    (line,) = metric_lines(
        made([Step(step=1, values={"reward_mean": 0.5}, other={"x/y": 2.0, "bad": float("inf")})])
    )
    assert line["x/y"] == 2.0
    assert "bad" not in line


def test_processes_of_one_step_are_joined_and_the_trainer_counts():
    steps = [
        Step(step=1, role="trainer", values={"step_time_s": 9.0}),
        Step(step=1, role="orchestrator", values={"step_time_s": 7.0, "reward_mean": 0.5}),
    ]
    (line,) = metric_lines(made(steps))
    assert line["step_s"] == 9.0
    assert line["reward_mean"] == 0.5


def test_alarms_name_the_settings_of_the_framework(tmp_path):
    steps = [
        Step(step=n, values={"step_time_s": 1.0, "truncated_fraction": 0.9, "reward_mean": 0.1})
        for n in range(1, 30)
    ]
    run = made(steps)
    (alarm,) = health(run, metric_lines(run))
    assert alarm.name == "truncated"
    assert "data.max_response_length" in alarm.remedy
    assert "gconfig.max_new_tokens" not in alarm.remedy
    folder = import_into(run, tmp_path / "run")
    (line,) = [json.loads(one) for one in (folder / "alarms.jsonl").read_text().splitlines()]
    assert (line["kind"], line["name"]) == ("begun", "truncated")
    run.framework = "megatron-rl"
    assert "gconfig.max_new_tokens" in health(run, metric_lines(run))[0].remedy


def test_a_folder_with_files_is_refused_and_nothing_is_overwritten(tmp_path):
    run = made([Step(step=1, values={"reward_mean": 0.5})])
    (tmp_path / "mine.txt").write_text("kept")
    with pytest.raises(ValueError, match="has files; name a new folder"):
        import_into(run, tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["mine.txt"]


def test_what_was_refused_or_is_empty_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="nothing to write: a table of SFT"):
        import_into(ImportedRun(framework=None, refused="a table of SFT"), tmp_path / "a")
    with pytest.raises(ValueError, match="no step with a number"):
        import_into(made([]), tmp_path / "b")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["verl_sync.txt", "nemo_rl_async.txt"])
def test_pictures_are_drawn_without_groups(name, tmp_path):
    imported(name, tmp_path)
    names = {path.name for path in write_report(tmp_path / "run")}
    assert names == {"reward.png", "timeline.png", "staleness.png", "trace.json"}
