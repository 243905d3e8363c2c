"""Vectorized packing: the rules of `areal_lab.control.microbatch` for many lanes at the same time.

    balanced_ranks   `balanced_parts`: all ranks of all minibatches, a round of sequences per step
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
"""Lanes from which `lane_batches` is faster than packing lane by lane: a step takes 10 us, and a
sequence 0.5 us when packed alone."""
_RADIX_SORTED: Final = (np.int8, np.int16)
"""NumPy's stable sort is 8 times faster for these than for larger integers."""
_STEPS: Final = 16
"""Steps between two counts of the open micro-batches."""


def stable_order(values: Numbers, *, most: int) -> Numbers:
    """Stable `argsort` along the last axis; `most` is the largest value."""
    dtype = next((one for one in _RADIX_SORTED if most <= np.iinfo(one).max), np.int64)
    return np.argsort(values.astype(dtype), axis=-1, kind="stable")


def balanced_ranks(sizes: Numbers, ranks: int, *, equal: bool = False) -> Numbers:
    """The rank of each sequence of each minibatch, longest first, by the rule of `balanced_parts`.

    In each round of `ranks` sequences, each rank gets one: the lightest rank gets the longest, and
    so on. This equals the rule unless a rank, with its sequence of the round, is still lighter than
    another rank was before the round. In that case `control` assigns the sequences one by one.

    Args:
        sizes: sizes of the sequences, [minibatches, sequences].
        ranks: number of ranks of each minibatch.
        equal: keep to the rounds in any case, so that all ranks get equal numbers of sequences.
    """
    minibatches, sequences = sizes.shape
    rounds = -(-sequences // ranks)
    # One integer holds a rank's load and number, because equal loads are ordered by number. Huge
    # weights fill up the last round.
    weights = np.full((minibatches, rounds * ranks), (int(sizes.max(initial=0)) + 1) * ranks)
    weights[:, :sequences] = sizes * ranks
    by_round = weights.reshape(minibatches, rounds, ranks).transpose(1, 0, 2).copy()
    lightest_first = np.empty((rounds + 1, minibatches, ranks), np.int64)
    lightest_first[0] = np.arange(ranks)
    before, after = lightest_first[:-1], lightest_first[1:]
    for load, weight, next_load in zip(before, by_round, after, strict=True):
        np.add(load, weight, out=next_load)
        next_load.sort()
    dealt = (before % ranks).transpose(1, 0, 2).reshape(minibatches, -1)[:, :sequences]
    if equal:
        return dealt
    overtaken = ((before + by_round).min(axis=2) < before[:, :, -1]).any(axis=0)
    for minibatch in np.flatnonzero(overtaken):
        for rank, part in enumerate(balanced_parts(sizes[minibatch].tolist(), ranks)):
            dealt[minibatch, part] = rank
    return dealt


def lane_batches(lengths: Numbers, *, max_tokens: int, min_batches: int) -> Numbers:
    """The micro-batch of each sequence in its lane, [T, R], by the rule of `dynamic_batches`.

    Micro-batches are rows of a table with a column per lane. The next sequence goes into the
    micro-batch with room that has the smallest key:

        key = (sequences - 1) * unit + place in the table        unsigned: empty ones come last

    Args:
        lengths: of the sequences, [T, R], at most `max_tokens`; shorter lanes end with zeros, whose
            micro-batch is meaningless.
        max_tokens: budget of a micro-batch.
        min_batches: the longest `min_batches` sequences get one micro-batch each.
    """
    longest, lanes = lengths.shape
    first = min(min_batches, longest)
    # Upper bound: all but one of those opened beyond `min_batches` are over half full.
    most = max(first, int((2 * lengths.sum(axis=0) // max_tokens + 2).max()))
    size = most * lanes
    bits = size.bit_length()
    # Half as wide integers take a seventh less time.
    narrow = max(max_tokens, (longest + 1) << bits) < 1 << 31
    signed, unsigned = (np.int32, np.uint32) if narrow else (np.int64, np.uint64)
    sign = 31 if narrow else 63
    lengths = lengths.astype(signed)
    unit = unsigned(1 << bits)
    place_bits = unsigned(unit - 1)
    room = np.full(size, max_tokens, signed)
    key = np.arange(size, dtype=unsigned) - unit
    begun = first * lanes
    room[:begun] -= lengths[:first].ravel()
    key[:begun] += unit
    taken = np.empty((longest, lanes), unsigned)
    taken[:first] = key[:begun].reshape(first, lanes)
    table = np.empty((most, lanes), signed)
    chosen_place, next_key = np.empty(lanes, np.uint64), np.empty(lanes, unsigned)
    place = chosen_place.view(np.int64)
    opened = first
    for start in range(first, longest, _STEPS):
        end, rows = min(start + _STEPS, longest), min(opened + _STEPS, most)
        rooms, keys = room.reshape(most, lanes)[:rows], key.reshape(most, lanes)[:rows]
        left = table[:rows]
        allowed = left.view(unsigned)
        for length, chosen in zip(lengths[start:end], taken[start:end], strict=True):
            # The sign of a negative number fills all bits, which makes the largest possible key.
            np.subtract(rooms, length, out=left)
            np.right_shift(left, sign, out=left)
            np.bitwise_or(allowed, keys, out=allowed)
            np.minimum.reduce(allowed, axis=0, out=chosen)
            np.bitwise_and(chosen, place_bits, out=chosen_place)
            np.add(chosen, unit, out=next_key)
            room[place] -= length
            key[place] = next_key
        opened = max(opened, int((taken[start:end] & place_bits).max()) // lanes + 1)
    return np.asarray((taken & place_bits).astype(np.int64) // lanes)
