"""How returns treat holes: masked tokens between those that the policy chose.

mask                 1 1 0 0 1 1 1 . .      0: a tool's output; .: padding
carry_over_holes     |<----------|          the hole is not there
restart_at_holes     |<| . . |<--|          each run of chosen tokens by itself
last_unmasked        - - - - - - 1 - -      where a reward for the sequence belongs
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn.functional import pad

from areal_lab.functional.segments import (
    Segments,
    segment_reduce,
    sequences_or_rows,
)

Holes: TypeAlias = Callable[[Tensor, Segments | None], Tensor | None]
"""`(mask, sequences) -> True at tokens after which nothing counts`; None is True nowhere."""


def carry_over_holes(
    mask: Bool[Tensor, "*shape"],  # noqa: ARG001 - part of the signature
    sequences: Segments | None = None,  # noqa: ARG001 - part of the signature
) -> None:
    """Leave holes out: the token before a hole is followed by the token after it.

    Source: GAE of AReaL, verl and NeMo-RL.
    """
    return


def restart_at_holes(
    mask: Bool[Tensor, "*shape"], sequences: Segments | None = None
) -> Bool[Tensor, "*shape"]:
    """Cut at holes: the token before a hole is the last of its episode, with nothing after it.

    Masked tokens after the last chosen one (padding) are no hole, so what lies beyond the
    sequence still counts.

    Source: REINFORCE++ of SkyRL.
    """
    last = last_unmasked(mask, sequences)
    followed = pad(mask[..., 1:], (0, 1)) if mask.numel() else mask
    return mask & ~followed & ~last


def last_unmasked(
    mask: Bool[Tensor, "*shape"], segments: Segments | None = None
) -> Bool[Tensor, "*shape"]:
    """True at the last unmasked token of each segment; nowhere in one without such a token.

    Args:
        segments: sequences or turns; their tokens need not be neighbors. None takes rows.

    Source: definition.

    Raises:
        ValueError: as `sequences_or_rows`.
    """
    ids, count = sequences_or_rows(mask, segments)
    order = torch.arange(mask.numel(), device=mask.device).reshape(mask.shape)
    last = segment_reduce(order, ids, count, mask=mask, reduce="max")
    return mask & (order == last[ids])
