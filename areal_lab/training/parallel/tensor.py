"""Divide the matrices of decoder layers among ranks (tensor parallel), in transformers' modules.

    hidden --> norm --> q, k, v  by heads    --> attention  --> o     --sum over ranks--> + hidden
           --> norm --> gate, up by width    --> their product --> down  --sum--------> + hidden

    embedding, output layer    by tokens of the vocabulary

Hidden states are whole on every rank, and so are the weights of norms. These are distributed
tensors too, since a norm of gradients takes one kind of tensors. Layers of Llama, Qwen2 and Qwen3;
degrees divide heads, key-value heads, the width of the feed-forward network and the vocabulary.

Source: Shoeybi et al., Megatron-LM (arXiv:1909.08053).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from areal_lab.functional.logprobs.parts import VocabularyPart
from areal_lab.training.forward import PackedPolicy, PackedValues
from areal_lab.training.model import VALUE_HEAD


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
    """Divide the matrices of a decoder layer, in place.

    Args:
        layer: whole, the same on every rank.
        mesh: one axis.
    """
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
    """Divide what lies outside of the layers, in place: embedding, last norm, output layer.

    Args:
        policy: with layers that are divided.
        mesh: one axis.
    """
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
