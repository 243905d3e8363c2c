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
"""From about which `lane_batches` takes less time than lane by lane: 10 us per step, and 0.5 us per
sequence there."""
_RADIX_SORTED: Final = (np.int8, np.int16)
"""NumPy sorts these stably in an eighth of the time that it takes for larger integers."""
_STEPS: Final = 16
"""After which it is looked how many micro-batches are open."""


def stable_order(values: Numbers, *, most: int) -> Numbers:
    """`argsort` along the last axis, equal values in their order; `most` is the largest size."""
    dtype = next((one for one in _RADIX_SORTED if most <= np.iinfo(one).max), np.int64)
    return np.argsort(values.astype(dtype), axis=-1, kind="stable")


def balanced_ranks(sizes: Numbers, ranks: int) -> Numbers:
    """The rank of each sequence of each minibatch, longest first, by the rule of `balanced_parts`.

    In a round of as many sequences as there are ranks, each rank gets one: the lightest rank the
    longest, and so on. That is what the rule says unless a rank is, with its sequence of the round,
    still lighter than another was before the round. Then `control` deals one by one.

    Args:
        sizes: of the sequences, [minibatches, sequences].
        ranks: of which each minibatch has as many.
    """
    minibatches, sequences = sizes.shape
    rounds = -(-sequences // ranks)
    # A rank's load and its number in one integer, as equal loads go by number. Nobody is behind
    # those that fill up the last round.
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
    overtaken = ((before + by_round).min(axis=2) < before[:, :, -1]).any(axis=0)
    for minibatch in np.flatnonzero(overtaken):
        for rank, part in enumerate(balanced_parts(sizes[minibatch].tolist(), ranks)):
            dealt[minibatch, part] = rank
    return dealt


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
    bits = size.bit_length()
    # Half as wide it takes a seventh less time.
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
            # Of a negative number the sign fills all bits: the largest key there is.
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
