r"""Advantages from several rewards per sample: `[N, R]`, R components such as correct and short.

    sum_then_normalize   normalize(sum_k w_k R_k)    the component that varies most decides
    normalize_then_sum   sum_k w_k normalize(R_k)    each component counts by its weight
    gdpo_advantages      the latter, normalized once more over the batch

`normalize` is `group_advantages`, with any of its baselines and scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from areal_lab.functional.advantages.group import Baseline, Scale, group_advantages

Weights: TypeAlias = Sequence[float] | Tensor
"""One number per component; its sum need not be 1."""


def component_advantages(
    rewards: Float[Tensor, "N R"],
    groups: Int[Tensor, " N"],
    *,
    baseline: Baseline | None = None,
    scale: Scale | None = None,
    unbiased: bool = True,
    eps: float = 1e-6,
) -> Float[Tensor, "N R"]:
    """`group_advantages` of each component by itself.

    A component whose rewards are equal within a group gives exactly 0 there. The arguments are
    those of `group_advantages`, for every component.

    Source: GDPO (arXiv:2601.05242), its first step.

    Raises:
        ValueError: rewards are not `[N, R]` with R >= 1, or as `group_advantages`.
    """
    _check_components(rewards)
    # The loop is over components, of which there are a handful.
    columns = [
        group_advantages(column, groups, baseline=baseline, scale=scale, unbiased=unbiased, eps=eps)
        for column in rewards.unbind(1)
    ]
    return torch.stack(columns, dim=1)


def normalize_then_sum(
    rewards: Float[Tensor, "N R"],
    groups: Int[Tensor, " N"],
    *,
    weights: Weights | None = None,
    baseline: Baseline | None = None,
    scale: Scale | None = None,
    unbiased: bool = True,
    eps: float = 1e-6,
) -> Float[Tensor, " N"]:
    r"""Weighted sum of the advantages of each component.

    $$ A_i = \sum_k w_k \frac{R_{ik} - b_{ik}}{\sigma_{ik} + \epsilon} $$

    Source: GDPO (arXiv:2601.05242), before its normalization over the batch.

    Args:
        weights: w, one per component; None takes 1 for each.

    The other arguments are those of `group_advantages`.

    Raises:
        ValueError: as `component_advantages`, or another number of weights than of components.
    """
    advantages = component_advantages(
        rewards, groups, baseline=baseline, scale=scale, unbiased=unbiased, eps=eps
    )
    return _weighted_sum(advantages, weights)


def sum_then_normalize(
    rewards: Float[Tensor, "N R"],
    groups: Int[Tensor, " N"],
    *,
    weights: Weights | None = None,
    baseline: Baseline | None = None,
    scale: Scale | None = None,
    unbiased: bool = True,
    eps: float = 1e-6,
) -> Float[Tensor, " N"]:
    r"""Advantages of the weighted sum of the components: what GRPO does with several rewards.

    $$ A_i = \frac{R_i - b_i}{\sigma_i + \epsilon}, \quad R_i = \sum_k w_k R_{ik} $$

    Source: DeepSeekMath (arXiv:2402.03300), section 4.1.2, of a summed reward.

    Args:
        weights: w, one per component; None takes 1 for each.

    The other arguments are those of `group_advantages`.

    Raises:
        ValueError: as `component_advantages`, or another number of weights than of components.
    """
    _check_components(rewards)
    return group_advantages(
        _weighted_sum(rewards, weights),
        groups,
        baseline=baseline,
        scale=scale,
        unbiased=unbiased,
        eps=eps,
    )


def gdpo_advantages(
    rewards: Float[Tensor, "N R"],
    groups: Int[Tensor, " N"],
    *,
    weights: Weights | None = None,
    unbiased: bool = True,
    eps: float = 1e-6,
) -> Float[Tensor, " N"]:
    r"""Normalize each component within its group, sum, normalize over the samples of the batch.

    $$ A_i = \frac{S_i - \bar S}{\sigma_S + \epsilon}, \quad
    S_i = \sum_k w_k \frac{R_{ik} - \bar R_{gk}}{\sigma_{gk} + \epsilon} $$

    The last step keeps the size of advantages from growing with the number of components. A group
    of one gives 0 up to rounding, since the mean over the batch is 0. For a batch split over ranks,
    or to count tokens instead of samples, take `normalize_then_sum`, `spread_to_tokens` and
    `whiten` with the moments of the whole batch.

    Source: GDPO (arXiv:2601.05242).

    Args:
        weights: w, one per component; None takes 1 for each.
        unbiased: divide squares by n - 1 rather than by n, in both normalizations.
        eps: added to both standard deviations.

    Raises:
        ValueError: as `component_advantages`, or another number of weights than of components.
    """
    summed = normalize_then_sum(rewards, groups, weights=weights, unbiased=unbiased, eps=eps)
    # The batch is one group.
    return group_advantages(summed, torch.zeros_like(groups), unbiased=unbiased, eps=eps)


def _check_components(rewards: Tensor) -> None:
    if rewards.dim() != 2 or rewards.shape[1] < 1:
        raise ValueError(
            f"rewards has shape {tuple(rewards.shape)}, but must be [samples, components] with at "
            "least one component; torch.stack the components with dim=1"
        )


def _weighted_sum(values: Tensor, weights: Weights | None) -> Tensor:
    if weights is None:
        return values.sum(1)
    if len(weights) != values.shape[1]:
        raise ValueError(
            f"weights has {len(weights)} entries and rewards (shape {tuple(values.shape)}) "
            f"{values.shape[1]} components; give one weight per component"
        )
    numbers = torch.as_tensor(weights, dtype=values.dtype, device=values.device)
    return (values * numbers.detach()).sum(1)
