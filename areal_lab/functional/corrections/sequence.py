r"""Corrections of whole sequences: products, geometric means, outliers.

$$ \rho_i = \prod_{t \in i} \rho_t, \qquad
\bar\rho_i = \Big(\prod_{t \in i} \rho_t\Big)^{1/|y_i|} $$

    chain(sequence_product, truncate(2.0))                   sequence TIS: min(product, cap)
    chain(sequence_product, mask_outside(0, 3.0))            sequence mask: product or 0
    mask_sequences_outside(0.99, 1.01)                       band on the geometric mean, keeps rho_t
    chain(sequence_geometric_mean, mask_outside(0.5, 2.0))   the geometric mean is the weight too

Both are of log rho as it was at the start of the chain, over all unmasked tokens, also those that
an earlier correction dropped. A sequence without an unmasked token has product and mean 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from jaxtyping import Bool, Float
from torch import Tensor

from areal_lab.functional.corrections.weights import (
    BehaviorWeight,
    Correction,
    check_band,
    drop,
    inside,
    positive_exp,
    replace_weight,
)
from areal_lab.functional.segments import Segments, segment_reduce

SequenceStatistic: TypeAlias = Callable[[Tensor, Tensor, Segments], Tensor]
"""`(values, mask, sequences) -> [S]`: one number per sequence; 0 for one without a token."""


def sum_of_sequence(
    values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], sequences: Segments
) -> Float[Tensor, " S"]:
    """Sum over the unmasked tokens of each sequence; of log rho, the log of the product.

    Source: definition.

    Raises:
        ValueError: shapes differ, or the ids are not integers.
    """
    return segment_reduce(values, sequences.ids, sequences.count, mask=mask)


def mean_of_sequence(
    values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], sequences: Segments
) -> Float[Tensor, " S"]:
    """Mean over the unmasked tokens; of log rho, the log of the geometric mean.

    Source: definition.

    Raises:
        ValueError: shapes differ, or the ids are not integers.
    """
    return segment_reduce(values, sequences.ids, sequences.count, mask=mask, reduce="mean")


def max_of_sequence(
    values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], sequences: Segments
) -> Float[Tensor, " S"]:
    """Largest value of the unmasked tokens of each sequence.

    Source: definition.

    Raises:
        ValueError: shapes differ, or the ids are not integers.
    """
    return segment_reduce(values, sequences.ids, sequences.count, mask=mask, reduce="max")


def sequence_product(weight: BehaviorWeight) -> BehaviorWeight:
    r"""Give each token the weight of its whole sequence, $\prod_t \rho_t$.

    This is the importance weight of the sequence: unbiased for a reward at its end, and of a
    variance that grows exponentially with its length, so bound it: `truncate`, `mask_outside`.
    Summed in log space; a product beyond the dtype is its largest or smallest positive number.

    Source: the trajectory-wise importance weight of Precup, Sutton, Singh (2000), section 2.
    """
    return _of_sequence(weight, sum_of_sequence)


def sequence_geometric_mean(weight: BehaviorWeight) -> BehaviorWeight:
    r"""Give each token the geometric mean weight of its sequence, $(\prod_t \rho_t)^{1/|y|}$.

    Source: the length-normalized ratio of GSPO (arXiv:2507.18071), eq. 7, here of prox to behav.
    """
    return _of_sequence(weight, mean_of_sequence)


def mask_sequences_outside(low: float, high: float) -> Correction:
    r"""Drop sequences whose geometric mean weight is outside of a band.

    $$ \rho_t\,[low \le \bar\rho_i \le high] $$

    Args:
        low: smallest geometric mean that is kept; 0 for no lower bound.
        high: largest geometric mean that is kept; infinity for no upper bound.

    Source: "geometric" sequence masking of SkyRL, OpenRLHF and NeMo-RL; no paper defines it.

    Raises:
        ValueError: not 0 <= low <= high, or high is 0.
    """
    check_band(low, high)

    def masked(weight: BehaviorWeight) -> BehaviorWeight:
        means = mean_of_sequence(weight.log_ratio, weight.mask, weight.sequences)
        return drop(weight, inside(positive_exp(means), low, high)[weight.sequences.ids])

    return masked


def mask_outlier_sequences(low: float, high: float) -> Correction:
    r"""Drop sequences in which the weight of any token is outside of a band.

    $$ \rho_t \prod_{s \in i} [low \le \rho_s \le high] $$

    The bounds apply to $\rho$ at the start of the chain. One NaN drops its sequence.

    Args:
        low: smallest weight that is kept; 0 for no lower bound.
        high: largest weight that is kept; infinity for no upper bound.

    Source: the outlier mask of SkyRL; no paper defines it.

    Raises:
        ValueError: not 0 <= low <= high, or high is 0.
    """
    check_band(low, high)

    def masked(weight: BehaviorWeight) -> BehaviorWeight:
        outside = ~inside(positive_exp(weight.log_ratio), low, high) & weight.mask
        ids, count = weight.sequences
        outliers = segment_reduce(outside.long(), ids, count)
        return drop(weight, (outliers == 0)[ids])

    return masked


def _of_sequence(weight: BehaviorWeight, statistic: SequenceStatistic) -> BehaviorWeight:
    logs = statistic(weight.log_ratio, weight.mask, weight.sequences)
    return replace_weight(weight, positive_exp(logs)[weight.sequences.ids])
