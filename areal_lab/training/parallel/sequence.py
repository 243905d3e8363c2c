"""Divide the tokens of every micro-batch among ranks (Ulysses), which meet in attention.

Source: Jacobs et al., DeepSpeed-Ulysses (arXiv:2309.14509).
"""

from __future__ import annotations

from functools import partial

import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from areal_lab.data.sequence_part import SequencePart


def sequence_part(group: dist.ProcessGroup) -> SequencePart:
    """The part of this rank.

    Args:
        group: the ranks that divide the same sequences.
    """
    return SequencePart(
        rank=dist.get_rank(group),
        count=dist.get_world_size(group),
        exchange=partial(_exchange, group),
    )


def _exchange(group: dist.ProcessGroup, tensor: Tensor) -> Tensor:
    received: Tensor = all_to_all_single_autograd(tensor.contiguous(), None, None, group)
    return received
