"""Packing and pipelines of training steps, compiled: the rules of `micro_batching` and
`training_timing`, one sequence and one pass at a time.

numba is the optional dependency `areal_lab[fast]`; `simulator.fast` decides whether this is used.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit


@njit(cache=True)
def cut_within_budget(  # noqa: PLR0912 - one pass, compiled
    sizes: Any, bounds: Any, ranks: Any, budget: Any, least: Any
) -> Any:
    """`micro_batching.cut_within_budget`, with the balance of each minibatch.

    Each sequence of a minibatch, the longest first, goes to the lightest rank, and there into the
    micro-batch with room that has the fewest sequences; the first of equals.

    Args:
        sizes: of the sequences, in batch order, at most `budget`.
        bounds: of the minibatches.
        ranks: of each minibatch.
        budget: of a micro-batch.
        least: fewest micro-batches per lane, if there are that many sequences.

    Returns:
        The fields of `Lanes`.
    """
    lanes = (len(bounds) - 1) * ranks
    longest_first = np.empty(len(sizes), np.int64)
    batch_of = np.empty(len(sizes), np.int64)
    opened = np.zeros(lanes, np.int64)
    load = np.empty(ranks, np.int64)
    place = np.empty(budget + 2, np.int64)
    most = np.diff(bounds).max()
    room, count = np.empty((ranks, most), np.int64), np.empty((ranks, most), np.int64)
    lane_of = np.empty(len(sizes), np.int64)
    for minibatch in range(len(bounds) - 1):
        first, end = bounds[minibatch], bounds[minibatch + 1]
        place[:] = 0
        for one in range(first, end):
            place[budget - sizes[one] + 1] += 1
        place[0] = first
        for size in range(1, budget + 2):
            place[size] += place[size - 1]
        for one in range(first, end):
            longest_first[place[budget - sizes[one]]] = one
            place[budget - sizes[one]] += 1
        load[:] = 0
        for one in longest_first[first:end]:
            rank, size = 0, sizes[one]
            for other in range(1, ranks):
                if load[other] < load[rank]:
                    rank = other
            load[rank] += size
            lane = minibatch * ranks + rank
            lane_of[one] = lane
            chosen = -1
            if opened[lane] >= least:
                for other in range(opened[lane]):
                    fits = room[rank, other] >= size
                    if fits and (chosen < 0 or count[rank, other] < count[rank, chosen]):
                        chosen = other
            if chosen < 0:
                chosen = opened[lane]
                room[rank, chosen], count[rank, chosen] = budget, 0
                opened[lane] += 1
            room[rank, chosen] -= size
            count[rank, chosen] += 1
            batch_of[one] = chosen
    before = np.cumsum(opened) - opened
    sequences = np.zeros(opened.sum(), np.int64)
    for one in range(len(sizes)):
        batch_of[one] += before[lane_of[one]]
        sequences[batch_of[one]] += 1
    starts = np.cumsum(sequences) - sequences
    order = np.empty(len(sizes), np.int64)
    for sequence in longest_first:
        order[starts[batch_of[sequence]]] = sequence
        starts[batch_of[sequence]] += 1
    return order, sequences, opened


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
