r"""Effect of a prompt's difficulty on its advantages: their size, and the prompt's weight.

    success rate p --> k of G samples right --> A of the right ones, A of the wrong ones
                                                  |
    mean of |A| over samples (size) and the factor on the gradient of p (weight) <--'

Rewards are 0 and 1. The weight is exact, an expectation over k.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from areal_lab.functional.advantages.group import check_rewards
from areal_lab.functional.checks import check_integer, check_same_shape, count_known

SampleAdvantages: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""`(rewards [N], groups [N]) -> advantages [N]`, such as `grpo_advantages`."""


class AdvantagesByCount(NamedTuple):
    """Advantages of one prompt by the number k of its right samples, `[G + 1]`."""

    right: Float[Tensor, " counts"]
    """Advantage of each right sample; 0 if no sample is right."""
    wrong: Float[Tensor, " counts"]
    """Advantage of each wrong sample; 0 if no sample is wrong."""


class PromptWeight(NamedTuple):
    """Weight of prompts for each success rate; detached."""

    size: Float[Tensor, " P"]
    """Expected mean of |A| over the samples of the prompt."""
    weight: Float[Tensor, " P"]
    """Factor on the gradient of the prompt's success rate in the expected update."""
    informative: Float[Tensor, " P"]
    """Probability that the samples are not all right or all wrong."""


def advantages_by_count(
    advantages: SampleAdvantages,
    group_size: int,
    *,
    others: Float[Tensor, " N"] | None = None,
    other_groups: Int[Tensor, " N"] | None = None,
) -> AdvantagesByCount:
    """Advantages of a prompt with 0, 1, ... right samples.

    Args:
        advantages: an estimator, such as `grpo_advantages`; called once for each count.
        group_size: G, samples of the prompt.
        others: rewards of the other prompts of the batch, for estimators that use the whole
            batch; None is a batch of this prompt alone.
        other_groups: integer id of each of their prompts.

    Source: definition.

    Raises:
        ValueError: `group_size` is below 1, others are given without their groups or do not fit
            them, or the estimator does not return one number per sample.
    """
    if group_size < 1:
        raise ValueError(f"group_size is {group_size}, but must be at least 1")
    if (others is None) != (other_groups is None):
        raise ValueError("others and other_groups belong together; give both or none")
    if others is None or other_groups is None:
        others = torch.zeros(0, dtype=torch.double)
        other_groups = torch.zeros(0, dtype=torch.long)
    check_rewards("others", others)
    check_integer("other_groups", other_groups)
    check_same_shape("other_groups", other_groups, "others", others)
    number = int(other_groups.max()) + 1 if other_groups.numel() else 0
    groups = torch.cat([other_groups.new_full((group_size,), number), other_groups])
    right, wrong = others.new_zeros(group_size + 1), others.new_zeros(group_size + 1)
    for count in range(group_size + 1):
        rewards = (torch.arange(group_size, device=others.device) < count).to(others.dtype)
        values = advantages(torch.cat([rewards, others]), groups)
        if values.shape != groups.shape:
            raise ValueError(
                f"advantages gave shape {tuple(values.shape)} for {groups.shape[0]} samples, but "
                "must give one number per sample; reduce those of tokens first"
            )
        if count:
            right[count] = values[0].detach()
        if count < group_size:
            wrong[count] = values[group_size - 1].detach()
    return AdvantagesByCount(right, wrong)


def prompt_weight(
    advantages: SampleAdvantages,
    success_rates: Float[Tensor, " P"],
    *,
    group_size: int,
    others: Float[Tensor, " N"] | None = None,
    other_groups: Int[Tensor, " N"] | None = None,
) -> PromptWeight:
    r"""Expected weight that an estimator gives to a prompt of each success rate.

    With rewards of 0 and 1, the expected policy gradient of the samples of a prompt is its weight
    times the gradient of its success rate p. Each sample counts by what it gets if it is right
    minus what it gets if it is wrong, among G - 1 others of which j are right:

    $$ E\Big[\frac{1}{G} \sum_i A_i \nabla \log \pi(y_i)\Big] = w(p) \nabla p, \quad
    w(p) = E_{j \sim \mathrm{Bin}(G - 1, p)} \big[ A^{right}_{j + 1} - A^{wrong}_j \big] $$

    A weight of 1 everywhere maximizes the mean success rate; 1 / p that of its logarithm. So what
    an estimator maximizes is the integral of its weight. On policy, for whole responses.

    Args:
        advantages: an estimator, such as `grpo_advantages`.
        success_rates: p, the probability that a sample is right, in [0, 1].
        group_size: G, samples of the prompt.
        others: as in `advantages_by_count`.
        other_groups: as in `advantages_by_count`.

    Source: score function identity; for weights of 1 and 1 / p: MaxRL (arXiv:2602.02710).

    Raises:
        ValueError: as `advantages_by_count`, or a rate is not in [0, 1].
    """
    check_rewards("success_rates", success_rates)
    if count_known((success_rates < 0) | (success_rates > 1)):
        raise ValueError("success_rates has an entry outside of [0, 1]: it is a probability")
    right, wrong = advantages_by_count(
        advantages, group_size, others=others, other_groups=other_groups
    )
    rates = success_rates.detach().double()
    right, wrong = right.double(), wrong.double()
    counts = torch.arange(group_size + 1, dtype=torch.double, device=rates.device)
    sizes = (counts * right.abs() + (group_size - counts) * wrong.abs()) / group_size
    gain = right[1:] - wrong[:-1]
    mixed = ((counts > 0) & (counts < group_size)).double()
    chances = _binomial(rates, group_size)
    return PromptWeight(
        size=(chances @ sizes).to(success_rates.dtype),
        weight=(_binomial(rates, group_size - 1) @ gain).to(success_rates.dtype),
        informative=(chances @ mixed).to(success_rates.dtype),
    )


def _binomial(rates: Tensor, trials: int) -> Float[Tensor, "P counts"]:
    count = torch.arange(trials + 1, dtype=torch.double, device=rates.device)
    total = torch.lgamma(torch.full_like(count, trials + 1.0))
    ways = total - torch.lgamma(count + 1) - torch.lgamma(trials - count + 1)
    p = rates[:, None]
    return torch.exp(ways + torch.xlogy(count, p) + torch.xlogy(trials - count, 1 - p))
