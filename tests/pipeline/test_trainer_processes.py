"""Real runs whose trainer is several processes: the steps of one, and its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_lab.pipeline.train import resume_run
from tests.pipeline.rewards import even_digits
from tests.pipeline.tiny_run import do_run, metrics, tiny_config

SYNCHRONOUS = ("eta=0", "rollout.max_running_requests=1", "evaluation.max_problems=0")
"""Two such runs have the same responses."""
SAVING = ("save_every_steps=1", "checkpoint.resumable=true")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "transfer"), [("d2", "folder"), ("d1t2", "http_tensor"), ("d1c2", "folder")]
)
def test_two_processes_train_as_one_and_one_continues_their_checkpoint(
    tmp_path: Path, sizes: str, transfer: str
) -> None:
    whole, sharded = (
        tiny_config(
            tmp_path,
            *SYNCHRONOUS,
            *SAVING,
            f"rollout.transfer={transfer}",
            f"total_train_steps={steps}",
            f"allocation_mode=embedded:d1+fsdp:{divided}",
        )
        for divided, steps in (("d1", 4), (sizes, 3))
    )
    expected = metrics(do_run(whole, reward_fn=even_digits).folder)
    result = do_run(sharded, reward_fn=even_digits)
    assert sorted(path.name for path in (result.folder / "logs").glob("trainer*")) == [
        "trainer-1.log",
        "trainer.log",
    ]
    changes = ["total_train_steps=4", "allocation_mode=embedded:d1+fsdp:d1"]
    for _ in (resumed := resume_run(result.folder, changes, reward_fn=even_digits)):
        pass
    found = metrics(resumed.folder)
    assert [step["step"] for step in found] == [1, 2, 3, 4]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["reward_mean"] == theirs["reward_mean"]
        for name in ("loss", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6)
