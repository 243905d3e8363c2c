"""A real run whose eta follows the measured drift, and continues with it."""

from __future__ import annotations

from pathlib import Path

from areal_lab.control.drift import NOT_MEASURED
from areal_lab.control.events import TrainStepDone
from areal_lab.pipeline.train import resume_run
from areal_lab.runlog.file import read_log_file
from areal_lab.runlog.replay import check_replay, eta_changes
from tests.pipeline.tiny_run import do_run, metrics, tiny_config

BOUND = 0.02
GIVE_UP_S = 120.0


def test_eta_follows_the_measured_drift_also_of_a_run_that_continues(tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path,
        "rollout.schedule=bounded_drift",
        f"rollout.bounded_drift.max_drift={BOUND}",
        "rollout.max_concurrent_rollouts=24",
        "eta=6",
        "total_train_steps=10",
        "save_every_steps=5",
        "actor.optimizer.lr=1e-3",
        "reward.fn=tests.pipeline.rewards:even_digits",
    )
    folder = do_run(config).folder
    log = read_log_file(folder / "events.jsonl")
    etas = [eta for _, eta in eta_changes(log)]
    assert log.header.limits["eta"] == 0
    assert 0 < max(etas) <= 6
    resumed = resume_run(folder, ["total_train_steps=14"]).start()
    assert resumed.wait(GIVE_UP_S)
    log = read_log_file(folder / "events.jsonl")
    assert check_replay(log).agrees
    assert [eta for _, eta in eta_changes(log)][: len(etas)] == etas

    steps = [one for one in log.events if isinstance(one.event, TrainStepDone)]
    of_steps = metrics(folder)
    assert len(steps) == len(of_steps) == resumed.summary["steps"] == 14
    changes = [(0.0, 0.0), *eta_changes(log)]
    beyond = 0
    for step, line in zip(steps, of_steps, strict=True):
        assert step.event.drift == line.get("drift", NOT_MEASURED)
        if step.event.drift > BOUND:  # then eta falls to the lag of this batch, or below
            beyond += 1
            eta = [eta for t_s, eta in changes if t_s <= step.t_s][-1]
            assert eta <= line["lag_head_max"]
    assert beyond, "it learns so fast that a lag of one version exceeds the bound"
