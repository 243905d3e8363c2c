"""How long a pipeline takes for micro-batches of unequal length: 1F1B, and forward only.

    stage 0   F0 F1 F2 .. B0 F3 B1 ..       each stage has the same share of the layers, so a
    stage 1      F0 F1 .. B0 F2 B1 ..       micro-batch takes equally long on every one
    ...                                     F_i waits for F_i before, B_i for B_i behind

Axes: R pipelines at a time (they do not know of each other), M micro-batches in their order.
Source: 1F1B, PipeDream-flush (arXiv:2006.09503), as in Megatron-LM (arXiv:2104.04473).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
_NEVER = -np.inf
"""When nothing arrives that anyone would have to wait for."""


def one_forward_one_backward_s(
    forward_s: Values, backward_s: Values, present: NDArray[np.bool_], *, stages: int, hop_s: Values
) -> Values:
    """Seconds until the last backward pass is done, [R].

    A stage holds `stages - own number` micro-batches forward before the first one comes back, then
    alternates. For M equal ones this is (M + stages - 1) (forward + backward): a bubble of
    (stages - 1) / M. Unequal ones make neighbors wait for each other as well.

    In the drawing below every pass takes one slot, F_i of stage s the slot 2 i + s and B_i the
    slot 2 i + 2 stages - 1 - s. A pass depends on the slot before at a neighbor and on earlier
    slots of its own stage, so slot by slot all stages and pipelines go forward together.

    Args:
        forward_s: of a micro-batch on one stage, [R, M].
        backward_s: likewise, with what is recomputed.
        present: the micro-batches that there are; each pipeline's come first, [R, M].
        stages: of the pipeline; 1 has no bubble.
        hop_s: to send a micro-batch to the next stage, or its gradient back, [R, M].
    """
    there = present.T
    forward, backward = (np.where(there, one.T, 0.0) for one in (forward_s, backward_s))
    if stages == 1:
        return np.asarray((forward + backward).sum(axis=0))
    count, pipelines = there.shape
    slot, stage = np.ogrid[: 2 * count + 2 * stages - 2, :stages]
    is_forward = (slot - stage) % 2 == 0
    batch = np.where(is_forward, slot - stage, slot + stage + 1 - 2 * stages) // 2
    # Passes of micro-batches that are not there take no time and reach nobody.
    batch = np.where((batch >= 0) & (batch < count), batch, count)
    nobody = np.zeros((1, pipelines))
    hop = np.concatenate([np.where(there, hop_s.T, _NEVER), nobody + _NEVER])[batch]
    work = np.concatenate([forward, nobody, backward, nobody])
    work = work[np.where(is_forward, batch, batch + count + 1)]
    free = np.zeros((stages, pipelines))
    # When what a stage has done reaches its neighbors: row s + 1 is of stage s. Each is awaited in
    # the very next slot: by the stage behind if it was a forward pass, else by the one before.
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
    """Seconds until the last stage is done with the last micro-batch, [R].

    All stages take the same time for one micro-batch, so the others queue behind the longest: sum
    of all + (stages - 1) times the longest, its hops included.
    """
    work = np.where(present, forward_s, 0.0)
    longest = np.where(present, forward_s + hop_s, 0.0).max(axis=1, initial=0.0)
    return np.asarray(work.sum(axis=1) + (stages - 1) * longest)
