"""Select before computing, so that masked values reach neither the result nor the gradient.

`0 * nan` is NaN, so multiplying by a mask is not enough; and `where(mask, exp(x), 0)` still has a
NaN gradient when a masked `exp(x)` overflows. Inputs are selected first, then computed with.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from areal_lab.functional.checks import check_token_inputs


def select(
    values: Shaped[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], *, fill: float = 0.0
) -> Shaped[Tensor, "*shape"]:
    """Keep `values` where the mask is True, `fill` elsewhere; no gradient where masked.

    Source: definition.

    Raises:
        ValueError: shapes differ, or the mask is not boolean.
    """
    check_token_inputs(mask, values=values)
    return torch.where(mask, values, torch.full_like(values, fill))


def log_difference(
    logprobs: Float[Tensor, "*shape"], others: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Compute `logprobs - others`; 0 without a gradient where both are the same infinity, not
    NaN.
    """
    same = (logprobs == others) & logprobs.isinf()
    return torch.where(same, 0.0, logprobs - others)


def masked_sum(
    values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], *, dim: int | None = None
) -> Float[Tensor, "*rest"]:
    """Sum of the unmasked values, over everything or along `dim`.

    Source: definition.

    Raises:
        ValueError: shapes differ, or the mask is not boolean.
    """
    chosen = select(values, mask)
    return chosen.sum() if dim is None else chosen.sum(dim)


def masked_mean(
    values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], *, dim: int | None = None
) -> Float[Tensor, "*rest"]:
    """Mean of the unmasked values, over everything or along `dim`; 0 where nothing is unmasked.

    Source: definition.

    Raises:
        ValueError: shapes differ, or the mask is not boolean.
    """
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(values, mask, dim=dim) / count.clamp(min=1)


def masked_quantiles(
    values: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    quantiles: Float[Tensor, " Q"],
) -> Float[Tensor, " Q"]:
    r"""Quantiles of the unmasked values, linear between order statistics (as `torch.quantile`).

    $$ Q(q) = (1 - f)\, x_{(k)} + f\, x_{(k+1)}, \quad k + f = q\,(n - 1) $$

    Static shapes and no limit on the number of values, unlike `torch.quantile`. NaN when nothing
    is unmasked. An unmasked NaN counts as the largest value.

    Args:
        mask: True where a value counts.
        quantiles: q of each wanted quantile, in [0, 1].

    Source: Hyndman and Fan, Sample quantiles in statistical packages (1996), definition 7.
    """
    check_token_inputs(mask, values=values)
    if values.numel() == 0:
        return values.new_full(quantiles.shape, float("nan"))
    # NaN sorts behind everything else, infinity included, so masked entries come last.
    ordered = select(values, mask, fill=float("nan")).reshape(-1).sort().values
    last = mask.sum() - 1
    # In float64: a position among millions of tokens has more digits than a float32 or bfloat16,
    # and so has a value near 0 between two large ones.
    position = quantiles.double() * last.clamp(min=0)
    below = position.floor().long()
    above = torch.minimum(below + 1, last.clamp(min=0))
    low, high = ordered[below], ordered[above]
    # Equal infinities have the difference NaN, and lerp would lose an infinite but exact hit.
    between = (low + (position - below) * (high.double() - low)).to(values.dtype)
    result = torch.where((low == high) | (position == below), low, between)
    return torch.where(last >= 0, result, torch.full_like(result, float("nan")))
