"""A run attached to a server of another machine, which sees none of its folders."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from areal_lab.engines.launch import launch_engine
from areal_lab.engines.weights import write_weights
from tests.fault_lab.stand_in import load_model
from tests.pipeline.rewards import even_digits
from tests.pipeline.tiny_run import RunResult, do_run, tiny_config

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize("transfer", ["http_tensor", "distributed"])
def test_all_weights_are_sent_the_first_ones_too(tmp_path: Path, transfer: str) -> None:
    model_path = Path(tiny_config(tmp_path).actor.path)
    theirs = write_weights(load_model(model_path), tmp_path / "theirs", 7, dtype=torch.float32)

    async def scenario() -> tuple[RunResult, str]:
        engine = await launch_engine(
            "embedded",
            index=0,
            weights=theirs,
            port=0,
            threads=1,
            dtype="float32",
            max_running_requests=16,
            context_length=None,
            log_path=tmp_path / "engine.log",
        )
        try:
            config = tiny_config(
                tmp_path,
                f'rollout.addresses=["{engine.base_url}"]',
                f"rollout.transfer={transfer}",
                "total_train_steps=3",
            )
            result = await asyncio.to_thread(do_run, config, reward_fn=even_digits)
            return result, (await engine.client.info())["model_path"]
        finally:
            await engine.stop()

    result, loaded = asyncio.run(scenario())
    assert loaded == str(theirs.path), "it has read a folder of the run"
    assert result.summary["status"] == "complete"
    assert result.summary["version_mismatches"] == 0
    assert result.summary["backend"] == "embedded"
    assert not list(result.folder.glob("weights/*"))
