"""A real run, with processes and HTTP, is repeated by co-simulating it along its own log."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_lab.config.load import load_config
from areal_lab.runlog.read_run import read_run
from cosim.load import load_cosim
from cosim.run import run_cosim
from tests.pipeline.tiny_run import do_run

NOT_COMPARED = {"time_s", "step_s", "tokens_per_s", "packed_tokens", "micro_batches"}
ENDS_WITH_THE_STEP = {"ledger_generated_tokens", "ledger_waiting_tokens"}
"""Counted at a moment: a group that ends with the step may be before it in one log and behind it in
the other."""


def test_a_real_run_is_repeated_sample_by_sample(tmp_path: Path) -> None:
    settings = (
        *(f"run_dir={tmp_path}", "total_train_steps=5", "dataset.batch_size=8", "eta=2"),
        *("evaluation.max_problems=0", "plots=false", "actor.dtype=float32"),
        *("actor.threads=1", "rollout.threads=1", "actor.optimizer.lr=2e-3"),
    )
    real = read_run(do_run(load_config("tiny", list(settings))).folder)
    assert max(line["lag_token_max"] for line in real.metrics) >= 1
    config = load_cosim(real.folder / "config.yaml", [f"log={real.folder}", "tokens_per_token=1"])
    repeated = read_run(run_cosim(config).folder)
    assert [one.token_lags for one in repeated.batches] == [one.token_lags for one in real.batches]
    for mine, theirs in zip(repeated.metrics, real.metrics, strict=True):
        common = (mine.keys() & theirs.keys()) - NOT_COMPARED - ENDS_WITH_THE_STEP
        assert {"reward_mean", "trained_tokens", "loss", "grad_norm", "entropy"} <= common
        for name in common:
            assert mine[name] == pytest.approx(theirs[name], abs=1e-3, rel=1e-3), name
    groups = {record.group: record for record in real.log.groups}
    trained = {group for batch in real.batches for group in batch.groups}
    for record in repeated.log.groups:
        if record.group in trained:
            assert record.rewards == groups[record.group].rewards
            assert record.finish_reasons == groups[record.group].finish_reasons
