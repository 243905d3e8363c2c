"""Which sequences of a minibatch share a micro-batch, and on which data-parallel rank.

    minibatch --balanced_parts--> ranks --dynamic_batches--> micro-batches within a token budget
                                        --in batch order---> equal numbers of sequences

The decisions are those of `areal_lab.control.microbatch`; here they are only counted. Against a
token budget lengths count in units of its 512th part, rounded up: packing time grows with the
longest length, and a simulation packs some hundred small batches per second. That leaves about
0.5 % of the room unused; a test compares the seconds with those of exact packing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from areal_lab.control.microbatch import balanced_parts, dynamic_batches

Values = NDArray[np.float64]
Parts = list[list[int]]

UNITS_PER_BUDGET = 512
"""Lengths are rounded up to this share of the token budget; budgets below are exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Sizes of the micro-batches of a batch: R = minibatches x ranks lanes, M micro-batches."""

    tokens: Values
    """That a micro-batch computes on, padding included, [R, M]."""
    pairs: Values
    """Of a token and one that it attends to, padding included, [R, M]."""
    own_tokens: Values
    """Without padding, [R, M]."""
    own_pairs: Values
    present: NDArray[np.bool_]
    """Micro-batches that there are, [R, M]; those of a lane come first."""


def minibatch_bounds(sequences: int, minibatches: int) -> list[int]:
    """Where the minibatches of a batch begin and end, in batch order, equal within one sequence."""
    return [sequences * one // minibatches for one in range(minibatches + 1)]


def cut_within_budget(
    lengths: Sequence[int] | NDArray[np.int64],
    *,
    ranks: int,
    minibatches: int,
    max_tokens: int,
    least: int,
    units_per_budget: int = UNITS_PER_BUDGET,
) -> list[Parts]:
    """For each minibatch and rank its micro-batches of at most `max_tokens` tokens.

    Args:
        lengths: of the sequences, in batch order.
        ranks: data parallel; they get nearly equal numbers of tokens.
        minibatches: of the batch.
        max_tokens: budget of a micro-batch.
        least: micro-batches per minibatch and rank, if there are as many sequences.
        units_per_budget: how finely lengths are told apart.

    Raises:
        ValueError: a sequence is longer than the budget, or a minibatch has fewer sequences than
            there are ranks.
    """
    sizes = np.asarray(lengths, np.int64)
    longest = int(sizes.max(initial=0))
    if longest > max_tokens:
        raise ValueError(
            f"a sequence of {longest} tokens exceeds trainer.micro_batch_tokens = {max_tokens}; "
            "raise it to at least that"
        )
    unit = max(1, max_tokens // units_per_budget)
    budget = max_tokens // unit
    # One that fills the budget but for less than a unit takes it all.
    rounded = np.minimum(-(-sizes // unit), budget).tolist()
    lanes = []
    for dealt in _dealt(rounded, ranks, minibatches):
        batches = dynamic_batches(
            list(map(rounded.__getitem__, dealt)), max_tokens=budget, min_batches=least
        )
        lanes.append([list(map(dealt.__getitem__, batch)) for batch in batches])
    return lanes


def cut_evenly(
    lengths: Sequence[int], *, ranks: int, minibatches: int, micro_batches: int
) -> list[Parts]:
    """For each minibatch and rank `micro_batches` of equal numbers of sequences, in batch order.

    Long sequences may meet in one micro-batch; fewer sequences than micro-batches give one each.
    """
    lanes = []
    for dealt in _dealt(lengths, ranks, minibatches):
        in_order = sorted(dealt)
        count = min(micro_batches, len(in_order))
        bounds = [len(in_order) * one // count for one in range(count + 1)]
        lanes.append([in_order[start:end] for start, end in pairwise(bounds)])
    return lanes


def measure(lanes: Sequence[Parts], lengths: NDArray[np.int64], *, padded: bool) -> Cut:
    """Tokens and attention pairs of each micro-batch.

    Args:
        lanes: micro-batches of each minibatch and rank, as indices into `lengths`.
        lengths: of the sequences.
        padded: every sequence of a micro-batch is filled up to the longest.
    """
    per_lane = np.fromiter(map(len, lanes), np.int64, len(lanes))
    batches = list(chain.from_iterable(lanes))
    sizes = np.fromiter(map(len, batches), np.int64, len(batches))
    order = np.fromiter(chain.from_iterable(batches), np.int64, int(sizes.sum()))
    starts = np.cumsum(sizes) - sizes
    chosen = lengths[order].astype(np.float64)
    own_tokens = np.add.reduceat(chosen, starts)
    own_pairs = np.add.reduceat(chosen * (chosen + 1) / 2, starts)
    tokens, pairs = own_tokens, own_pairs
    if padded:
        longest = np.maximum.reduceat(chosen, starts)
        tokens, pairs = sizes * longest, sizes * longest * (longest + 1) / 2
    present = np.arange(per_lane.max())[None, :] < per_lane[:, None]

    def spread(values: Values) -> Values:
        table = np.zeros(present.shape)
        table[present] = values
        return table

    return Cut(
        tokens=spread(tokens),
        pairs=spread(pairs),
        own_tokens=spread(own_tokens),
        own_pairs=spread(own_pairs),
        present=present,
    )


def _dealt(lengths: Sequence[int], ranks: int, minibatches: int) -> list[list[int]]:
    """Sequences of each minibatch and rank; of one minibatch all ranks, then of the next."""
    bounds = minibatch_bounds(len(lengths), minibatches)
    if bounds[1] < ranks:
        raise ValueError(
            f"a minibatch of {bounds[1]} sequences cannot keep {ranks} data-parallel ranks busy; "
            "take fewer minibatches or training GPUs, or more sequences per batch"
        )
    lanes = []
    for start, end in pairwise(bounds):
        place = range(start, end)
        for part in balanced_parts(lengths[start:end], ranks):
            lanes.append(list(map(place.__getitem__, part)))
    return lanes
