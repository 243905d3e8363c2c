r"""pass@k: the chance that at least one of k samples of a problem is correct."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from areal_lab.functional.checks import check_integer, check_same_shape, count_known


def pass_at_k(
    samples: Int[Tensor, " P"], correct: Int[Tensor, " P"], *, k: int
) -> Float[Tensor, " P"]:
    r"""Unbiased estimate of pass@k of each problem; their mean is pass@k of the data set.

    $$ 1 - \binom{n - c}{k} / \binom{n}{k} = 1 - \prod_{j=0}^{k-1} \frac{n - c - j}{n - j} $$

    The product has no factor above 1, so nothing overflows. The naive $1 - (1 - c / n)^k$ is biased
    low. For an interval, take the spread between problems: samples of one problem are correlated
    (`areal_lab.runlog.intervals.mean_interval`).

    Source: Chen et al. (arXiv:2107.03374), eq. 1, whose product has c factors and the same value.

    Args:
        samples: n, the samples of each problem, P problems; each at least k.
        correct: c, those that are correct.
        k: samples of which one must be correct, at least 1.

    Raises:
        ValueError: `k` is below 1, counts are not integers, shapes differ, or not 0 <= c <= n with
            n >= k.
    """
    if k < 1:
        raise ValueError(f"k is {k}, but must be >= 1: a number of samples")
    check_integer("samples", samples)
    check_integer("correct", correct)
    check_same_shape("correct", correct, "samples", samples)
    if few := count_known(samples < k):
        raise ValueError(
            f"{few} problems have fewer than k={k} samples; take more samples or a smaller k"
        )
    if wrong := count_known((correct < 0) | (correct > samples)):
        raise ValueError(
            f"correct is outside 0 .. samples for {wrong} problems; count each sample once"
        )
    drawn = torch.arange(k, device=samples.device)
    wrong_left = (samples - correct)[:, None] - drawn
    factors = wrong_left.clamp(min=0).double() / (samples[:, None] - drawn).double()
    return 1 - factors.prod(dim=1)
