"""Real runs whose trainer is several processes: the steps of one, and its checkpoint."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from areal_lab.control.events import Train
from areal_lab.host.processes import ChildDied
from areal_lab.pipeline.state import RunState
from areal_lab.pipeline.train import resume_run
from areal_lab.runlog.file import read_log_file
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


def test_a_rank_that_dies_while_nothing_is_trained_ends_the_run_at_once(tmp_path: Path) -> None:
    """No step would ever ask it again: the engine is stopped, too."""
    state = RunState()

    def kill(group: int, sample: int) -> int:
        if (group, sample) == (3, 0):  # of the second batch, before whose end nothing is trained
            pid = {child.name: child.pid for child in state.children}
            os.kill(pid["engine 0"], signal.SIGSTOP)
            os.kill(pid["trainer rank 1"], signal.SIGKILL)
        return 4

    config = tiny_config(
        tmp_path,
        *SYNCHRONOUS,
        "rollout.health_timeout_s=600",
        "total_train_steps=3",
        "allocation_mode=embedded:d1+fsdp:d2",
    )
    with pytest.raises(ChildDied, match=r"trainer rank 1 .* was killed by SIGKILL"):
        do_run(config, response_tokens=kill, state=state, reward_fn=even_digits)
    assert all(child.process.returncode is not None for child in state.children)
    (folder,) = (tmp_path / "runs").iterdir()
    assert "trainer rank 1" in json.loads((folder / "summary.json").read_text())["error"]
    log = read_log_file(folder / "events.jsonl")
    trained = [record.action for record in log.actions if isinstance(record.action, Train)]
    assert [train.version for train in trained] == [0]
