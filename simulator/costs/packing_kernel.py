"""Packing and pipelines of training steps, compiled: the rules of `micro_batching` and
`training_timing`, one sequence and one pass at a time.

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


@njit(cache=True)
def one_forward_one_backward_s(
    forward: Any, backward: Any, hop: Any, there: Any, stages: Any
) -> Any:
    """`training_timing.one_forward_one_backward_s` for two stages or more, slot by slot.

    Args:
        forward: seconds of each micro-batch of each pipeline on one stage, [M, R].
        backward: the same of the backward pass.
        hop: seconds to the next stage or back.
        there: which micro-batches exist.
        stages: number of stages.
    """
    count, pipelines = there.shape
    ends = np.empty(pipelines)
    free, reached = np.empty(stages), np.empty(stages + 2)
    for pipeline in range(pipelines):
        free[:] = 0.0
        reached[:] = -np.inf
        for slot in range(2 * count + 2 * stages - 2):
            for stage in range(stages):
                if (slot - stage) % 2 == 0:  # forward: after the stage before
                    free[stage] = max(free[stage], reached[stage])
                else:
                    free[stage] = max(free[stage], reached[stage + 2])
            for stage in range(stages):
                is_forward = (slot - stage) % 2 == 0
                batch = slot - stage if is_forward else slot + stage + 1 - 2 * stages
                batch //= 2
                if 0 <= batch < count and there[batch, pipeline]:
                    passes = forward if is_forward else backward
                    free[stage] += passes[batch, pipeline]
                    reached[stage + 1] = free[stage] + hop[batch, pipeline]
                else:
                    reached[stage + 1] = -np.inf
        ends[pipeline] = free.max()
    return ends
