"""Micro-batches: which sequences of a minibatch share one, and on which data-parallel rank.

    minibatch --balanced_parts--> ranks --dynamic_batches--> micro-batches within a token budget
                                        --in batch order---> equal numbers of sequences
    batch --equal numbers, balanced--> ranks --in batch order--> minibatches --> as above

The decisions are those of `areal_lab.control.microbatch`; here their sizes are computed. Lengths
are rounded up to units of 1/512 of the token budget, which leaves about 0.5 % of the room unused; a
test compares the micro-batches with exact packing. Sequences are indices into arrays, longest
first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from areal_lab.control.microbatch import dynamic_batches
from simulator.costs.packing import FEWEST_LANES, balanced_ranks, lane_batches, stable_order

Values = NDArray[np.float64]
Numbers = NDArray[np.int64]
Parts = list[list[int]]
Balance: TypeAlias = Literal["minibatch", "batch"]

UNITS_PER_BUDGET = 512
"""Lengths are rounded up to this fraction of the token budget; smaller budgets are exact."""


class Lanes(NamedTuple):
    """Micro-batches of R = minibatches x ranks lanes, lane by lane; no lane is empty."""

    order: Numbers
    """Indices of the sequences in the batch, by lane and micro-batch."""
    sequences: Numbers
    """Of each micro-batch."""
    micro_batches: Numbers
    """Of each lane."""

    def parts(self) -> list[Parts]:
        """The same as nested lists: lanes of micro-batches of indices."""
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
    # A sequence that lacks less than a unit to the budget takes all of it.
    rounded = np.minimum(-(-sizes // unit), budget)
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
    """Tokens and attention pairs of each micro-batch.

    Args:
        lanes: which sequences share a micro-batch.
        lengths: lengths of the sequences, in batch order.
        padded: pad every sequence of a micro-batch to the longest.
    """
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
    """The same with all micro-batches padded to the longest; attention over padding is left out."""
    return replace(cut, tokens=np.where(cut.present, cut.own_tokens.max(initial=0.0), 0.0))


def check_ranks(fewest: int, ranks: int) -> None:
    """Refuse minibatches that leave data-parallel ranks without a sequence.

    Args:
        fewest: number of sequences of the smallest minibatch.
        ranks: number of data-parallel ranks that share it.

    Raises:
        ValueError: one line, with the bound and a fix.
    """
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
    """The same, if ranks share the batch first and each cuts its own part, in batch order."""
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
    """From the micro-batches of each lane, given as indices into the lane's part of `dealt`."""
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
