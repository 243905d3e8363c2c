"""Divide the parameters of a policy among ranks, layer by layer (FSDP2).

Every rank holds its part of each parameter, gradient and moment. A layer is gathered before it
computes, forward and backward, and let go after it.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from areal_lab.training.forward import PackedPolicy


def shard_policy(policy: PackedPolicy, *, mesh: DeviceMesh) -> None:
    """Shard in place: each layer a unit, and the rest, tied or not, one more.

    Args:
        policy: whole, on its device, the same on every rank.
        mesh: one axis shards; of two axes, the first one copies.
    """
    for layer in layers_of(policy):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    # The rest too lets go after a pass: one without gradient would leave parameters that the
    # optimizer then does not reach.
    fully_shard(policy, mesh=mesh, reshard_after_forward=True)


def layers_of(policy: PackedPolicy) -> list[nn.Module]:
    """The modules that transformers names as not to be split."""
    names = policy.model._no_split_modules or ()
    return [module for module in policy.model.modules() if type(module).__name__ in names]
