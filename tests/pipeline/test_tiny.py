"""The shipped run for comparing losses: real processes, seconds, less than 1 GB."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_lab.config.load import load_config
from tests.pipeline.tiny_run import do_run, metrics

GB = 1_000_000_000


def test_a_tiny_run_starts_below_its_ceiling_and_has_something_to_learn(tmp_path: Path) -> None:
    few = ["total_train_steps=2", "evaluation.max_problems=16", "plots=false"]
    result = do_run(load_config("tiny", [f"run_dir={tmp_path}", *few]))
    assert result.summary["status"] == "complete"
    for step in metrics(result.folder):
        assert 0.15 < step["reward_mean"] < 0.6
        assert step["zero_advantage_samples"] < 64  # of 128
        assert step["grad_norm"] > 0


@pytest.mark.slow
def test_a_tiny_run_learns_within_its_memory(tmp_path: Path) -> None:
    result = do_run(load_config("tiny", [f"run_dir={tmp_path}"]))
    summary = result.summary
    assert summary["reward_before"]["mean"] < 0.45
    assert summary["reward_after"]["mean"] > summary["reward_before"]["mean"] + 0.15
    assert summary["lag"]["token"]["mean"] > 1
    # The pipeline's share is small; this process has the tests' imports on top.
    assert sum(summary["peak_bytes"].values()) + 0.1 * GB < GB
