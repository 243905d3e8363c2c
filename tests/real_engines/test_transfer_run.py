"""A whole run whose weights never lie in a folder: every token is from the version it names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.pipeline.rewards import even_digits
from tests.pipeline.tiny_run import (
    checkpoints,
    do_run,
    long_tail,
    rescored_difference,
    tiny_config,
    trained_samples,
)

pytestmark = pytest.mark.sglang
STEPS = 6


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
    models = checkpoints(folder)
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
