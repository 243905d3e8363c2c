"""The rules of `areal_lab.control.microbatch` for many lanes at a time: the same, in arrays.

    balanced_ranks   `balanced_parts`: all ranks of a minibatch, a round of sequences per step
    lane_batches     `dynamic_batches`: all lanes, the next sequence of each per step

Axes: T sequences of a lane, longest first; R lanes. Lengths are positive integers in any unit.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from areal_lab.control.microbatch import balanced_parts

Numbers = NDArray[np.int64]

FEWEST_LANES: Final = 24
"""From which `lane_batches` takes less time than lane by lane: 20 us per step, 0.8 us per sequence
there (`benchmarks/simulator.py`)."""
_STEPS: Final = 16
"""After which it is looked how many micro-batches are open."""


def balanced_ranks(sizes: Numbers, ranks: int) -> Numbers:
    """The rank of each sequence, longest first, by the rule of `balanced_parts`.

    In a round of as many sequences as there are ranks, each rank gets one: the lightest rank the
    longest, and so on. That is what the rule says unless a rank is, with its sequence of the round,
    still lighter than another was before the round. Then `control` deals one by one.
    """
    rounds = -(-len(sizes) // ranks)
    # A rank's load and its number in one integer, as equal loads go by number. Nobody is behind
    # those that fill up the last round.
    weights = np.full((rounds, ranks), (int(sizes.max(initial=0)) + 1) * ranks)
    weights.reshape(-1)[: len(sizes)] = sizes * ranks
    lightest_first = np.empty((rounds + 1, ranks), np.int64)
    lightest_first[0] = np.arange(ranks)
    before, after = lightest_first[:-1], lightest_first[1:]
    for load, weight, next_load in zip(before, weights, after, strict=True):
        np.add(load, weight, out=next_load)
        next_load.sort()
    if ((before + weights).min(axis=1) < before[:, -1]).any():
        rank_of_each = np.empty(len(sizes), np.int64)
        for rank, part in enumerate(balanced_parts(sizes.tolist(), ranks)):
            rank_of_each[part] = rank
        return rank_of_each
    return before.ravel()[: len(sizes)] % ranks


def lane_batches(lengths: Numbers, *, max_tokens: int, min_batches: int) -> Numbers:
    """The micro-batch of each sequence in its lane, [T, R], by the rule of `dynamic_batches`.

    A micro-batch is a row of a table with a column per lane. Among those with room it is the one
    with the smallest key that takes the next sequence:

        key = (sequences - 1) * unit + place in the table        unsigned: empty ones come last

    Args:
        lengths: of the sequences, [T, R]; shorter lanes end with zeros, whose micro-batch means
            nothing. None exceeds `max_tokens`.
        max_tokens: of a micro-batch.
        min_batches: as many sequences, the longest, get one each.
    """
    longest, lanes = lengths.shape
    first = min(min_batches, longest)
    # More than there can be: all but one that opened beyond `min_batches` are over half full.
    most = max(first, int((2 * lengths.sum(axis=0) // max_tokens + 2).max()))
    size = most * lanes
    unit = np.uint64(1 << size.bit_length())
    place_bits = unit - np.uint64(1)
    room = np.full(size, max_tokens)
    key = np.arange(size, dtype=np.uint64) - unit
    begun = first * lanes
    room[:begun] -= lengths[:first].ravel()
    key[:begun] += unit
    taken = np.empty((longest, lanes), np.uint64)
    taken[:first] = key[:begun].reshape(first, lanes)
    table = np.empty((most, lanes), np.int64)
    opened = first
    for start in range(first, longest, _STEPS):
        end, rows = min(start + _STEPS, longest), min(opened + _STEPS, most)
        rooms, keys = room.reshape(most, lanes)[:rows], key.reshape(most, lanes)[:rows]
        left = table[:rows]
        allowed = left.view(np.uint64)
        for length, chosen in zip(lengths[start:end], taken[start:end], strict=True):
            # Of a negative number the sign fills all bits: the largest key there is.
            np.subtract(rooms, length, out=left)
            np.right_shift(left, 63, out=left)
            np.bitwise_or(allowed, keys, out=allowed)
            np.minimum.reduce(allowed, axis=0, out=chosen)
            place = (chosen & place_bits).view(np.int64)
            room[place] -= length
            key[place] = chosen + unit
        opened = max(opened, int((taken[start:end] & place_bits).max()) // lanes + 1)
    return np.asarray((taken & place_bits).view(np.int64) // lanes)
