"""Micro-batches: which sequences of a minibatch share one, and on which data-parallel rank.

    minibatch --balanced_parts--> ranks --dynamic_batches--> micro-batches within a token budget
                                        --in batch order---> equal numbers of sequences
    batch --equal numbers, balanced--> ranks --in batch order--> minibatches --> as above

The decisions are those of `areal_lab.control.microbatch`; here their sizes are computed. Lengths
are rounded up to units of 1/512 of the token budget, which leaves about 0.5 % of the room unused; a
test compares the micro-batches with exact packing. Sequences are indices into arrays, longest
first.

Vectorized packing: the rules of `areal_lab.control.microbatch` for many lanes at the same time.

    balanced_ranks   `balanced_parts`: all ranks of all minibatches, a round of sequences per step
    lane_batches     `dynamic_batches`: all lanes, the next sequence of each per step

Axes: T sequences of a lane, longest first; R lanes. Lengths are positive integers in any unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from areal_lab.control.microbatch import balanced_parts, dynamic_batches
from simulator import fast

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


Values = NDArray[np.float64]
Parts = list[list[int]]
Balance: TypeAlias = Literal["minibatch", "batch"]

UNITS_PER_BUDGET = 512
"""Lengths are rounded up to this fraction of the token budget; smaller budgets are exact."""


class Lanes(NamedTuple):
    """Micro-batches of R = minibatches x ranks lanes, lane by lane; no lane is empty."""

    order: Numbers
    """Indices of the sequences in the batch, by lane and micro-batch."""
    sequences: Numbers
    """Number of sequences of each micro-batch."""
    micro_batches: Numbers
    """Number of micro-batches of each lane."""

    def parts(self) -> list[Parts]:
        """Micro-batches as nested lists: lanes of micro-batches of indices."""
        ends = np.cumsum(self.sequences)
        batches = [one.tolist() for one in np.split(self.order, ends[:-1])]
        bounds = [0, *accumulate(self.micro_batches.tolist())]
        return [batches[start:end] for start, end in pairwise(bounds)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Sizes of the micro-batches of a batch: R = minibatches x ranks lanes, M micro-batches."""

    tokens: Values
    """Tokens of a micro-batch, with padding, [R, M]."""
    pairs: Values
    """(token, attended token) pairs of a micro-batch, with padding, [R, M]."""
    own_tokens: Values
    """Tokens without padding, [R, M]."""
    own_pairs: Values
    present: NDArray[np.bool_]
    """Which micro-batches exist, [R, M]; those of a lane come first."""


