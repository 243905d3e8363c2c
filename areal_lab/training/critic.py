"""Critic of PPO: a value model with a separate optimizer, or a value output of the policy.

    advantages ask for values --make_critic--> Critic        --update--> a step on a minibatch
                                               SharedCritic  a term of the policy's loss

A `Critic` is as large as the policy: a body and one output per token, which starts at zero. A
`SharedCritic` has the output alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from areal_lab.data.batch import PackedBatch, SampleTokens
from areal_lab.functional.aggregate import token_mean
from areal_lab.functional.losses.supervised import ValueLoss, value_loss
from areal_lab.models.copies import to_device
from areal_lab.models.folder import compute_dtype
from areal_lab.models.locate import resolve_model_path
from areal_lab.training.decoder_layers import BACKEND, compile_layers
from areal_lab.training.forward import PackedPolicy, PackedValues
from areal_lab.training.minibatch import Minibatch, on_device
from areal_lab.training.model import check_same_vocabulary, load_value_model
from areal_lab.training.optimizer import Optimizer, Stepped, make_optimizer
from areal_lab.training.ranks import Ranks
from areal_lab.training.settings import TrainerSettings
from areal_lab.training.throughput import ModelFlops, tflop
from areal_lab.training.timeline import Timeline


class ValueTargets(NamedTuple):
    """Training targets of the critic, on the device."""

    returns: Float[Tensor, " T"]
    old_values: Float[Tensor, " T"]
    """Before the batch: the values that the advantages were made with."""
    tokens: SampleTokens
    """Places of the tokens, on the host."""

    def loss(
        self, values: Float[Tensor, " R"], rows: Tensor, *, clip_epsilon: float, token_count: int
    ) -> ValueLoss:
        """A micro-batch's share of the mean error in its minibatch."""
        return value_loss(
            values,
            self.returns[rows],
            torch.ones_like(values, dtype=torch.bool),
            old_values=self.old_values[rows],
            clip_epsilon=clip_epsilon,
            aggregate=partial(token_mean, token_count=token_count),
        )


class CriticUpdate(NamedTuple):
    """Result of one step of the critic."""

    stepped: Stepped
    clipped: Tensor
    """Tokens of this rank whose value left its clip range; a scalar on the device."""


@dataclass(frozen=True, slots=True)
class Critic:
    """A model of values, and how it learns."""

    values: PackedValues
    """The module that is called; it contains the model."""
    optimizer: Optimizer
    clip_epsilon: float
    """Distance that a value may move in one batch."""
    bootstraps: bool
    """True if responses that were cut off are worth their last value as well."""

    @property
    def flops(self) -> ModelFlops | None:
        """Work of the model."""
        return self.values.flops

    def update(
        self, minibatch: Minibatch, targets: ValueTargets, ranks: Ranks, timeline: Timeline
    ) -> CriticUpdate:
        """One optimizer step on the tokens of a minibatch."""
        device = targets.returns.device
        self.optimizer.zero_grad()
        loss = torch.zeros((), device=device)
        clipped = torch.zeros((), device=device)
        for packed in minibatch.parts:
            work = tflop(self.flops, [packed], training=True)
            with timeline.span("critic forward/backward", tokens=len(packed.tokens), **work):
                rows = to_device(targets.tokens.rows(packed), device)
                share = targets.loss(
                    self.values(on_device(packed, device)),
                    rows,
                    clip_epsilon=self.clip_epsilon,
                    token_count=minibatch.token_count,
                )
                # Gradients are averaged over the ranks, and shares are to be summed.
                (share.loss * ranks.data_count).backward()
                loss += share.loss.detach()
                clipped += share.clipped.sum()
        for packed in minibatch.idle:
            with timeline.span("critic forward/backward", tokens=0):
                (self.values(on_device(packed, device)).sum() * 0.0).backward()
        with timeline.span("critic optimizer"):
            stepped = self.optimizer.step(loss)
        return CriticUpdate(stepped, clipped)


@dataclass(frozen=True, slots=True)
class SharedCritic:
    """Value output of a policy, trained together with it."""

    policy: PackedPolicy
    coefficient: float
    """Factor of the error in the policy's loss."""
    clip_epsilon: float
    bootstraps: bool

    @property
    def flops(self) -> ModelFlops | None:
        """Work of the policy that computes the values."""
        return self.policy.flops

    def values(self, packed: PackedBatch) -> Float[Tensor, " R"]:
        """The value before each chosen token."""
        values: Tensor = self.policy(packed).values
        return values


def make_critic(
    policy: PackedPolicy,
    settings: TrainerSettings,
    ranks: Ranks,
    *,
    compile_backend: str = BACKEND,
) -> Critic | SharedCritic:
    """Load a critic and shard it, or take the policy's output for values."""
    config, actor = settings.config.critic, settings.actor
    if config.share_body:
        return SharedCritic(policy, config.loss_coef, config.eps_clip, config.bootstrap_truncated)
    folder = resolve_model_path(config.path) if config.path else Path(settings.model_path)
    model = load_value_model(
        folder, device=settings.load_device, gradient_checkpointing=actor.gradient_checkpointing
    )
    theirs, ours = (m.config.get_text_config() for m in (model, policy.model))
    check_same_vocabulary("critic.path", config.path, theirs.vocab_size, ours.vocab_size)
    dtype = compute_dtype(actor.dtype, settings.device)
    values = PackedValues(
        model, dtype=dtype, param_dtype=settings.param_dtype, attention=actor.attention
    )
    if actor.compile:
        compile_layers(model, backend=compile_backend)
    ranks.shard(values, offload=actor.offload)
    return Critic(
        values=values,
        optimizer=make_optimizer(
            model, config.optimizer, steps=settings.optimizer_steps, ranks=ranks
        ),
        clip_epsilon=config.eps_clip,
        bootstraps=config.bootstrap_truncated,
    )
