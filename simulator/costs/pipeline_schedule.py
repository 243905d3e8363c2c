"""Duration of a pipeline with micro-batches of unequal length: 1F1B, and forward only.

    stage 0   F0 F1 F2 .. B0 F3 B1 ..       each stage has the same number of layers, so a
    stage 1      F0 F1 .. B0 F2 B1 ..       micro-batch takes equally long on every stage;
    ...                                     F_i waits for the stage before, B_i for the one after

Axes: R independent pipelines, M micro-batches in their order.
Source: 1F1B, PipeDream-flush (arXiv:2006.09503), as in Megatron-LM (arXiv:2104.04473).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
_NEVER = -np.inf
"""Arrival time of a message that does not exist."""


def one_forward_one_backward_s(
    forward_s: Values, backward_s: Values, present: NDArray[np.bool_], *, stages: int, hop_s: Values
) -> Values:
    """Seconds until the last backward pass is done, [R].

    Stage s runs `stages - s` micro-batches forward before the first one comes back, then
    alternates. M equal micro-batches take (M + stages - 1) (forward + backward): a bubble of
    (stages - 1) / M. Unequal ones also make neighbors wait for each other.

    The code gives each pass one slot: 2 i + s to F_i of stage s, and 2 i + 2 stages - 1 - s to B_i.
    A pass depends on a neighbor's previous slot and on earlier slots of its stage, so all stages
    and pipelines are computed together, slot by slot.

    Args:
        forward_s: seconds of a micro-batch on one stage, [R, M].
        backward_s: the same, including recomputation.
        present: which micro-batches exist; those of a pipeline come first, [R, M].
        stages: number of stages; 1 has no bubble.
        hop_s: seconds to send a micro-batch to the next stage, or its gradient back, [R, M].
    """
    there = present.T
    forward, backward = (np.where(there, one.T, 0.0) for one in (forward_s, backward_s))
    if stages == 1:
        return np.asarray((forward + backward).sum(axis=0))
    count, pipelines = there.shape
    slot, stage = np.ogrid[: 2 * count + 2 * stages - 2, :stages]
    is_forward = (slot - stage) % 2 == 0
    batch = np.where(is_forward, slot - stage, slot + stage + 1 - 2 * stages) // 2
    # Passes of micro-batches that do not exist take no time and send no message.
    batch = np.where((batch >= 0) & (batch < count), batch, count)
    nothing = np.zeros((1, pipelines))
    hop = np.concatenate([np.where(there, hop_s.T, _NEVER), nothing + _NEVER])[batch]
    work = np.concatenate([forward, nothing, backward, nothing])
    work = work[np.where(is_forward, batch, batch + count + 1)]
    free = np.zeros((stages, pipelines))
    # When the output of a stage reaches its neighbors; row s + 1 is for stage s. The next slot
    # waits for it: at the following stage after a forward pass, else at the preceding one.
    reached = np.full((stages + 2, pipelines), _NEVER)
    neighbors = [
        ((free[one::2], reached[one:stages:2]), (free[1 - one :: 2], reached[3 - one :: 2]))
        for one in (0, 1)
    ]
    for number in range(len(work)):
        for waits, message in neighbors[number % 2]:
            np.maximum(waits, message, out=waits)
        free += work[number]
        np.add(free, hop[number], out=reached[1:-1])
    return np.asarray(free.max(axis=0))


def forward_only_s(
    forward_s: Values, present: NDArray[np.bool_], *, stages: int, hop_s: Values
) -> Values:
    """Seconds until the last stage has finished the last micro-batch, [R].

    All stages take the same time for one micro-batch, so the others queue behind the longest: the
    sum of all, plus (stages - 1) times the longest with its hops.
    """
    work = np.where(present, forward_s, 0.0)
    longest = np.where(present, forward_s + hop_s, 0.0).max(axis=1, initial=0.0)
    return np.asarray(work.sum(axis=1) + (stages - 1) * longest)
