"""A learner that is saved and loaded continues bit by bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from areal_lab.training.checkpoint import (
    UnusableState,
    load_state,
    seed_step,
    state_of_learner,
    write_state,
)
from areal_lab.training.learner import Learner, make_learner
from areal_lab.training.lora import add_lora, target_modules
from areal_lab.training.model import load_policy
from areal_lab.training.ranks import ALONE
from areal_lab.training.step import train_batch
from tests.training.tiny import learner_for, parameters, random_batch, save_model, settings_for

SCHEDULE: dict[str, Any] = {
    "actor.optimizer.lr_scheduler_type": "cosine",
    "actor.optimizer.warmup_steps": 2,
    "actor.optimizer.weight_decay": 0.1,
    "total_train_steps": 6,
}


def steps(learner: Learner, *seeds: int) -> list[dict[str, float]]:
    found = [train_batch(learner, random_batch(seed)).metrics for seed in seeds]
    return [{k: v for k, v in one.items() if not k.endswith(("_s", "_bytes"))} for one in found]


@pytest.mark.parametrize("tied", [True, False])
def test_training_continues_bit_by_bit(tmp_path: Path, tied: bool) -> None:
    model = save_model(tmp_path / "model", tied=tied)
    whole, first = (learner_for(model, more=SCHEDULE) for _ in range(2))
    expected = steps(whole, 0, 1, 2, 3, 4)
    before = steps(first, 0, 1)
    write_state(state_of_learner(first), tmp_path / "state", ALONE)
    second = learner_for(model, more=SCHEDULE)
    load_state(second, tmp_path / "state")
    assert before + steps(second, 2, 3, 4) == expected
    for name, value in parameters(whole.model).items():
        assert torch.equal(value, parameters(second.model)[name]), name


def test_adapters_continue_on_the_frozen_model_of_the_folder(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")

    def learner() -> Learner:
        policy = load_policy(model)
        torch.manual_seed(1)
        add_lora(policy, rank=2, alpha=4, targets=target_modules(policy, ["all-linear"]))
        return make_learner(policy, settings_for(model, more=SCHEDULE))

    whole, first = learner(), learner()
    expected = steps(whole, 0, 1, 2)
    steps(first, 0, 1)
    write_state(state_of_learner(first), tmp_path / "state", ALONE)
    torch.manual_seed(2)
    second = learner()
    load_state(second, tmp_path / "state")
    assert steps(second, 2) == expected[2:]
    saved = FileSystemReader(tmp_path / "state").read_metadata().state_dict_metadata
    frozen = {name for name, p in first.model.named_parameters() if not p.requires_grad}
    assert len(frozen) > 10
    assert not {f"model.{name}" for name in frozen} & saved.keys()


def test_a_state_that_does_not_fit_is_refused_in_one_line(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    learner = learner_for(model)
    with pytest.raises(UnusableState, match="cannot continue from"):
        load_state(learner, tmp_path / "nowhere")
    steps(learner, 0)
    write_state(state_of_learner(learner), tmp_path / "state", ALONE)
    untied = learner_for(save_model(tmp_path / "other", tied=False))
    with pytest.raises(UnusableState, match=r"cannot continue from .*state"):
        load_state(untied, tmp_path / "state")
    (part,) = (tmp_path / "state").glob("*.distcp")
    os.truncate(part, 100)
    with pytest.raises(UnusableState, match=r"cannot continue from .*state: \w"):
        load_state(learner_for(model), tmp_path / "state")
    (tmp_path / "state" / ".metadata").unlink()
    with pytest.raises(UnusableState):
        load_state(learner_for(model), tmp_path / "state")


def test_a_state_that_cannot_be_written_is_an_ordinary_error(tmp_path: Path) -> None:
    learner = learner_for(save_model(tmp_path / "model"))
    steps(learner, 0)
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(OSError, match=r"cannot write .*file.state: .*Not a directory"):
        write_state(state_of_learner(learner), tmp_path / "file" / "state", ALONE)


def test_the_numbers_of_a_step_depend_on_seed_and_version() -> None:
    def draw(seed: int, version: int) -> float:
        seed_step(seed, version)
        return float(torch.rand(()))

    assert draw(1, 4) == draw(1, 4)
    assert len({draw(1, 4), draw(1, 5), draw(2, 4)}) == 3
