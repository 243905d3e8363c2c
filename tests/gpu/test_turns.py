"""A whole run whose engine and trainer take turns on one device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from areal_lab.runlog.file import read_log_file
from tests.pipeline.rewards import even_digits
from tests.pipeline.tiny_run import do_run, metrics, tiny_config


def test_engine_and_trainer_take_turns_on_one_device(device: torch.device, tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path,
        "total_train_steps=2",
        "rollout.schedule=synchronous",
        "allocation_mode='embedded:d1|fsdp:d1'",
        "evaluation.max_problems=0",
        f"actor.device={device.type}",
        f"rollout.device={device.type}",
    )
    result = do_run(config, reward_fn=even_digits)
    steps = metrics(result.folder)
    assert len(steps) == 2
    assert all(step["sampler_gap_mean"] < 1e-3 for step in steps)
    assert all(step["grad_norm"] > 0 for step in steps)
    names = {span.name for span in read_log_file(result.folder / "events.jsonl").spans}
    assert {"onload", "offload"} <= names
    assert result.summary["version_mismatches"] == 0


@pytest.mark.gpu
def test_a_gpu_is_found() -> None:
    """The first of the tests to fail without a driver, in one line."""
    assert torch.cuda.is_available(), "torch finds no GPU with a driver"
