"""A policy with its optimizer and loss: all that a step changes or asks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel

from areal_lab.data.prefix_tree import ForwardCost
from areal_lab.models.folder import compute_dtype
from areal_lab.models.image_features import ImagePixels, sees
from areal_lab.training.batch_advantages import KLReward, choose_kl_reward
from areal_lab.training.critic import Critic, SharedCritic, make_critic
from areal_lab.training.decoder_layers import BACKEND, compile_layers
from areal_lab.training.forward import PackedPolicy
from areal_lab.training.model import VALUE_HEAD, add_value_output, forward_cost
from areal_lab.training.objective.advantages import (
    Advantages,
    choose_advantages,
    needs_critic,
)
from areal_lab.training.objective.loss import ChosenLoss, choose_loss, requested_facts
from areal_lab.training.optimizer import Optimizer, align_gradients, make_optimizer
from areal_lab.training.ranks import Ranks
from areal_lab.training.reference import Reference, Teacher, make_reference, make_teacher
from areal_lab.training.settings import TrainerSettings


@dataclass(slots=True)
class DualVariable:
    """Multiplier of the constraint of a loss, from step to step."""

    value: float = 0.0

    def add(self, step: float) -> None:
        """Take a step of dual ascent; the multiplier of an inequality is never negative."""
        self.value = max(0.0, self.value + step)


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
    """Reference model; None without a penalty on the distance from it."""
    teacher: Teacher | None = None
    """Teacher; None unless the policy is distilled."""
    kl_reward: KLReward | None = None
    """KL penalty inside the reward; None without one."""
    critic: Critic | SharedCritic | None = None
    """Critic; None unless advantages use values."""
    dual: DualVariable | None = None
    """Dual variable; None unless the loss asks for one."""
    ranks: Ranks = field(default_factory=Ranks)

    @property
    def model(self) -> PreTrainedModel:
        """The policy as a model of transformers."""
        return self.policy.model

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return torch.device(self.settings.device)


def make_learner(
    model: PreTrainedModel,
    settings: TrainerSettings,
    ranks: Ranks | None = None,
    *,
    compile_backend: str = BACKEND,
) -> Learner:
    """Create the optimizer and loss of a model.

    Args:
        ranks: the processes that train together; this one alone by default.
    """
    ranks = ranks or Ranks()
    dtype = compute_dtype(settings.actor.dtype, settings.device)
    cost = forward_cost(model)
    advantages, critic = choose_advantages(settings), settings.config.critic
    rates = {}
    if needs_critic(advantages) and critic.share_body:
        add_value_output(model)
        rates = {f"{VALUE_HEAD}.weight": critic.optimizer.lr}
    policy = PackedPolicy(
        model,
        temperature=settings.temperature,
        dtype=dtype,
        param_dtype=settings.param_dtype,
        entropy_gradient=settings.actor.entropy_coeff != 0,
        attention=settings.actor.attention,
        pixels=ImagePixels(Path(settings.model_path)) if sees(model) else None,
    )
    if settings.actor.compile:
        compile_layers(model, backend=compile_backend)
    ranks.shard(policy, offload=settings.actor.offload)
    loss = choose_loss(settings)
    asks_for_dual = "dual_variable" in requested_facts(loss.function)
    return Learner(
        policy=policy,
        optimizer=make_optimizer(
            model,
            settings.actor.optimizer,
            steps=settings.optimizer_steps,
            ranks=ranks,
            rates=rates,
            alignment=align_gradients(
                model, settings.actor.max_gradient_cosine, settings.actor.aligned_gradients
            ),
        ),
        loss=loss,
        advantages=advantages,
        settings=settings,
        dtype=dtype,
        cost=cost,
        reference=make_reference(policy, settings, ranks),
        teacher=make_teacher(policy, settings, ranks),
        kl_reward=choose_kl_reward(settings),
        critic=make_critic(policy, settings, ranks, compile_backend=compile_backend)
        if needs_critic(advantages)
        else None,
        dual=DualVariable() if asks_for_dual else None,
        ranks=ranks,
    )
