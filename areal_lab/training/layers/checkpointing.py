"""What decoder layers keep for the backward pass: all, their input, or that and some outputs.

    full        h_in --layer--> h_out         backward computes the layer again from h_in
    selective   h_in --layer--> h_out         as full, but takes what was kept:
                  attention, and the 2nd, 4th and 6th matrix product: k, o and up

The choice of `selective` is torchtitan's, except that it keeps the first of two products: more
memory for nothing, because the last product is never computed again: the backward pass
does not need its output. Code that torch.compile made (FlexAttention on a GPU, `actor.compile`) is
one operation here, and computed again whole.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel

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
_VARLEN: Final = "torch_attn::_varlen_attn"
"""Registered when its module is imported."""


def enable_checkpointing(model: PreTrainedModel, kept: Checkpointing) -> None:
    """Recompute the activations of decoder layers in the backward pass; names of parameters and
    modules stay.

    Args:
        model: of transformers; its layers checkpoint themselves.
        kept: False keeps everything, True the inputs of layers, `selective` some outputs too.
    """
    if not kept:
        return
    model.activation_checkpointing_enable({"use_reentrant": False})
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
    """Contexts of one pass of a layer, forward and again."""
    products = count()

    def policy(
        _context: SelectiveCheckpointContext, operation: Any, *given: Any, **_named: Any
    ) -> CheckpointPolicy:
        if operation in _ATTENTION or getattr(operation, "name", str)() == _VARLEN:
            return CheckpointPolicy.MUST_SAVE
        # Products of weights alone, such as those of adapters, have another number of rows.
        is_of_tokens = operation in _PRODUCTS and given[-2].shape[0] == tokens
        if is_of_tokens and next(products) % 2:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
