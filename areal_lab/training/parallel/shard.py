"""Divide the parameters of a policy among ranks, layer by layer (FSDP2, and tensor parallel).

Every rank holds its part of each parameter, gradient and moment. A layer is gathered before it
computes, forward and backward, and let go after it. Offloaded parts, gradients and moments are in
main memory between these times, and the optimizer steps there.

Where ranks divide the matrices of layers as well, a shard is one of such a part.
"""

from __future__ import annotations

from typing import Final

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from areal_lab.training.forward import PackedPolicy, PackedValues
from areal_lab.training.layers.compiling import decoder_layers
from areal_lab.training.parallel.tensor import divide_ends, divide_layer

TENSOR: Final = "tensor"
"""The axis of a mesh that divides matrices; the others are FSDP's."""


def shard_policy(
    policy: PackedPolicy | PackedValues, *, mesh: DeviceMesh, offload: bool = False
) -> None:
    """Shard in place: each layer a unit, and the rest, tied or not, one more.

    Args:
        policy: whole, the same on every rank.
        mesh: `shards`, with `copies` of these before it and `tensor` after it, if there are any.
        offload: keep the parts in main memory.
    """
    # A CPU build of torch has no pinned memory.
    kept = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    axes = mesh.mesh_dim_names or ()
    tensor = mesh[TENSOR] if TENSOR in axes else None
    shards = mesh[tuple(name for name in axes if name != TENSOR)]
    for layer in decoder_layers(policy.model):
        if tensor is not None:
            divide_layer(layer, tensor)
        fully_shard(layer, mesh=shards, reshard_after_forward=True, offload_policy=kept)
    if tensor is not None:
        divide_ends(policy, tensor)
    policy.always_sees = True
    # The rest too lets go after a pass: one without gradient would leave parameters that the
    # optimizer then does not reach.
    fully_shard(policy, mesh=shards, reshard_after_forward=True, offload_policy=kept)
