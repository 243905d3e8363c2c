"""A policy with its optimizer and loss: all that a step changes or asks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from areal_lab.data.prefix_tree import ForwardCost
from areal_lab.models.dtypes import compute_dtype
from areal_lab.training.forward import PackedPolicy
from areal_lab.training.model import forward_cost
from areal_lab.training.objective.loss import (
    Advantages,
    ChosenLoss,
    choose_advantages,
    choose_loss,
)
from areal_lab.training.optimizer import Optimizer, make_optimizer
from areal_lab.training.ranks import Ranks
from areal_lab.training.reference import Reference, make_reference
from areal_lab.training.settings import TrainerSettings


@dataclass(frozen=True, slots=True)
class Learner:
    """A policy with its optimizer and loss."""

    policy: PackedPolicy
    """The module that is called; it contains the model."""
    optimizer: Optimizer
    loss: ChosenLoss
    advantages: Advantages
    settings: TrainerSettings
    dtype: torch.dtype
    cost: ForwardCost
    reference: Reference | None = None
    """None without a penalty on the distance from it."""
    ranks: Ranks = field(default_factory=Ranks)

    @property
    def model(self) -> PreTrainedModel:
        """The policy as a model of transformers."""
        return self.policy.model

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return torch.device(self.settings.device)


def make_learner(
    model: PreTrainedModel, settings: TrainerSettings, ranks: Ranks | None = None
) -> Learner:
    """Create the optimizer and loss of a model.

    Args:
        model: from `load_policy`, whole; `ranks` shard it.
        settings: of the trainer.
        ranks: the processes that train together; this one alone by default.
    """
    ranks = ranks or Ranks()
    dtype = compute_dtype(settings.actor.dtype, settings.device)
    cost = forward_cost(model)
    policy = PackedPolicy(
        model,
        temperature=settings.temperature,
        dtype=dtype,
        entropy_gradient=settings.actor.entropy_coeff != 0,
    )
    ranks.shard(policy)
    return Learner(
        policy=policy,
        optimizer=make_optimizer(
            model, settings.actor.optimizer, steps=settings.optimizer_steps, ranks=ranks
        ),
        loss=choose_loss(settings),
        advantages=choose_advantages(settings),
        settings=settings,
        dtype=dtype,
        cost=cost,
        reference=make_reference(policy, settings, ranks),
        ranks=ranks,
    )
