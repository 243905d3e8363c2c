"""Divide training among ranks: parameters (FSDP2), matrices (tensor parallel), tokens (Ulysses).

Process group of the trainer's ranks, with the functions that a step needs.

    RankPlace --join--> Ranks ... leave

A rank that waits for the others longer than the timeout raises, as does one whose peer is gone.
Only a clean end leaves the group: with a peer that failed, leaving would wait for it.

Divide the tokens of every micro-batch among ranks (Ulysses), which meet in attention.

Source: Jacobs et al., DeepSpeed-Ulysses (arXiv:2309.14509).

Divide the parameters of a policy among ranks, layer by layer (FSDP2, and tensor parallel).

Every rank has its part of each parameter, gradient and moment. A layer is gathered before it
computes, forward and backward, and freed after it. Offloaded parts, gradients and moments are in
main memory between these times, and the optimizer steps there.

Where ranks divide the matrices of layers as well, a shard is one of such a part.

Divide the matrices of decoder layers among ranks (tensor parallel), in transformers' modules.

    hidden --> norm --> q, k, v  by heads    --> attention  --> o     --sum over ranks--> + hidden
           --> norm --> gate, up by width    --> their product --> down  --sum--------> + hidden

    embedding, output layer    by tokens of the vocabulary

Hidden states are whole on every rank, and so are the weights of norms. These are distributed
tensors too, since a norm of gradients takes one kind of tensors. Layers of Llama, Qwen2 and Qwen3;
degrees divide heads, key-value heads, the width of the feed-forward network and the vocabulary.

Source: Shoeybi et al., Megatron-LM (arXiv:1909.08053).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore, Store
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from areal_lab.data.batch import SequencePart
from areal_lab.engines.weights.group import connect, gloo_on_loopback, open_store
from areal_lab.functional.logprobs.tiles import VocabularyPart
from areal_lab.training.decoder_layers import decoder_layers, fuse_norms
from areal_lab.training.forward import PackedPolicy, PackedValues
from areal_lab.training.model import VALUE_HEAD
from areal_lab.training.ranks import Ranks

_TCP: Final = "tcp://"
_START: Final = timedelta(minutes=5)
"""Timeout for the other ranks to start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """One process of a trainer."""

    rank: int
    count: int
    shards: int
    """Ranks that share one copy of the parameters, or of the part of each that is theirs; divides
    `count / tensor`."""
    tensor: int = 1
    """Ranks that divide every layer among them (tensor parallel); neighbors."""
    context: int = 1
    """Ranks that divide every sequence among them (Ulysses); neighbors."""
    device: str
    """`cpu` or `cuda`, of which the process sees one."""
    rendezvous: str
    """Meeting point of the ranks: a new file for each group on a shared disk, or
    `tcp://ADDRESS:PORT` of rank 0's host."""
    timeout_s: float
    """Longest wait of a collective."""

    @property
    def together(self) -> int:
        """Ranks that compute the same groups: one data rank."""
        return self.tensor * self.context


class PeersMissing(RuntimeError):
    """A rank ran into its timeout while it waited for others; the message names the setting."""


@contextmanager
def waiting_at_most(timeout_s: float) -> Iterator[None]:
    """Name the setting if a collective ran into its timeout.

    Backends raise plain errors then, so the elapsed time decides.
    """
    start_s = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        if time.monotonic() - start_s < timeout_s:
            raise
        raise PeersMissing(
            f"waited {timeout_s:g} s for the other trainer processes (actor.collective_timeout_s); "
            "one of them hangs, see its log trainer*.log, or needs longer: "
            f"{str(error).splitlines()[0]}"
        ) from error


def join(place: RankPlace) -> Ranks:
    """Meet the other ranks; returns when all are there."""
    timeout = timedelta(seconds=place.timeout_s)
    if place.device == "cuda":
        torch.cuda.set_device(0)  # before anything is allocated
    with gloo_on_loopback():  # unless the ranks are on several hosts
        dist.init_process_group(
            # Objects and counts travel over gloo also where tensors do not.
            "cpu:gloo,cuda:nccl" if place.device == "cuda" else "gloo",
            store=_store(place),
            rank=place.rank,
            world_size=place.count,
            timeout=max(timeout, _START),
        )
        mesh = _mesh(place)
        ranks = torch.arange(place.count).view(-1, place.together)
        data = _one_of(ranks.T) if place.together > 1 else _everyone()
        sequence = _one_of(ranks) if place.context > 1 else None
    for group in (dist.group.WORLD, data, sequence, *mesh.get_all_groups()):
        if group is not None:
            _set_pg_timeout(timeout, group)
    return Ranks(
        rank=place.rank,
        count=place.count,
        data_rank=place.rank // place.together,
        data_count=place.count // place.together,
        most=_most,
        total=partial(_total, data),
        whole=_whole,
        collect=partial(_collect, place, data),
        announce=partial(_announce, place),
        shard=partial(_shard, mesh, sequence),
    )


