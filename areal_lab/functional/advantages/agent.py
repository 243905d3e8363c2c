r"""Advantages for agents: of steps within episodes, and of players with separate baselines.

gigpo_advantages   episode against episode of one prompt, plus step against step of one state
rae_advantages     reward minus a moving average of the player's rewards; the state is passed
                   in and handed back
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from areal_lab.functional.advantages.group import Scale, check_rewards, group_advantages
from areal_lab.functional.checks import check_integer, check_same_shape
from areal_lab.functional.segments import segment_reduce


def gigpo_advantages(
    episode_rewards: Float[Tensor, " N"],
    episode_groups: Int[Tensor, " N"],
    step_returns: Float[Tensor, " S"],
    step_groups: Int[Tensor, " S"],
    step_episodes: Int[Tensor, " S"],
    *,
    step_weight: float = 1.0,
    scale: Scale | None = None,
    unbiased: bool = True,
    eps: float = 1e-6,
) -> Float[Tensor, " S"]:
    r"""GiGPO: advantage of the episode plus the advantage of the step among steps from the same
    state.

    $$ A_s = A^E_{i(s)} + \omega A^S_s $$

    Both are `group_advantages`: of episodes of the same prompt, and of steps that started from the
    same state (in any episode of the prompt). A state seen once adds exactly 0.

    Source: GiGPO (arXiv:2505.10978).

    Args:
        episode_rewards: R of each episode; gets a gradient.
        episode_groups: integer id of each episode's prompt.
        step_returns: discounted sum of rewards from each step to its episode's end; gets a
            gradient.
        step_groups: integer id of the state that each step started from; different prompts must
            have different ids.
        step_episodes: the episode of each step, `0 .. N - 1`.
        step_weight: omega, weight of the step relative to the episode.
        scale: `std_of_group` (default), or `no_scale` as in the paper's variant with F = 1.
        eps: added to the scale.

    Raises:
        ValueError: as `group_advantages`, for episodes or for steps.
    """
    check_integer("step_episodes", step_episodes)
    check_same_shape("step_episodes", step_episodes, "step_returns", step_returns)
    episodes = group_advantages(
        episode_rewards, episode_groups, scale=scale, unbiased=unbiased, eps=eps
    )
    steps = group_advantages(step_returns, step_groups, scale=scale, unbiased=unbiased, eps=eps)
    return episodes[step_episodes] + step_weight * steps


class AgentAdvantages(NamedTuple):
    """Advantages of a batch, and the baselines to pass with the next one."""

    advantages: Tensor
    """Advantage of each sample; carries the gradient."""
    baselines: Tensor
    """Moving average of each agent's rewards after this batch, detached."""


def rae_advantages(
    rewards: Float[Tensor, " N"],
    agents: Int[Tensor, " N"],
    baselines: Float[Tensor, " agents"],
    *,
    decay: float = 0.95,
) -> AgentAdvantages:
    r"""Reward minus a moving average of the same agent's (role's) rewards so far.

    $$ A_i = R_i - b_{a(i)}, \quad b_a \leftarrow \beta b_a + (1 - \beta) R_i $$

    All samples of a batch are compared with the baselines from before it, so that their order does
    not matter to them; the update then takes them one after another,
    in the order of the batch, in closed form. In a zero-sum
    game the mean over both players is 0 whatever they do, hence a baseline for each.

    Source: role-conditioned advantages of SPIRAL (arXiv:2506.24119).

    Args:
        agents: agent (role, player) of each sample, `0 .. A - 1`.
        baselines: b of each agent before this batch; zeros at the start.
        decay: beta, the weight of the past at each sample.

    Raises:
        ValueError: shapes differ, agents are not integers, rewards are not finite, or `decay` is
            not in [0, 1).
    """
    if not 0 <= decay < 1:
        raise ValueError(f"decay is {decay}, but must be in [0, 1): the weight of the past")
    check_rewards("rewards", rewards)
    check_rewards("baselines", baselines)
    check_same_shape("agents", agents, "rewards", rewards)
    check_integer("agents", agents)
    baselines, constants = baselines.detach(), rewards.detach()
    count = baselines.shape[0]
    samples = segment_reduce(torch.ones_like(agents), agents, count)
    weights = (1 - decay) * _power(decay, _later_samples(agents))
    update = segment_reduce(weights.to(constants.dtype) * constants, agents, count)
    return AgentAdvantages(
        advantages=rewards - baselines[agents],
        baselines=_power(decay, samples).to(baselines.dtype) * baselines + update,
    )


def _later_samples(agents: Tensor) -> Tensor:
    """Number of samples of the same agent after each sample."""
    ordered, order = torch.sort(agents, stable=True)
    last = torch.searchsorted(ordered, ordered, right=True) - 1
    later = last - torch.arange(agents.shape[0], device=agents.device)
    return torch.zeros_like(later).scatter(0, order, later)


def _power(decay: float, exponent: Tensor) -> Tensor:
    return torch.pow(torch.full_like(exponent, decay, dtype=torch.float64), exponent)
