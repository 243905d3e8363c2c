"""Cut a batch into pieces: as many as a token budget asks for, or a given number of equal weight.

Lengths are tokens per sequence. Results hold indices into `lengths`, longest sequence first.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace


def dynamic_batches(
    lengths: Sequence[int], *, max_tokens: int, min_batches: int = 1
) -> list[list[int]]:
    """Micro-batches of at most `max_tokens` tokens each, in the order in which they were opened.

    Longest first, a sequence opens a new micro-batch while there are fewer than `min_batches` or
    none has room for it; otherwise it joins, among those with room, the one with the fewest
    sequences (the earliest opened of these). Fewer sequences than `min_batches` give one each.
    Source: AReaL (arXiv:2505.24298), Algorithm 1.

    O(n log n). As lengths only fall, a micro-batch that has room keeps it until it is chosen:
    those with room wait in a heap by (sequences, age), the others in a heap by room.

    Raises:
        ValueError: if a sequence is longer than `max_tokens`, or a number is below 1.
    """
    if min_batches < 1:
        raise ValueError(f"min_batches is {min_batches}, but must be >= 1")
    longest_first = _longest_first(lengths)
    if longest_first and lengths[longest_first[0]] > max_tokens:
        raise ValueError(
            f"a sequence of {lengths[longest_first[0]]} tokens exceeds max_tokens = {max_tokens}; "
            "raise max_tokens to it, or generate shorter answers"
        )
    batches: list[list[int]] = []
    room: list[int] = []
    # One integer per entry keeps heap comparisons cheap. `shift` exceeds every index: once one
    # beyond `min_batches` opens, all before it are more than half full.
    shift = max(min_batches, 2 * sum(lengths) // max_tokens + 2) + 1
    open_ones: list[int] = []  # sequences * shift + index of the micro-batch
    full_ones: list[int] = []  # -room * shift + index of the micro-batch
    widest = -1  # most room among `full_ones`, or -1
    for item in longest_first:
        length = lengths[item]
        while widest >= length:
            batch = heappop(full_ones) % shift
            heappush(open_ones, len(batches[batch]) * shift + batch)
            widest = -(full_ones[0] // shift) if full_ones else -1
        if open_ones and len(batches) >= min_batches:
            entry = open_ones[0]
            batch = entry % shift
            batches[batch].append(item)
            left = room[batch] - length
            room[batch] = left
            if left >= length:
                heapreplace(open_ones, entry + shift)
                continue
            heappop(open_ones)
        else:
            batch = len(batches)
            batches.append([item])
            left = max_tokens - length
            room.append(left)
            if left >= length:
                heappush(open_ones, shift + batch)
                continue
        heappush(full_ones, batch - left * shift)
        widest = max(widest, left)
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
    if lengths and min(lengths) < 1:
        raise ValueError(f"a sequence has {min(lengths)} tokens, but each must have >= 1")
    return sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