def _store(place: RankPlace) -> Store:
    if not place.rendezvous.startswith(_TCP):
        return FileStore(place.rendezvous, place.count)
    address, _, port = place.rendezvous.removeprefix(_TCP).rpartition(":")
    seconds = _START.total_seconds()
    if place.rank == 0:
        return open_store(address, int(port), timeout_s=seconds)
    return connect(address, int(port), timeout_s=seconds)


def another_group(timeout_s: float) -> dist.ProcessGroup:
    """Second group of all ranks, on the CPU, for a thread that works in parallel to the first
    one.
    """
    with gloo_on_loopback():
        group: dist.ProcessGroup = dist.new_group(
            backend="gloo", timeout=timedelta(seconds=timeout_s)
        )
    return group


def leave() -> None:
    """Leave the group, together with the others."""
    dist.destroy_process_group()


def _mesh(place: RankPlace) -> DeviceMesh:
    """Axes of the parameters: copies of shards of parts of layers, each if it exists."""
    sizes = {
        "copies": place.count // (place.shards * place.tensor),
        "shards": place.shards,
        TENSOR: place.tensor,
    }
    axes = {name: size for name, size in sizes.items() if size > 1 or name == "shards"}
    return init_device_mesh(place.device, tuple(axes.values()), mesh_dim_names=tuple(axes))


def _one_of(rows: Tensor) -> dist.ProcessGroup:
    """Create a group of each of these rows of ranks; return the one with this rank."""
    mine: dist.ProcessGroup
    mine, _ = dist.new_subgroups_by_enumeration(rows.tolist())
    return mine


def _everyone() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None, "initialized before"
    return dist.group.WORLD


def _shard(
    mesh: DeviceMesh,
    sequence: dist.ProcessGroup | None,
    policy: PackedPolicy | PackedValues,
    *,
    offload: bool = False,
) -> None:
    shard_policy(policy, mesh=mesh, offload=offload)
    if sequence is not None:
        policy.sequence = sequence_part(sequence)


def _most(number: int) -> int:
    largest = torch.tensor(number)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def _total(data: dist.ProcessGroup, tensor: Tensor) -> Tensor:
    summed = tensor.clone()
    dist.all_reduce(summed, group=data)
    return summed


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _collect(place: RankPlace, data: dist.ProcessGroup, value: Any) -> list[Any]:
    first = place.rank % place.together  # of this group
    values: list[Any] = [None] * dist.get_world_size(data)
    dist.gather_object(value, values if place.rank == first else None, dst=first, group=data)
    return [] if place.rank else values


def _announce(place: RankPlace, value: Any) -> Any:
    box = [value if place.rank == 0 else None]
    dist.broadcast_object_list(box)
    return box[0]


def sequence_part(group: dist.ProcessGroup) -> SequencePart:
    """The part of this rank."""
    return SequencePart(
        rank=dist.get_rank(group),
        count=dist.get_world_size(group),
        exchange=partial(_exchange, group),
    )


def _exchange(group: dist.ProcessGroup, tensor: Tensor) -> Tensor:
    received: Tensor = all_to_all_single_autograd(tensor.contiguous(), None, None, group)
    return received


TENSOR: Final = "tensor"
"""Axis of a mesh that divides matrices; the others are FSDP's."""


