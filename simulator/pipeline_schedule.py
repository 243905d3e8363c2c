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
    present_last = present.T
    work = np.where(present_last, forward_s.T, 0.0), np.where(present_last, backward_s.T, 0.0)
    if stages == 1:
        return np.asarray((work[0] + work[1]).sum(axis=0))
    pipelines, count = present.shape
    # Passes of micro-batches that are not there take no time and reach nobody.
    forward, backward = (np.pad(one, ((stages, stages), (0, 0))) for one in work)
    hop = np.pad(
        np.where(present_last, hop_s.T, _NEVER),
        ((stages, stages), (0, 0)),
        constant_values=_NEVER,
    )
    free = np.zeros((stages, pipelines))
    # When a stage's next micro-batch reaches it: row s + 1 is of stage s, from the one before for
    # forward passes and from the one behind for backward passes.
    ahead = np.full((stages + 2, pipelines), _NEVER)
    behind = np.full((stages + 2, pipelines), _NEVER)
    for slot in range(2 * count + 2 * stages - 2):
        first = slot % 2  # stages first, first + 2, ... pass forward, the others back
        chosen = (stages - first + 1) // 2
        top = (slot - first) // 2 + stages
        rows = slice(top, top - chosen, -1)
        done = np.maximum(free[first::2], ahead[first + 1 : -1 : 2])
        done += forward[rows]
        free[first::2] = done
        ahead[first + 2 :: 2] = done + hop[rows]
        first = 1 - first
        chosen = (stages - first + 1) // 2
        top = (slot + first + 1) // 2
        rows = slice(top, top + chosen)
        done = np.maximum(free[first::2], behind[first + 1 : -1 : 2])
        done += backward[rows]
        free[first::2] = done
        behind[first : first + 2 * chosen : 2] = done + hop[rows]
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
