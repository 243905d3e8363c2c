r"""M2PO: drop the largest log ratios until the second moment of the rest is under a threshold.

|log r|   0.1   0.9   0.2   0.1      mean of squares 0.2175: drop 0.9
kept       x           x     x       mean of squares 0.02 < 0.04: done
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from areal_lab.functional.checks import check_number, check_token_inputs
from areal_lab.functional.corrections.weights import BehaviorWeight, Correction, drop
from areal_lab.functional.masked import select


def second_moment_mask(
    log_ratio: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    threshold: float = 0.04,
) -> Bool[Tensor, "*shape"]:
    r"""True for the tokens left after the largest are dropped until $\hat M_2$ is small.

    $$ \hat M_2 = \frac{1}{|K|} \sum_{t \in K} (\log r_t)^2 < \tau $$

    K is the largest such set. At least one token stays, that nearest to on-policy; of equal ones
    the first. The moment is over all tokens of this call: compute the mask over the whole batch and
    `keep` its parts where a batch is trained on in parts.

    Args:
        log_ratio: log r; of theta to behavior in the paper, of proximal to behavior in AReaL.
        threshold: tau.

    Returns:
        True where a token stays; False where masked. NaN counts as the largest.

    Source: M2PO (arXiv:2510.01161).

    Raises:
        ValueError: shapes differ, or the threshold is not positive.
    """
    check_token_inputs(mask, log_ratio=log_ratio)
    _check_threshold(threshold)
    squares = select(log_ratio.detach(), mask).double().square()
    largest = torch.finfo(squares.dtype).max
    # Masked ones are sorted behind every unmasked one, however large or NaN that is.
    squares = squares.nan_to_num(nan=largest, posinf=largest)
    ordered, order = select(squares, mask, fill=float("inf")).reshape(-1).sort(stable=True)
    ranks = torch.arange(ordered.shape[0], device=ordered.device)
    count = mask.sum()
    # The mean of the n smallest grows with n, so that those under tau are the first few n.
    means = torch.cumsum(torch.where(ranks < count, ordered, 0.0), 0) / (ranks + 1)
    stay = ((means < threshold) & (ranks < count)).sum().clamp(min=1)
    kept = torch.zeros_like(order).scatter(0, order, ranks.expand_as(order)) < stay
    return kept.reshape(mask.shape) & mask


def mask_second_moment(threshold: float = 0.04) -> Correction:
    r"""M2PO's mask of log rho, proximal to behavior, as a correction; see `second_moment_mask`.

    The moment is over all unmasked tokens of the call, also those that were dropped before. For
    the paper's theta to behavior: `keep(second_moment_mask(logprobs - behavior_logprobs, mask))`.

    Source: M2PO (arXiv:2510.01161).

    Raises:
        ValueError: the threshold is not positive.
    """
    _check_threshold(threshold)

    def masked(weight: BehaviorWeight) -> BehaviorWeight:
        kept = second_moment_mask(weight.log_ratio, weight.mask, threshold=threshold)
        return drop(weight, kept)

    return masked


def _check_threshold(threshold: float) -> None:
    check_number("threshold", threshold, "mask_second_moment(0.04)")
    if not threshold > 0:
        raise ValueError(
            f"threshold is {threshold}, but bounds a mean of squares and must be > 0, as 0.04"
        )
