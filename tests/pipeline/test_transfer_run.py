"""A whole run whose weights never lie in a folder: every token is from the version it names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_lab.preflight import ConfigError, check_transfer
from tests.pipeline.test_run import STEPS, long_tail, rescored_difference
from tests.pipeline.tiny_run import do_run, even_digits, tiny_config, trained_samples


@pytest.mark.parametrize("transfer", ["http_tensor", "distributed"])
def test_each_segment_is_reproduced_by_the_checkpoint_of_its_version(
    tmp_path: Path, transfer: str
) -> None:
    config = tiny_config(
        tmp_path,
        f"total_train_steps={STEPS}",
        "eta=3",
        "save_every_steps=1",
        "rollout.max_concurrent_rollouts=8",
        f"rollout.transfer={transfer}",
    )
    result = do_run(config, answer_tokens=long_tail, reward_fn=even_digits)
    folder, summary = result.folder, result.summary
    assert summary["status"] == "complete"
    assert summary["version_mismatches"] == 0
    models = {
        version: AutoModelForCausalLM.from_pretrained(
            folder / "checkpoints" / f"step-{version:05d}", dtype=torch.float32
        )
        for version in range(1, STEPS + 1)
    }
    models[0] = AutoModelForCausalLM.from_pretrained(config.actor.path, dtype=torch.float32)
    samples = [sample for step in trained_samples(folder) for sample in step]
    rescored = [rescored_difference(models, s) for s in samples if len(s["parts"]) > 1]
    assert max(right for right, _ in rescored) < 1e-4
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    pushes = [event for event in events if event.get("name") == "push weights"]
    assert len(pushes) >= STEPS - 1
    assert not [one for one in Path("/dev/shm").glob("torch_*") if not owner_lives(one)]


def owner_lives(segment: Path) -> bool:
    """Whether the process that made a segment of torch's still runs; its id is in the name."""
    return Path("/proc", segment.name.split("_")[1]).exists()


def test_an_engine_that_cannot_take_weights_that_way_is_refused(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "rollout.backend=vllm", "rollout.transfer=distributed")
    with pytest.raises(ConfigError) as raised:
        check_transfer(config)
    assert str(raised.value) == (
        "rollout.transfer is 'distributed', but vllm takes weights by folder only: vLLM's own "
        "weight transfer engines (nccl, ipc) need a GPU; set rollout.transfer=folder"
    )