def minibatch_bounds(sequences: int, minibatches: int) -> list[int]:
    """Bounds of the minibatches of a batch, in batch order; sizes differ by at most one."""
    return [sequences * one // minibatches for one in range(minibatches + 1)]


def cut_within_budget(
    lengths: Sequence[int] | Numbers,
    *,
    ranks: int,
    minibatches: int,
    max_tokens: int,
    least: int,
    balance: Balance = "minibatch",
    units_per_budget: int = UNITS_PER_BUDGET,
) -> Lanes:
    """Micro-batches of at most `max_tokens` tokens, for each minibatch and rank.

    Args:
        lengths: lengths of the sequences, in batch order.
        ranks: data-parallel ranks; they get nearly equal numbers of tokens.
        max_tokens: budget of a micro-batch.
        least: fewest micro-batches per minibatch and rank, if there are that many sequences.
        balance: what ranks get nearly equal numbers of tokens of.
        units_per_budget: resolution of lengths.
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
    # A sequence that lacks less than a unit to the budget takes all of it.
    rounded = np.minimum(-(-sizes // unit), budget)
    if fast.in_use() and balance == "minibatch":
        from simulator.costs import packing_kernel

        check_ranks(len(sizes) // minibatches, ranks)
        of_minibatches = np.array(minibatch_bounds(len(sizes), minibatches))
        cut = packing_kernel.cut_within_budget(rounded, of_minibatches, ranks, budget, least)
        return Lanes(*cut)
    dealt, per_lane = _dealt(rounded, ranks, minibatches, balance)
    ordered = rounded[dealt]
    if len(per_lane) >= FEWEST_LANES:
        return _many_lanes(dealt, ordered, np.array(per_lane), budget, least)
    bounds = [0, *accumulate(per_lane)]
    lanes = [
        dynamic_batches(ordered[start:end].tolist(), max_tokens=budget, min_batches=least)
        for start, end in pairwise(bounds)
    ]
    return _lanes(dealt, per_lane, lanes)


def cut_evenly(
    lengths: Sequence[int] | Numbers,
    *,
    ranks: int,
    minibatches: int,
    micro_batches: int,
    balance: Balance = "minibatch",
) -> Lanes:
    """`micro_batches` with equal numbers of sequences for each minibatch and rank, in batch order.

    Several long sequences may share a micro-batch; no micro-batch is empty.
    """
    dealt, per_lane = _dealt(np.asarray(lengths, np.int64), ranks, minibatches, balance)
    in_order = [np.sort(lane) for lane in np.split(dealt, np.cumsum(per_lane)[:-1])]
    lanes = []
    for sequences in per_lane:
        count = min(micro_batches, sequences)
        bounds = [sequences * one // count for one in range(count + 1)]
        lanes.append([list(range(start, end)) for start, end in pairwise(bounds)])
    return _lanes(np.concatenate(in_order), per_lane, lanes)


def measure(lanes: Lanes, lengths: Numbers, *, padded: bool) -> Cut:
    """Tokens and attention pairs of each micro-batch."""
    sizes, per_lane = lanes.sequences, lanes.micro_batches
    # numpy takes places and counts as intp, which has 32 bits in a browser.
    starts = (np.cumsum(sizes) - sizes).astype(np.intp, copy=False)
    chosen = lengths[lanes.order].astype(np.float64)
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

    own = spread(own_tokens), spread(own_pairs)
    return Cut(
        tokens=spread(tokens) if padded else own[0],
        pairs=spread(pairs) if padded else own[1],
        own_tokens=own[0],
        own_pairs=own[1],
        present=present,
    )


def padded_alike(cut: Cut) -> Cut:
    """Sizes with all micro-batches padded to the longest; attention over padding is left out."""
    return replace(cut, tokens=np.where(cut.present, cut.own_tokens.max(initial=0.0), 0.0))


def check_ranks(fewest: int, ranks: int) -> None:
    """Refuse minibatches that leave data-parallel ranks without a sequence."""
    if fewest < ranks:
        raise ValueError(
            f"a minibatch has {fewest} sequences, but must have >= {ranks}, one per data-parallel "
            "rank; use fewer minibatches or training GPUs, or more sequences per batch"
        )


def _dealt(
    sizes: Numbers, ranks: int, minibatches: int, balance: Balance
) -> tuple[Numbers, list[int]]:
    """Sequences of each minibatch and rank, longest first, and the number of sequences per lane.

    All ranks of one minibatch come before the next minibatch.
    """
    check_ranks(len(sizes) // minibatches, ranks)
    if balance == "batch":
        return _dealt_once(sizes, ranks, minibatches)
    # Minibatches of equal size are assigned all at once.
    at_once = 1 if len(sizes) % minibatches else minibatches
    most = int(sizes.max(initial=0))
    dealt: list[Numbers] = []
    per_lane: list[int] = []
    for start, end in pairwise(minibatch_bounds(len(sizes), minibatches // at_once)):
        block = sizes[start:end].reshape(at_once, -1)
        firsts = np.arange(start, end, block.shape[1])[:, None]
        longest_first = stable_order(most - block, most=most)
        rank_of_each = balanced_ranks(np.take_along_axis(block, longest_first, axis=1), ranks)
        by_rank = stable_order(rank_of_each, most=ranks)
        dealt.append((np.take_along_axis(longest_first, by_rank, axis=1) + firsts).ravel())
        lanes = rank_of_each + ranks * np.arange(at_once)[:, None]
        per_lane += np.bincount(
            lanes.ravel().astype(np.intp, copy=False), minlength=ranks * at_once
        ).tolist()
    return np.concatenate(dealt), per_lane


def _dealt_once(sizes: Numbers, ranks: int, minibatches: int) -> tuple[Numbers, list[int]]:
    """Sequences of each rank, if ranks share the batch first and each cuts its own part, in batch
    order."""
    most = int(sizes.max(initial=0))
    longest_first = stable_order(most - sizes, most=most)
    rank_of_each = np.empty(len(sizes), np.int64)
    rank_of_each[longest_first] = balanced_ranks(sizes[None, longest_first], ranks, equal=True)[0]
    by_rank = stable_order(rank_of_each, most=ranks)
    counts = np.bincount(rank_of_each.astype(np.intp, copy=False), minlength=ranks)
    place = np.arange(len(sizes)) - np.repeat(np.cumsum(counts) - counts, counts)
    minibatch = np.empty(len(sizes), np.int64)
    minibatch[by_rank] = place * minibatches // np.repeat(counts, counts)
    lanes = minibatch * ranks + rank_of_each
    dealt = longest_first[stable_order(lanes[longest_first], most=minibatches * ranks)]
    per_lane = np.bincount(lanes.astype(np.intp, copy=False), minlength=minibatches * ranks)
    return dealt, per_lane.tolist()


def _lanes(dealt: Numbers, per_lane: Sequence[int], lanes: Sequence[Parts]) -> Lanes:
    """Lanes from the micro-batches of each, given as indices into the lane's part of `dealt`."""
    batches = list(chain.from_iterable(lanes))
    before = np.cumsum(per_lane) - per_lane
    places = _joined(batches) + np.repeat(before, np.asarray(per_lane, np.intp))
    return Lanes(
        order=dealt[places],
        sequences=np.fromiter(map(len, batches), np.int64, len(batches)),
        micro_batches=np.fromiter(map(len, lanes), np.int64, len(lanes)),
    )


def _many_lanes(
    dealt: Numbers, ordered: Numbers, per_lane: Numbers, budget: int, least: int
) -> Lanes:
    """Pack all lanes at once, within a budget; `ordered` are the lengths of `dealt`."""
    present = np.arange(per_lane.max()) < per_lane[:, None]
    lengths = np.zeros(present.shape, np.int64)
    lengths[present] = ordered
    batches = lane_batches(lengths.T.copy(), max_tokens=budget, min_batches=least).T
    micro_batches = np.where(present, batches, -1).max(axis=1) + 1
    before = np.cumsum(micro_batches) - micro_batches
    batch_of_each = (batches + before[:, None])[present]
    return Lanes(
        order=dealt[stable_order(batch_of_each, most=int(micro_batches.sum()))],
        sequences=np.bincount(batch_of_each.astype(np.intp, copy=False)),
        micro_batches=micro_batches,
    )


def _joined(parts: Parts) -> Numbers:
    return np.fromiter(chain.from_iterable(parts), np.int64, sum(map(len, parts)))
