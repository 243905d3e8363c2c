"""Mean, variance and direction of per-sample gradients, by the age of the samples.

`N` samples, `P` parameters. `torch.func.vmap(torch.func.grad(loss))` gives one gradient per sample.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from areal_lab.functional.checks import check_integer

_BLOCK: Final = 2**17
"""Numbers of gradients that are compared with their mean at once."""


class GradientSpread(NamedTuple):
    """Mean and variance of the gradients of the samples of each lag; detached."""

    samples: Tensor
    """Number of samples, [bins]."""
    norm: Tensor
    """Euclidean norm of their mean gradient, [bins]; 0 without samples."""
    variance: Tensor
    """Trace of the covariance of one sample's gradient, divided by n - 1; 0 below two samples.

    The mean over n samples has this divided by n."""


def gradient_spread_by_lag(
    gradients: Float[Tensor, "N P"], lag: Int[Tensor, " N"], *, bins: int
) -> GradientSpread:
    r"""Mean and variance of per-sample gradients, for the samples of each lag.

    $$ \mathrm{tr}\,\mathrm{Cov}_k = \frac{1}{n_k - 1} \sum_{i: lag_i = k} |g_i - \bar g_k|^2 $$

    Args:
        gradients: gradient of each sample's loss, all parameters in one row.
        lag: versions between the weights trained and those that sampled it; the last bin holds
            everything from `bins - 1` on, as in `lag_histogram`.
        bins: number of bins.

    Source: McCandlish et al., An empirical model of large-batch training (arXiv:1812.06162),
    section 2.2, where the trace over the squared norm is the noise scale.

    Raises:
        ValueError: shapes do not fit, lags are not integers, or `bins` is not positive.
    """
    _check_samples(gradients, lag, bins)
    gradients = gradients.detach()
    mean, member = _means(gradients, lag, bins)
    samples = member.sum(1)
    # Distances from the mean rather than a difference of squares, which cancels; of a block of
    # samples at a time, which stays in the processor's cache.
    rows = max(1, _BLOCK // max(1, gradients.shape[1]))
    blocks = zip(gradients.split(rows), member.split(rows, 1), strict=True)
    distances = torch.cat([(each - of.T @ mean).square().sum(1) for each, of in blocks])
    variance = (member @ distances) / (samples - 1).clamp(min=1)
    return GradientSpread(samples.long(), mean.norm(dim=1), variance)


def gradient_alignment_by_lag(
    gradients: Float[Tensor, "N P"],
    lag: Int[Tensor, " N"],
    reference: Float[Tensor, " P"],
    *,
    bins: int,
) -> Float[Tensor, " bins"]:
    r"""Cosine between the mean gradient of each lag and a reference, such as an unbiased gradient.

    $$ \cos_k = \frac{\bar g_k \cdot g}{|\bar g_k|\, |g|} $$

    0 without samples, and where a mean is 0.

    Args:
        gradients: gradient of each sample's loss, all parameters in one row.
        lag: versions between the weights trained and those that sampled it; the last bin holds
            everything from `bins - 1` on, as in `gradient_spread_by_lag`.
        reference: the gradient to compare with.
        bins: number of bins.

    Source: definition.

    Raises:
        ValueError: shapes do not fit, lags are not integers, or `bins` is not positive.
    """
    if reference.shape != gradients.shape[1:]:
        raise ValueError(
            f"reference has shape {tuple(reference.shape)}, but must be [P], one number for each "
            f"column of gradients {tuple(gradients.shape)}"
        )
    _check_samples(gradients, lag, bins)
    mean, _ = _means(gradients.detach(), lag, bins)
    return torch.cosine_similarity(mean, reference.detach()[None], dim=1)


def _check_samples(gradients: Tensor, lag: Tensor, bins: int) -> None:
    check_integer("lag", lag)
    if gradients.dim() != 2 or lag.shape != gradients.shape[:1]:
        raise ValueError(
            f"gradients has shape {tuple(gradients.shape)} and lag {tuple(lag.shape)}, but must be "
            "[N, P] and [N]; flatten each sample's gradients into one row"
        )
    if bins < 1:
        raise ValueError(f"bins is {bins}, but must be at least 1")


def _means(gradients: Tensor, lag: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """Mean gradient of each lag, [bins, P], and which samples are of it, [bins, N]."""
    numbers = torch.arange(bins, device=lag.device)
    member = (lag.clamp(0, bins - 1) == numbers[:, None]).to(gradients.dtype)
    return (member @ gradients) / member.sum(1).clamp(min=1)[:, None], member
