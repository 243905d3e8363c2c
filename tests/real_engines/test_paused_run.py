"""A whole run that a person pauses, by real servers: nothing is lost, and tokens keep versions."""

from __future__ import annotations

from pathlib import Path

import pytest

import areal_lab
from areal_lab.runlog.summary import run_status
from areal_lab.shell.display import Silent
from benchmarks.tiny_model import write_tiny_model
from tests.pipeline.rewards import even_digits
from tests.pipeline.test_held_run import check_that_nothing_is_lost, wait_until
from tests.pipeline.tiny_run import checkpoints, rescored_difference, tiny_config, trained_samples

pytestmark = pytest.mark.sglang
STEPS, REST_S = 24, 3.0
"""Training steps, enough that the run has not ended when the second pause is asked for, and the
length of a pause."""


@pytest.mark.parametrize(
    ("engine", "pause_mode"),
    [("embedded", "in_place"), ("sglang", "retract"), ("sglang", "abort"), ("vllm", "retract")],
)
def test_a_run_that_is_paused_twice_loses_nothing(
    tmp_path: Path, engine: str, pause_mode: str
) -> None:
    write_tiny_model(tmp_path / "model", initializer_range=0.2, head_size=32)
    config = tiny_config(
        tmp_path,
        f"total_train_steps={STEPS}",
        "eta=3",
        "save_every_steps=1",
        "rollout.max_concurrent_rollouts=8",
        f"rollout.backend={engine}",
        f"rollout.pause_mode={pause_mode}",
    )
    run = areal_lab.train(config, reward_fn=even_digits, display=Silent()).start()
    for step in (1, 4):
        wait_until(run, lambda step=step: run.snapshot().step >= step)  # type: ignore[misc]
        run.pause()
        wait_until(run, lambda: run.snapshot().waiting_for == "a request to resume")
        before = run.snapshot().counts
        assert not run.wait(REST_S)
        after = run.snapshot().counts  # what was generated before the pause may still be scored
        assert before is not None
        assert after is not None
        assert (after.started, after.trained) == (before.started, before.trained)
        assert run.resume() == "the run continues"
    assert run.wait()
    assert run.summary["pauses"] == 2
    assert run.summary["engine_losses"] == 0
    log = areal_lab.read_run(run.folder).log
    assert run_status(log) == "complete"
    check_that_nothing_is_lost(run.folder)
    models = checkpoints(run.folder)
    if pause_mode != "in_place":  # which keeps a cache of older weights
        samples = [sample for trained in trained_samples(run.folder) for sample in trained]
        assert max(rescored_difference(models, sample)[0] for sample in samples) < 1e-3