def shard_policy(
    policy: PackedPolicy | PackedValues, *, mesh: DeviceMesh, offload: bool = False
) -> None:
    """Shard in place: each layer a unit, and the rest, tied or not, one more.

    The shards of one rank are whole. They are gathered all the same: from main memory, or in the
    type that the policy computes with, which then are copies of float32 shards.

    Args:
        mesh: `shards`, with `copies` of these before it and `tensor` after it, if there are any.
    """
    # A CPU build of torch has no pinned memory.
    kept = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    working = MixedPrecisionPolicy()
    if policy.param_dtype != torch.float32:
        fuse_norms(policy.model)
        # Gradients of micro-batches and ranks are summed in float32. Token ids are not to be cast.
        working = MixedPrecisionPolicy(
            param_dtype=policy.param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    axes = mesh.mesh_dim_names or ()
    tensor = mesh[TENSOR] if TENSOR in axes else None
    shards = mesh[tuple(name for name in axes if name != TENSOR)]
    shard_unit = partial(
        fully_shard, mesh=shards, reshard_after_forward=True, offload_policy=kept, mp_policy=working
    )
    for layer in decoder_layers(policy.model):
        if tensor is not None:
            divide_layer(layer, tensor)
        shard_unit(layer)
    if tensor is not None:
        divide_ends(policy, tensor)
    if working.param_dtype is not None and hasattr(policy.model, VALUE_HEAD):
        # Values in bfloat16 would have three digits.
        shard_unit(policy.model.get_submodule(VALUE_HEAD), mp_policy=MixedPrecisionPolicy())
    policy.always_sees = True
    # The rest too lets go after a pass: one without gradient would leave parameters that the
    # optimizer then does not reach.
    shard_unit(policy)


class _Whole(ParallelStyle):
    """Weights that every rank has whole, in a module whose input may be divided."""

    def __init__(self, inputs: Placement) -> None:
        super().__init__()
        self.inputs = inputs

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def distributed(_: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> Any:
            return tuple(
                DTensor.from_local(one, mesh, [self.inputs], run_check=False) for one in inputs
            )

        def local(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:  # noqa: ARG001 - torch's
            return output.to_local()

        # Without a partition function, parameters are replicated. torch types both functions as
        # if they returned nothing.
        return distribute_module(module, device_mesh, input_fn=distributed, output_fn=local)


def divide_layer(layer: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the matrices of a decoder layer, in place."""
    # One sum of gradients for all readers of an input, rather than one for each.
    attention: dict[str, Placement] = {"hidden_states": Replicate()}
    plan: dict[str, ParallelStyle] = {
        "input_layernorm": _Whole(Replicate()),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts=attention, desired_input_kwarg_layouts=attention
        ),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.q_norm": _Whole(Shard(2)),
        "self_attn.k_norm": _Whole(Shard(2)),
        "self_attn.o_proj": RowwiseParallel(),
        "post_attention_layernorm": _Whole(Replicate()),
        "mlp": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }
    names = {name for name, _ in layer.named_modules()}
    _parallelize(layer, mesh, {name: style for name, style in plan.items() if name in names})


def divide_ends(policy: PackedPolicy | PackedValues, mesh: DeviceMesh) -> None:
    """Divide what lies outside of the layers, in place: embedding, last norm, output layer."""
    model = policy.model
    body: Any = model.get_submodule(model.base_model_prefix)
    head: Any = model.get_output_embeddings()
    tied = head is not None and head.weight is body.embed_tokens.weight
    _parallelize(
        body,
        mesh,
        {
            "embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "norm": _Whole(Replicate()),
        },
    )
    if isinstance(policy, PackedValues):
        _parallelize(model, mesh, {VALUE_HEAD: _Whole(Replicate())})
        return
    if tied:
        # Each module was given a parameter of its own.
        head.weight = body.embed_tokens.weight
    else:
        _parallelize(head, mesh, {"": ColwiseParallel()})
    if hasattr(model, VALUE_HEAD):
        _parallelize(model, mesh, {VALUE_HEAD: _Whole(Replicate())})
    assert head.weight.placements == (Shard(0),), head.weight.placements
    assert tied == (head.weight is body.embed_tokens.weight)
    vocabulary = head.weight.shape[0]
    group = mesh.get_group()
    policy.vocabulary = VocabularyPart(
        first=mesh.get_local_rank() * vocabulary // mesh.size(),
        vocabulary=vocabulary,
        gather=partial(_gather, group),
        add_up=partial(dist.all_reduce, group=group),
    )


def _parallelize(module: nn.Module, mesh: DeviceMesh, plan: dict[str, ParallelStyle]) -> None:
    trained = {name: value.requires_grad for name, value in module.named_parameters()}
    # Every rank has loaded the same weights: none has to be sent.
    parallelize_module(module, mesh, plan, src_data_rank=None)
    for name, value in module.named_parameters():
        assert isinstance(value, DTensor), f"{name} is in no plan"
        value.requires_grad_(trained[name])  # which not every style keeps


def _gather(group: dist.ProcessGroup, tensor: Tensor) -> Tensor:
    gathered = tensor.new_empty(dist.get_world_size(group), *tensor.shape)
    dist.all_gather(list(gathered), tensor, group=group)
    return gathered
