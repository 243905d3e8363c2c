"""A run attached to a server: of another machine, which sees none of its folders, or for adapters.

Each server begins with other weights than the run's.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from areal_lab.engines.keys import KEY_VARIABLE
from areal_lab.engines.launch.backends import ServerOptions
from areal_lab.engines.launch.start import EngineProcess, launch_engine
from areal_lab.engines.protocol import LoraShape, WeightsFolder
from areal_lab.engines.weights.folder import write_weights
from areal_lab.engines.weights.verify_folder import linear_layers
from benchmarks.tiny_model import write_tiny_model
from tests.fault_lab.stand_in import load_model
from tests.pipeline.rewards import even_digits
from tests.pipeline.tiny_run import (
    RunResult,
    checkpoints,
    do_run,
    rescored_difference,
    tiny_config,
    trained_samples,
)

pytestmark = pytest.mark.sglang
KEY = "of-the-attached-server"


@pytest.fixture(autouse=True)
def key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a run looks for it."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)


def assert_key_is_not_written(folder: Path) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert "config.yaml" in [path.name for path in files]
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


async def started(engine: str, weights: WeightsFolder, folder: Path) -> EngineProcess:
    """A server that the run did not start."""
    return await launch_engine(
        engine,
        ServerOptions(
            model=weights.path,
            version=str(weights.version),
            lora=weights.adapter,
            max_running_requests=16,
        ),
        log_path=folder / "engine.log",
        key=KEY,
    )


@pytest.mark.parametrize("transfer", ["http_tensor", "distributed"])
def test_all_weights_are_sent_the_first_ones_too(tmp_path: Path, transfer: str) -> None:
    model_path = Path(tiny_config(tmp_path).actor.path)
    theirs = write_weights(load_model(model_path), tmp_path / "theirs", 7, dtype=torch.float32)

    async def scenario() -> tuple[RunResult, str]:
        engine = await started("embedded", theirs, tmp_path)
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
    assert_key_is_not_written(result.folder)
    assert loaded == str(theirs.path), "it has read a folder of the run"
    assert result.summary["status"] == "complete"
    assert result.summary["version_mismatches"] == 0
    assert result.summary["backend"] == "embedded"
    assert not list(result.folder.glob("weights/*"))


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_adapters_are_to_the_weights_of_the_run(tmp_path: Path, engine: str) -> None:
    for seed, name in enumerate(("model", "other")):
        write_tiny_model(tmp_path / name, seed=seed, initializer_range=0.2, head_size=32)
    theirs = WeightsFolder(
        path=tmp_path / "other",
        version=7,
        checksum="",
        size_bytes=0,
        adapter=LoraShape(rank=8, target_modules=tuple(linear_layers(tmp_path / "model"))),
    )

    async def scenario() -> RunResult:
        server = await started(engine, theirs, tmp_path)
        try:
            config = tiny_config(
                tmp_path,
                f'rollout.addresses=["{server.base_url}"]',
                "rollout.transfer=adapter",
                "rollout.pause_mode=abort",
                "actor.use_lora=true",
                "actor.lora_rank=4",
                "actor.optimizer.lr=5e-3",
                "save_every_steps=1",
                "total_train_steps=3",
            )
            return await asyncio.to_thread(do_run, config, reward_fn=even_digits)
        finally:
            await server.stop()

    result = asyncio.run(scenario())
    assert_key_is_not_written(result.folder)
    assert result.summary["status"] == "complete"
    assert result.summary["version_mismatches"] == 0
    assert result.summary["backend"] == engine
    models = checkpoints(result.folder)
    samples = [sample for step in trained_samples(result.folder) for sample in step]
    assert max(rescored_difference(models, sample)[0] for sample in samples) < 1e-4
