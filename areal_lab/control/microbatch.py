"""Cut a batch into micro-batches by a token budget, or into a given number of balanced parts.

Lengths are tokens per sequence. Results hold indices into `lengths`, longest sequence first.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import accumulate, pairwise
from typing import Final


def dynamic_batches(  # noqa: PLR0912, PLR0915 - one loop, whose calls would be half of its time
    lengths: Sequence[int], *, max_tokens: int, min_batches: int = 1
) -> list[list[int]]:
    """Micro-batches of at most `max_tokens` tokens each, in the order in which they were opened.

    Longest first, a sequence opens a new micro-batch while there are fewer than `min_batches` or
    none has room for it; otherwise it joins, among those with room, the one with the fewest
    sequences (the earliest opened of these). Fewer sequences than `min_batches` give one each.
    Source: AReaL (arXiv:2505.24298), Algorithm 1.

    O(n log n). Since lengths decrease, a micro-batch that has room keeps it until it is chosen.
    Those with room are in a heap by (sequences, age), unless there is only one: it takes the next
    sequences, as many together as would fit at the length of the first. The others wait in a heap
    by room until a sequence is short enough.
    """
    if min_batches < 1:
        raise ValueError(f"min_batches is {min_batches}, but must be >= 1")
    order = _longest_first(lengths)
    if order and lengths[order[0]] > max_tokens:
        raise ValueError(
            f"a sequence of {lengths[order[0]]} tokens exceeds max_tokens = {max_tokens}; "
            "raise max_tokens to it, or generate shorter responses"
        )
    # An upper bound of batches: when one beyond `min_batches` opens, all others are over half full.
    most = max(min(min_batches, len(lengths)), 2 * sum(lengths) // max_tokens + 2) + 1
    batches = [[item] for item in order[:min_batches]]
    room = [max_tokens - lengths[item] for item in order[:min_batches]]
    # Pairs as one number are cheaper to compare: sequences * most + index, index - room * most.
    open_ones: list[int] = []
    waiting = [batch - left * most for batch, left in enumerate(room)]
    heapify(waiting)
    widest = max(room, default=0)  # room of the first in `waiting`
    # The only micro-batch with room, or the one that just got full: its members and room.
    alone = left = -1
    members: list[int] = []
    at, end = len(batches), len(order)
    while at < end:
        item = order[at]
        length = lengths[item]
        if not open_ones and widest < length:
            if left // length > _SEVERAL:
                stop = min(end, at + left // length)
                stop = bisect_left(order, -widest, at, stop, key=lambda one: -lengths[one])
                some = order[at:stop]
                members += some
                left -= sum([lengths[one] for one in some])
                at = stop
                continue
            if left >= length:
                members.append(item)
                left -= length
            else:
                if left > 0:
                    room[alone] = left
                    heappush(waiting, alone - left * most)
                    widest = left if left > widest else widest
                alone, left, members = len(batches), max_tokens - length, [item]
                batches.append(members)
                room.append(left)
            at += 1
            continue
        while widest >= length:
            batch = heappop(waiting) % most
            heappush(open_ones, len(batches[batch]) * most + batch)
            widest = -(waiting[0] // most) if waiting else 0
        if alone >= 0:
            room[alone] = left
            if left >= length:
                heappush(open_ones, len(members) * most + alone)
            elif left:
                heappush(waiting, alone - left * most)
                widest = left if left > widest else widest
            alone = left = -1
        entry = open_ones[0]
        batch = entry % most
        batches[batch].append(item)
        room[batch] = rest = room[batch] - length
        if rest >= length:
            heapreplace(open_ones, entry + most)
        else:
            heappop(open_ones)
            if rest:
                heappush(waiting, batch - rest * most)
                widest = rest if rest > widest else widest
        if len(open_ones) == 1:
            alone = open_ones.pop() % most
            members, left = batches[alone], room[alone]
        at += 1
    return batches


_SEVERAL: Final = 7
"""Number of sequences above which several are taken together, since the search for it then pays."""


def balanced_parts(
    lengths: Sequence[int], parts: int, *, equal_size: bool = False
) -> list[list[int]]:
    """Cut into `parts` parts of nearly equal tokens, for ranks that wait for each other.

    Longest first, each sequence joins the part with the fewest tokens (the first of these), so
    no part exceeds the mean by more than one sequence. No part is empty.
    Source: longest processing time first, Graham (1969), within 4/3 of the best.

    With `equal_size` every part gets the same number of sequences: a full part takes no more, so
    tokens are less balanced. verl has partitions of equal size for the same purpose, by
    Karmarkar-Karp differencing of rounds of sequences of similar length. Largest part over mean,
    for lognormal(8, 1) lengths: 64 parts of 64 sequences 1.002 (verl 1.19), 8 parts of 16 1.10
    (verl 1.28). For uniform lengths verl is up to 3 % better where parts have few sequences
    (8 parts of 4: 1.01 against 1.04).
    """
    if not 1 <= parts <= len(lengths):
        raise ValueError(
            f"parts is {parts}, but must be from 1 to the number of sequences, {len(lengths)}"
        )
    if equal_size and len(lengths) % parts:
        raise ValueError(
            f"cannot cut {len(lengths)} sequences into {parts} parts of equal size; the number of "
            f"sequences must be a multiple of parts: leave out {len(lengths) % parts} of them"
        )
    result: list[list[int]] = [[] for _ in range(parts)]
    appends = [part.append for part in result]
    lightest = list(range(parts))  # tokens * parts + index of the part
    heapify(lightest)
    if equal_size:
        for item in _longest_first(lengths):
            entry = heappop(lightest)
            appends[entry % parts](item)
            if len(result[entry % parts]) < len(lengths) // parts:
                heappush(lightest, entry + lengths[item] * parts)
        return result
    for item in _longest_first(lengths):
        entry = lightest[0]
        appends[entry % parts](item)
        heapreplace(lightest, entry + lengths[item] * parts)
    return result


def consecutive_parts(lengths: Sequence[int], parts: int) -> list[int]:
    """Sizes of `parts` runs of consecutive sequences that minimize the tokens of the largest
    run.

    No part is empty, and none exceeds the mean by a whole sequence. Less balanced than
    `balanced_parts`, but the sequences keep their order, so a part is one range of stored rows.

    O(parts log(sequences) log(tokens)): bisects the capacity at which greedy parts suffice.
    """
    if not 1 <= parts <= len(lengths):
        raise ValueError(
            f"parts is {parts}, but must be from 1 to the number of sequences, {len(lengths)}"
        )
    _check_positive(lengths)
    sums = list(accumulate(lengths, initial=0))

    def ends(capacity: int) -> list[int]:
        found, end = [], 0
        for left in range(parts - 1, -1, -1):
            filled = bisect_right(sums, sums[end] + capacity) - 1
            end = min(filled, len(lengths) - left)  # a sequence for each later part
            found.append(end)
        return found

    low = max(*lengths, -(-sums[-1] // parts))
    capacity = bisect_left(
        range(sums[-1] + 1), True, low, key=lambda c: ends(c)[-1] == len(lengths)
    )
    return [end - start for start, end in pairwise([0, *ends(capacity)])]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    _check_positive(lengths)
    return sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)


def _check_positive(lengths: Sequence[int]) -> None:
    if lengths and min(lengths) < 1:
        raise ValueError(f"a sequence has {min(lengths)} tokens, but each must have >= 1")
