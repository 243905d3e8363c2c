"""A whole run, by every engine and way of transfer: each token is of the version it names."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from areal_lab.pipeline.state import RunState
from areal_lab.shell.step_report import StepReport
from benchmarks.tiny_model import write_tiny_model
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
LORA = ("actor.use_lora=true", "actor.lora_rank=8", "actor.optimizer.lr=5e-3")

REFUSED = re.compile(r"\"(\w+ [^ ]+) HTTP/[\d.]+\" (?!503|401)[45]\d\d")
"""In a server's log; 503 is how one that loads or pauses says that it is not ready, and 401 what a
request without the key gets, which the start of a server tries."""


@pytest.mark.parametrize(
    ("engine", "transfer", "pause_mode"),
    [
        ("embedded", "http_tensor", "retract"),
        ("embedded", "distributed", "abort"),
        ("sglang", "folder", "retract"),
        ("sglang", "http_tensor", "abort"),
        ("vllm", "folder", "retract"),
        ("sglang", "adapter", "abort"),
        ("vllm", "adapter", "abort"),
    ],
)
def test_each_segment_is_reproduced_by_the_checkpoint_of_its_version(
    tmp_path: Path, engine: str, transfer: str, pause_mode: str
) -> None:
    write_tiny_model(tmp_path / "model", initializer_range=0.2, head_size=32)
    config = tiny_config(
        tmp_path,
        f"total_train_steps={STEPS}",
        "eta=3",
        "save_every_steps=1",
        "rollout.max_concurrent_rollouts=8",
        f"rollout.backend={engine}",
        f"rollout.transfer={transfer}",
        f"rollout.pause_mode={pause_mode}",
        *(LORA if transfer == "adapter" else ()),
    )
    result = do_run(config, response_tokens=long_tail, reward_fn=even_digits)
    folder, summary = result.folder, result.summary
    assert summary["status"] == "complete"
    assert summary["backend"] == engine
    assert summary["version_mismatches"] == 0
    # Whatever a server refuses costs the time in which it might turn out to be dying.
    assert not REFUSED.findall((folder / "logs" / "engine-0.log").read_text())
    models = checkpoints(folder)
    samples = [sample for step in trained_samples(folder) for sample in step]
    rescored = [rescored_difference(models, s) for s in samples if len(s["parts"]) > 1]
    assert max(right for right, _ in rescored) < 1e-4
    assert max(of_the_next for _, of_the_next in rescored) > 1e-3
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    sent = [event for event in events if event.get("name") == "push weights"]
    assert len(sent) >= (STEPS - 1 if transfer in ("http_tensor", "distributed") else 0)
    assert not [one for one in Path("/dev/shm").glob("torch_*") if not owner_lives(one)]


def owner_lives(segment: Path) -> bool:
    """Whether the process that made a segment of torch's still runs; its id is in the name."""
    return Path("/proc", segment.name.split("_")[1]).exists()


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_server_that_is_started_again_gets_the_adapter_of_the_others(
    tmp_path: Path, engine: str
) -> None:
    """It starts with the model folder's weights, which are not a current version of the run."""
    write_tiny_model(tmp_path / "model", initializer_range=0.2, head_size=32)
    config = tiny_config(
        tmp_path,
        "total_train_steps=4",
        "eta=3",
        "save_every_steps=1",
        f"rollout.backend={engine}",
        "rollout.transfer=adapter",
        "rollout.pause_mode=abort",
        "rollout.max_engine_restarts=1",
        *LORA,
    )
    state = RunState()

    def on_step(report: StepReport) -> None:
        if report.step == 2:
            (victim,) = (child for child in state.children if child.name.startswith("engine"))
            os.killpg(victim.pid, signal.SIGKILL)

    result = do_run(
        config, on_step=on_step, response_tokens=long_tail, reward_fn=even_digits, state=state
    )
    summary = result.summary
    assert summary["status"] == "complete"
    assert (summary["engine_losses"], summary["engine_restarts"]) == (1, 1)
    assert summary["version_mismatches"] == 0
    models = checkpoints(result.folder)
    steps = trained_samples(result.folder)
    seen = [(sample["group"], sample["sample"]) for step in steps for sample in step]
    assert len(seen) == len(set(seen)) == 4 * 3 * 4
    assert max(rescored_difference(models, s)[0] for step in steps for s in step) < 1e-4
