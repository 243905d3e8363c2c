"""The packing of `simulator.costs.micro_batching`, compiled: the same rules, one sequence at a time.

numba is the optional dependency `areal_lab[fast]`; `simulator.fast` decides whether this is used.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit


@njit(cache=True)
def balanced_ranks(sizes: Any, ranks: Any) -> Any:
    """`micro_batching.balanced_ranks`: each sequence to the lightest rank, the lowest of equals."""
    dealt = np.empty(sizes.shape, np.int64)
    load = np.empty(ranks, np.int64)
    for minibatch in range(sizes.shape[0]):
        load[:] = 0
        for sequence in range(sizes.shape[1]):
            lightest = 0
            for rank in range(1, ranks):
                if load[rank] < load[lightest]:
                    lightest = rank
            dealt[minibatch, sequence] = lightest
            load[lightest] += sizes[minibatch, sequence]
    return dealt


@njit(cache=True)
def lane_batches(lengths: Any, max_tokens: Any, min_batches: Any) -> Any:
    """`micro_batching.lane_batches`: the emptiest micro-batch with room, the first of equals."""
    longest, lanes = lengths.shape
    batches = np.zeros((longest, lanes), np.int64)
    room, count = np.empty(longest, np.int64), np.empty(longest, np.int64)
    for lane in range(lanes):
        opened = 0
        for sequence in range(longest):
            length = lengths[sequence, lane]
            if not length:
                break
            chosen = -1
            if sequence >= min_batches:
                for one in range(opened):
                    if room[one] >= length and (chosen < 0 or count[one] < count[chosen]):
                        chosen = one
            if chosen < 0:
                chosen = opened
                room[chosen], count[chosen] = max_tokens, 0
                opened += 1
            room[chosen] -= length
            count[chosen] += 1
            batches[sequence, lane] = chosen
    return batches
