"""Decoder layers in training: what they keep for the backward pass, and what is compiled.

Activation checkpointing of decoder layers: keep all, the input, or the input and some
outputs.

    full        h_in --layer--> h_out         backward computes the layer again from h_in
    selective   h_in --layer--> h_out         as full, but takes what was kept:
                  attention, and the 2nd, 4th and 6th matrix product: k, o and up

The choice of `selective` is torchtitan's, except that it keeps the first of two products: more
memory for nothing, because the last product is never computed again: the backward pass
does not need its output. Code that torch.compile made (FlexAttention on a GPU, `actor.compile`) is
one operation here, and computed again whole.

Compile the parts of decoder layers around attention: norms and feed-forward network.

    input norm --> attention --> norm --> feed-forward       compiled: both norms, feed-forward
                   (kernels)

A whole layer is not compiled: the layout of the trees differs from batch to batch, so the layer
breaks into two graphs at the attention, which checkpointing does not allow; it then falls back to
what is not compiled. The parts have one graph each for the first number of tokens and one for all
others, with gradients and without (`tests/training/test_compiling.py` counts them). They are called
by the layer as before, so checkpointing and sharding, which are of layers, do not notice.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel

from areal_lab.training.versions import checkpoint_layers, compile_in_place

Checkpointing = bool | Literal["selective"]
_aten: Any = torch.ops.aten
_PRODUCTS: Final = (_aten.mm.default, _aten.addmm.default)
_ATTENTION: Final = (
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.higher_order.flex_attention,
)
_RMS_NORMS: Final = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
_VARLEN: Final = "torch_attn::_varlen_attn"
"""Operation that is registered when its module is imported."""


def enable_checkpointing(model: PreTrainedModel, kept: Checkpointing) -> None:
    """Recompute the activations of decoder layers in the backward pass; names of parameters and
    modules stay.

    Args:
        kept: False keeps everything, True the inputs of layers, `selective` some outputs too.
    """
    if not kept:
        return
    checkpoint_layers(model)
    if kept == "selective":
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False):
                module._gradient_checkpointing_func = _selective  # type: ignore[assignment]


def _selective(run: Callable[..., Any], hidden: Tensor, *more: Any) -> Any:
    """Run a layer, as transformers calls a checkpointing function."""
    tokens = hidden.shape[:-1].numel()
    return checkpoint(
        run,
        hidden,
        *more,
        use_reentrant=False,
        context_fn=partial(_contexts, tokens),
    )


def _contexts(tokens: int) -> Any:
    # torch 2.11 and 2.12 ask again when they recompute.
    products = {False: count(), True: count()}

    def policy(
        context: SelectiveCheckpointContext, operation: Any, *given: Any, **_named: Any
    ) -> CheckpointPolicy:
        if operation in _ATTENTION or getattr(operation, "name", str)() == _VARLEN:
            return CheckpointPolicy.MUST_SAVE
        # Products of weights alone, such as those of adapters, have another number of rows.
        is_of_tokens = operation in _PRODUCTS and given[-2].shape[0] == tokens
        if is_of_tokens and next(products[context.is_recompute]) % 2:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


BACKEND: Final = "inductor"
"""torch's compiler for CPUs and GPUs."""


def compile_layers(model: PreTrainedModel, *, backend: str = BACKEND) -> None:
    """Compile the parts of each decoder layer, in place and at their first call; names of
    parameters and modules stay. After adapters were added, before sharding.
    """
    for layer in decoder_layers(model):
        for part in layer.children():
            if not hasattr(part, "layer_idx"):  # attention has one
                compile_in_place(part, backend)


def fuse_norms(model: nn.Module) -> None:
    """Compute Llama's kind of norm by torch's `rms_norm`, in place: two kernels on a GPU, forward
    and backward, where transformers has 20. Names of parameters and modules stay.

    transformers rounds the normalized states to the type of the input before it multiplies them by
    the weight, torch after that: in bfloat16 results differ by one rounding.
    """
    for module in model.modules():
        if type(module).__name__ in _RMS_NORMS:
            module.forward = partial(_rms_norm, module, module.forward)


def _rms_norm(norm: Any, original: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    weight: Tensor = norm.weight
    if isinstance(weight, DTensor):  # where ranks divide layers
        return original(hidden)
    return functional.rms_norm(hidden, weight.shape, weight, norm.variance_epsilon)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that transformers names as not to be split."""
    names = model._no_split_modules or ()
    return [module for module in model.modules() if type(module).__name__ in names]
