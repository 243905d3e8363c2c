"""A trainer that leaves its device between steps: nothing stays there, and nothing changes."""

from __future__ import annotations

import dataclasses
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from areal_lab.training.learner import make_learner
from areal_lab.training.model import load_policy
from areal_lab.training.parallel import shard_policy
from areal_lab.training.process.serve import come_back, leave_device, move
from areal_lab.training.ranks import Ranks
from areal_lab.training.step import train_batch
from tests.training.tiny import learner_for, random_batch, save_model, settings_for
from tests.warm import run_forked

EVERYTHING: dict[str, Any] = {
    "advantage": "gae", "kl_ctl": 0.1, "kl_loss_coef": 0.1, "max_tokens_per_mb": 30
}  # fmt: skip
"""A critic, and a reference that is a model of its own."""


def held(learner: Any) -> list[Any]:
    """Every tensor of a learner that a step changes or reads."""
    modules = [learner.policy, learner.critic.values, learner.reference.policy]
    modules += [] if learner.teacher is None else [learner.teacher.policy]
    optimizers = [learner.optimizer.adamw, learner.critic.optimizer.adamw]
    return [
        *(value for module in modules for value in module.parameters()),
        *(value for module in modules for value in module.buffers()),
        *(p.grad for module in modules for p in module.parameters() if p.grad is not None),
        *(
            value
            for optimizer in optimizers
            for state in optimizer.state.values()
            for value in state.values()
        ),
    ]


def main(folder: Path) -> None:
    """Two steps with a turn of the engines between them, on the pretend device."""
    from tests.training import pretend

    device = pretend.register()
    path, other = (save_model(folder / name, seed=seed) for seed, name in enumerate("ab"))
    more = {"teacher.path": str(other)}
    settings = dataclasses.replace(settings_for(path, more=more, **EVERYTHING), device=str(device))
    stays = learner_for(path, more=more, **EVERYTHING)
    expected = [train_batch(stays, random_batch(seed)).metrics for seed in (0, 1)]
    with pretend.PretendMode():
        learner = make_learner(load_policy(path, device=str(device)), settings)
        assert all(isinstance(value.data, pretend.PretendTensor) for value in held(learner))
        leave_device(learner)  # before the first step, as at the start of a run
        for seed, metrics in enumerate(expected):
            come_back(learner)
            parameters = {id(p) for group in learner.optimizer.adamw.param_groups
                          for p in group["params"]}  # fmt: skip
            assert parameters == {id(p) for p in learner.model.parameters()}
            found = train_batch(learner, random_batch(seed)).metrics
            for name in ("loss", "grad_norm", "critic_loss"):
                assert abs(found[name] - metrics[name]) <= 1e-5 * abs(metrics[name]) + 1e-6, name
            leave_device(learner)
            assert not any(isinstance(value.data, pretend.PretendTensor) for value in held(learner))
            assert all(p.grad is None for p in learner.model.parameters())
    for ours, theirs in zip(learner.model.parameters(), stays.model.parameters(), strict=True):
        torch.testing.assert_close(ours.data, theirs.data)


def test_nothing_stays_on_the_device_and_steps_continue_as_if_nothing_had_moved(
    tmp_path: Path,
) -> None:
    ended = run_forked(
        [sys.executable, "-m", "tests.training.test_offload", str(tmp_path)],
        cwd=Path(__file__).parents[2],
    )
    assert ended.returncode == 0, ended.stderr[-3000:]


def test_shards_move_and_stay_the_parameters_that_the_optimizer_knows(tmp_path: Path) -> None:
    """In one process: a group that only pretends to communicate, a device without values."""
    path = save_model(tmp_path / "model")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shards",))
        ranks = Ranks(shard=partial(shard_policy, mesh=mesh))
        learner = make_learner(load_policy(path), settings_for(path, **EVERYTHING), ranks)
        known = [p for group in learner.optimizer.adamw.param_groups for p in group["params"]]
        move(learner, torch.device("meta"))
        assert {id(p) for p in known} == {id(p) for p in learner.model.parameters()}
        for value in held(learner):
            there = value.to_local() if isinstance(value, DTensor) else value
            assert there.device.type == "meta"
        assert any(isinstance(value, DTensor) for value in held(learner))
    finally:
        dist.destroy_process_group()


def test_on_a_cpu_nothing_moves_and_gradients_are_given_back(tmp_path: Path) -> None:
    path = save_model(tmp_path / "model")
    turns, stays = (learner_for(path, **EVERYTHING) for _ in range(2))
    for seed in (0, 1):
        come_back(turns)
        for learner in (turns, stays):
            train_batch(learner, random_batch(seed))
        before = [value.data_ptr() for value in turns.model.parameters()]
        leave_device(turns)
        assert [value.data_ptr() for value in turns.model.parameters()] == before
        assert all(value.grad is None for value in turns.model.parameters())
    for ours, theirs in zip(turns.model.parameters(), stays.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
