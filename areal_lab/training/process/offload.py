"""Leave the device to engines that take turns on it, and come back.

    on the device --leave--> in main memory --come_back--> on the device
      weights, gradients, moments, frozen models                 (gradients are dropped)

On a CPU nothing moves: gradients and freed memory are given back.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from areal_lab.host.memory import return_freed_memory
from areal_lab.training.critic import Critic
from areal_lab.training.learner import Learner
from areal_lab.training.optimizer import Optimizer


def leave_device(learner: Learner) -> None:
    """Free the memory that the learner has on its device; it can be exported and saved meanwhile.

    With several ranks, each of them calls this.
    """
    for optimizer in _optimizers(learner):
        optimizer.zero_grad()
    if _moves(learner):
        move(learner, torch.device("cpu"))
    if learner.device.type == "cuda":
        torch.cuda.empty_cache()
    return_freed_memory()


def come_back(learner: Learner) -> None:
    """Inverse of `leave_device`, before a step."""
    if _moves(learner):
        move(learner, learner.device)


def _moves(learner: Learner) -> bool:
    # With `actor.offload` shards move by themselves, layer by layer, and belong to main memory.
    return learner.device.type != "cpu" and not learner.settings.actor.offload


def move(learner: Learner, to: torch.device) -> None:
    """Move weights and moments; parameters stay the objects that optimizer and shards know."""
    for module in _modules(learner):
        module.to(to)
    for optimizer in _optimizers(learner):
        for state in optimizer.adamw.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = value.to(to)


def _modules(learner: Learner) -> Iterator[nn.Module]:
    yield learner.policy
    if isinstance(learner.critic, Critic):
        yield learner.critic.values
    for frozen in (learner.reference, learner.teacher):
        if frozen is not None and frozen.policy is not learner.policy:
            yield frozen.policy


def _optimizers(learner: Learner) -> Iterator[Optimizer]:
    yield learner.optimizer
    if isinstance(learner.critic, Critic):
        yield learner.critic.optimizer
