"""Advantages of a batch, and what its settings on long responses did to it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from areal_lab.data.trajectory import Trajectory
from areal_lab.training.objective.loss import Advantages, asks_for_lengths, choose_length_penalty
from areal_lab.training.settings import TrainerSettings


def batch_advantages(
    trajectories: Sequence[Trajectory], function: Advantages
) -> Float[Tensor, " N"]:
    """Advantage of each trajectory: its reward relative to its group.

    Raises:
        ValueError: if the function does not return one number per trajectory.
    """
    rewards = torch.tensor([t.reward for t in trajectories])
    facts = {}
    if asks_for_lengths(function):
        facts["length_tokens"] = torch.tensor([t.generated_tokens for t in trajectories])
    advantages = function(rewards, torch.tensor([t.group for t in trajectories]), **facts)
    if advantages.shape != rewards.shape:
        raise ValueError(
            f"the advantages have shape {tuple(advantages.shape)}, but must be one number "
            f"per sample, shape {tuple(rewards.shape)}"
        )
    return advantages.detach()


def overlong_metrics(
    settings: TrainerSettings, trajectories: Sequence[Trajectory]
) -> dict[str, float]:
    """Masked samples and the mean penalty, where the settings mask or punish long responses."""
    metrics = {}
    if settings.actor.mask_truncated:
        metrics["masked_samples"] = float(sum(t.truncated for t in trajectories))
    if (penalty := choose_length_penalty(settings)) is not None:
        lengths = torch.tensor([t.generated_tokens for t in trajectories])
        metrics["overlong_penalty_mean"] = float(penalty(lengths).mean())
    return metrics
