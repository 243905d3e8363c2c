"""Trainer's state in a checkpoint: trained parameters, optimizer and schedule of policy and critic.

    Learner --state_of_learner, write_state--> STEP/trainer/ --load_state--> Learner
                                             (torch.distributed.checkpoint)

The format stores whole tensors, so another number of ranks can read it. Frozen parameters are those
of the model folder and are not saved. No random state is saved: the random numbers of a step depend
on the run's seed and the version (`seed_step`).
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import PreTrainedModel

from areal_lab.control.events import Version
from areal_lab.host.durable import disk_error
from areal_lab.training.critic import Critic
from areal_lab.training.learner import Learner
from areal_lab.training.optimizer import Optimizer
from areal_lab.training.ranks import Ranks


class UnusableState(RuntimeError):
    """A saved state is missing, incomplete, or of another model or optimizer; in one line."""


def load_state(learner: Learner, folder: Path) -> None:
    """Give a new learner the saved state; training continues bit by bit at equal ranks."""
    state = state_of_learner(learner)
    read_state(state, folder, learner.ranks)
    set_state(learner.model, learner.optimizer, state)
    if isinstance(learner.critic, Critic):
        set_state(learner.critic.values.model, learner.critic.optimizer, state["critic"])
    if learner.kl_reward is not None:
        learner.kl_reward.coefficient = state["kl_coefficient"]
    if learner.dual is not None:
        learner.dual.value = state["dual_variable"]


def seed_step(seed: int, version: Version) -> None:
    """Seed the random numbers of one step."""
    torch.manual_seed(random.Random(f"{seed}/step/{version}").getrandbits(63))


def state_of_learner(learner: Learner) -> dict[str, Any]:
    """State to save of a learner, without copying tensors; a collective call of all ranks."""
    state = state_of(learner.model, learner.optimizer)
    if isinstance(learner.critic, Critic):
        state["critic"] = state_of(learner.critic.values.model, learner.critic.optimizer)
    if learner.kl_reward is not None:
        state["kl_coefficient"] = learner.kl_reward.coefficient
    if learner.dual is not None:
        state["dual_variable"] = learner.dual.value
    return state


def state_of(model: PreTrainedModel, optimizer: Optimizer) -> dict[str, Any]:
    """Trained parameters, moments and schedule of one model; sharded ones stay sharded."""
    parameters, moments = get_state_dict(model, optimizer.adamw)
    # `named_parameters` has tied parameters once.
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    state = {
        "model": {name: value for name, value in parameters.items() if name in trained},
        "optimizer": moments,
        "schedule": optimizer.schedule.state_dict(),
    }
    if optimizer.alignment is not None:
        state["previous_gradient"] = dict(optimizer.alignment.previous)
    return state


def set_state(model: PreTrainedModel, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Inverse of `state_of`."""
    set_state_dict(
        model,
        optimizer.adamw,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(strict=False),  # without frozen and tied parameters
    )
    optimizer.schedule.load_state_dict(state["schedule"])
    if optimizer.alignment is not None:
        for name, gradient in optimizer.alignment.previous.items():
            gradient.copy_(state["previous_gradient"][name])


def write_state(
    state: dict[str, Any], folder: Path, ranks: Ranks, group: ProcessGroup | None = None
) -> None:
    """Write a state into a new folder; a collective call where there are several ranks.

    Args:
        group: in which they agree; the default one if None.
    """
    try:
        with _single_process():
            save(
                state,
                checkpoint_id=str(folder),
                no_dist=ranks.count == 1,
                process_group=group,
            )
    except CheckpointException as error:  # which is no Exception
        reason = _reason(error)
        raise disk_error(reason, folder) from error


def read_state(state: dict[str, Any], folder: Path, ranks: Ranks) -> None:
    """Replace the values of a state by those of a folder, in place.

    Raises:
        UnusableState: if the folder has no complete state, or one of another model.
    """
    try:
        with _single_process():
            load(state, checkpoint_id=str(folder), no_dist=ranks.count == 1)
    except (OSError, ValueError, RuntimeError, CheckpointException) as error:
        raise UnusableState(
            f"cannot continue from {folder}: {_reason(error)}; remove {folder.parent} to continue "
            "from the checkpoint before it"
        ) from error


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        failures = [wrapped[0] for wrapped in error.failures.values()]
        error = failures[0] if failures else error
    return str(error).strip().split("\n", 1)[0] or f"it is cut off ({type(error).__name__})"


@contextmanager
def _single_process() -> Iterator[None]:
    """Without a process group, which one process does not need, the library warns each time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or")
        yield
