"""Engines and trainer in turns on the same devices: real runs."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from random import Random
from typing import Any

import pytest

import areal_lab
from areal_lab.pipeline.run import RunResult
from areal_lab.pipeline.state import RunState
from areal_lab.runlog.activity import TRAINERS_TURN, activity
from areal_lab.runlog.file import read_log_file
from areal_lab.shell.step_report import StepReport
from tests.pipeline.rewards import even_digits
from tests.pipeline.test_held_run import check_that_nothing_is_lost, wait_until
from tests.pipeline.tiny_run import do_run, long_tail, metrics, tiny_config, trained_samples

STEPS = 3
SYNCHRONOUS = (
    f"total_train_steps={STEPS}",
    "rollout.schedule=synchronous",
    "rollout.max_engine_restarts=1",
)
SHARED, APART = "allocation_mode='embedded:d1|fsdp:d1'", "allocation_mode=embedded:d1+fsdp:d1"


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """The synchronous run without shared devices."""
    config = tiny_config(tmp_path_factory.mktemp("apart"), *SYNCHRONOUS, APART)
    return do_run(config, reward_fn=even_digits)


def tokens_of(folder: Path) -> list[list[Any]]:
    return [
        [(s["group"], s["sample"], [(p["version"], p["tokens"]) for p in s["parts"]]) for s in step]
        for step in trained_samples(folder)
    ]


def assert_trains_alike(ours: RunResult, theirs: RunResult) -> None:
    assert tokens_of(ours.folder) == tokens_of(theirs.folder)
    for name in ("loss", "grad_norm"):
        found, expected = ([line[name] for line in metrics(run.folder)] for run in (ours, theirs))
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert min(map(abs, found)) > 0.01
    for when in ("reward_before", "reward_after"):
        assert ours.summary[when] == theirs.summary[when]


def test_turns_train_what_separate_devices_train(tmp_path: Path, apart: RunResult) -> None:
    shared = do_run(tiny_config(tmp_path, *SYNCHRONOUS, SHARED), reward_fn=even_digits)
    assert_trains_alike(shared, apart)
    log = read_log_file(shared.folder / "events.jsonl")
    used = activity(log)
    turns = [(s.start_s, s.end_s) for s in used["engine 0"] if s.name == TRAINERS_TURN]
    trained = [s for s in used["trainer"] if s.busy and s.name == "forward/backward"]
    assert len(trained) == STEPS
    for step in trained:
        assert any(start <= step.start_s and step.end_s <= end for start, end in turns)
    working = [s for s in used["engine 0"] if s.busy and s.name in ("prefill", "decode")]
    assert not any(
        start < work.end_s and work.start_s < end for work in working for start, end in turns
    )
    assert not any(
        s.name == TRAINERS_TURN
        for s in activity(read_log_file(apart.folder / "events.jsonl"))["engine 0"]
    )


def test_an_engine_that_dies_in_the_trainers_turn_returns_with_the_new_weights(
    tmp_path: Path, apart: RunResult
) -> None:
    state = RunState()

    def kill(report: StepReport) -> None:
        if report.step != 1:
            return
        assert state.performer is not None
        (server,) = state.performer.servers.alive.values()
        assert server.released, "a step is reported in the trainer's turn"
        assert server.child is not None
        os.kill(server.child.pid, signal.SIGKILL)

    config = tiny_config(tmp_path, *SYNCHRONOUS, SHARED)
    shared = do_run(config, reward_fn=even_digits, on_step=kill, state=state)
    assert (shared.summary["engine_losses"], shared.summary["engine_restarts"]) == (1, 1)
    assert_trains_alike(shared, apart)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["synchronous", "partial_rollout"])
def test_pauses_by_hand_between_turns_and_within_them_lose_nothing(
    tmp_path: Path, schedule: str
) -> None:
    config = tiny_config(
        tmp_path,
        "total_train_steps=100000",
        f"rollout.schedule={schedule}",
        "rollout.max_concurrent_rollouts=6",
        "evaluation.max_problems=0",
        "save_every_steps=3",
        "checkpoint.asynchronous=true",
        SHARED,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "engines that share devices")  # partial_rollout says so
        run = areal_lab.train(config, reward_fn=even_digits)
    run.start()
    random = Random(1)
    for _ in range(8):
        step = run.snapshot().step + random.randint(0, 2)
        wait_until(run, lambda step=step: run.snapshot().step >= step)  # type: ignore[misc]
        run.pause()
        wait_until(run, lambda: run.snapshot().waiting_for == "a request to resume")
        run.resume()
    step = run.snapshot().step + 3
    wait_until(run, lambda: run.snapshot().step >= step)
    run.stop()
    run.wait()
    check_that_nothing_is_lost(run.folder)
    assert (run.summary["engine_losses"], run.summary["pauses"]) == (0, 8)


def test_responses_that_a_turn_interrupts_continue_under_the_new_weights(tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path,
        "total_train_steps=4",
        "rollout.schedule=partial_rollout",
        "rollout.max_concurrent_rollouts=6",
        "evaluation.max_problems=0",
        "allocation_mode='embedded:d2|fsdp:d2'",
    )
    result = do_run(config, response_tokens=long_tail, reward_fn=even_digits)
    assert result.summary["interruptions"] > 0
    assert result.summary["multi_version_share"] > 0
    assert result.summary["engine_losses"] == 0
    assert len(metrics(result.folder)) == 4
