"""Cut a batch into pieces: as many as a token budget asks for, or a given number of equal weight.

Lengths are tokens per sequence. Results hold indices into `lengths`, longest sequence first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace


def dynamic_batches(  # noqa: PLR0912, PLR0915 - one loop, whose calls would be half of its time
    lengths: Sequence[int], *, max_tokens: int, min_batches: int = 1
) -> list[list[int]]:
    """Micro-batches of at most `max_tokens` tokens each, in the order in which they were opened.

    Longest first, a sequence opens a new micro-batch while there are fewer than `min_batches` or
    none has room for it; otherwise it joins, among those with room, the one with the fewest
    sequences (the earliest opened of these). Fewer sequences than `min_batches` give one each.
    Source: AReaL (arXiv:2505.24298), Algorithm 1.

    O(n log n + longest). As lengths only fall, a micro-batch that has room keeps it until it is
    chosen. Those with room wait in a heap by (sequences, age), unless there is just one, which
    takes as many of a length as fit at once; the others wait in a table by room, and are found
    when lengths have fallen to it.

    Raises:
        ValueError: if a sequence is longer than `max_tokens`, or a number is below 1.
    """
    if min_batches < 1:
        raise ValueError(f"min_batches is {min_batches}, but must be >= 1")
    items_by_length = _items_by_length(lengths)
    longest = max(items_by_length, default=0)
    if longest > max_tokens:
        raise ValueError(
            f"a sequence of {longest} tokens exceeds max_tokens = {max_tokens}; "
            "raise max_tokens to it, or generate shorter answers"
        )
    batches: list[list[int]] = []
    # More than there can be: once one opens beyond `min_batches`, all before are over half full.
    most = max(min(min_batches, len(lengths)), 2 * sum(lengths) // max_tokens + 2) + 1
    room = [0] * most
    before = [-1] * most  # by micro-batch: the one that has waited longer with the same room
    newest = [-1] * (longest + 1)  # by room: the last micro-batch that waits with it
    open_ones: list[int] = []  # sequences * most + index: cheaper to compare than a pair
    # Beside the heap one more may have room (or be just full), with its members and room here.
    alone = left = -1
    members: list[int] = []
    above = longest
    for length in sorted(items_by_length, reverse=True):
        for last in newest[length:above]:
            batch = last
            while batch >= 0:
                heappush(open_ones, len(batches[batch]) * most + batch)
                batch = before[batch]
        above = length
        items = items_by_length[length]
        at, end = 0, len(items)
        while at < end:
            if not open_ones and len(batches) >= min_batches:
                if left < length:
                    if alone >= 0:
                        room[alone] = left
                        before[alone], newest[left] = newest[left], alone
                    alone, members, left = len(batches), [], max_tokens
                    batches.append(members)
                taken = items[at : at + left // length]
                members += taken
                left -= length * len(taken)
                at += len(taken)
                continue
            if alone >= 0:
                room[alone] = left
                if left >= length:
                    heappush(open_ones, len(members) * most + alone)
                else:
                    before[alone], newest[left] = newest[left], alone
                alone = left = -1
            if len(batches) < min_batches:
                batch = len(batches)
                batches.append([items[at]])
                left = max_tokens - length
                if left >= length:
                    heappush(open_ones, most + batch)
            else:
                entry = open_ones[0]
                batch = entry % most
                batches[batch].append(items[at])
                left = room[batch] - length
                if left >= length:
                    heapreplace(open_ones, entry + most)
                else:
                    heappop(open_ones)
            at += 1
            room[batch] = left
            if left < length:
                before[batch], newest[left] = newest[left], batch
            left = -1
            if len(open_ones) == 1 and len(batches) >= min_batches:
                alone = open_ones.pop() % most
                members, left = batches[alone], room[alone]
    return batches


def balanced_parts(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """`parts` parts with nearly the same number of tokens, for ranks that wait for each other.

    Longest first, each sequence joins the part with the fewest tokens (the first of these), so
    no part exceeds the mean by more than one sequence. None is empty.
    Source: longest processing time first, Graham (1969), within 4/3 of the best.

    Raises:
        ValueError: if there are fewer sequences than parts, or a number is below 1.
    """
    if not 1 <= parts <= len(lengths):
        raise ValueError(
            f"cannot cut {len(lengths)} sequences into {parts} parts; "
            "parts must be >= 1 and at most the number of sequences"
        )
    result: list[list[int]] = [[] for _ in range(parts)]
    lightest = list(range(parts))  # tokens * parts + index of the part
    heapify(lightest)
    for item in _longest_first(lengths):
        entry = lightest[0]
        result[entry % parts].append(item)
        heapreplace(lightest, entry + lengths[item] * parts)
    return result


def _longest_first(lengths: Sequence[int]) -> list[int]:
    _check_positive(lengths)
    return sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)


def _items_by_length(lengths: Sequence[int]) -> dict[int, list[int]]:
    _check_positive(lengths)
    items: defaultdict[int, list[int]] = defaultdict(list)
    for item, length in enumerate(lengths):
        items[length].append(item)
    return items


def _check_positive(lengths: Sequence[int]) -> None:
    if lengths and min(lengths) < 1:
        raise ValueError(f"a sequence has {min(lengths)} tokens, but each must have >= 1")
