"""One batch of decoupled PPO, slowly: one sequence at a time, one token at a time.

Written from AReaL (arXiv:2505.24298), eq. 5, and DeepSeekMath (arXiv:2402.03300), 4.1.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from areal_lab.data.trajectory import Trajectory


def sequence_logprobs(model: Any, trajectory: Trajectory) -> list[Tensor]:
    """log pi of every token that the policy chose; `model` has ordinary attention."""
    tokens = [*trajectory.prompt_tokens, *trajectory.response_tokens]
    logits = model(torch.tensor([tokens])).logits[0]
    chosen = []
    for index, by_policy in enumerate(trajectory.response_mask):
        if by_policy:
            at = len(trajectory.prompt_tokens) + index
            chosen.append(logits[at - 1].log_softmax(-1)[tokens[at]])
    return chosen


def grpo_advantages(trajectories: Sequence[Trajectory]) -> list[float]:
    """(reward - mean of the group) / (standard deviation of the group + 1e-6)."""
    advantages = []
    for trajectory in trajectories:
        rewards = [t.reward for t in trajectories if t.group == trajectory.group]
        mean = sum(rewards) / len(rewards)
        variance = sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)
        advantages.append((trajectory.reward - mean) / (math.sqrt(variance) + 1e-6))
    return advantages


def decoupled_loss(
    model: Any,
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float],
    proximal: Sequence[Sequence[float]],
    *,
    clip_epsilon: float,
    weight_cap: float,
) -> Tensor:
    """Mean over all tokens of all sequences, to be minimised."""
    total = torch.zeros(())
    count = 0
    rows = zip(trajectories, advantages, proximal, strict=True)
    for trajectory, advantage, proximal_row in rows:
        behavior_row = [lp for segment in trajectory.segments for lp in segment.logprobs]
        logprobs = sequence_logprobs(model, trajectory)
        for logprob, prox, behavior in zip(logprobs, proximal_row, behavior_row, strict=True):
            ratio = torch.exp(logprob - prox)
            clipped = torch.clamp(ratio, 1 - clip_epsilon, 1 + clip_epsilon)
            surrogate = torch.minimum(ratio * advantage, clipped * advantage)
            weight = min(math.exp(prox - behavior), weight_cap)
            total = total - weight * surrogate
            count += 1
    return total / count
