"""What differs between supported versions of torch (from 2.11) and transformers (from 5.18).

`make test-oldest` runs the tests of training, engines and models with the oldest ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.attention import varlen
from transformers import PreTrainedModel

RECOMPILE_LIMIT: Final = 32
"""Variants that torch compiles of one function. Its 8 are for one model, and there may be four."""


def attend_in_rows(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, *, longest: int, scale: float | None
) -> Tensor:
    """Causal attention of sequences that lie in one row, by torch's `varlen_attn`.

    Args:
        query: `[T, H, D]`; `key` and `value` may have fewer heads, of which each serves a group.
        starts: `[S + 1]`, the first token of each sequence, and T.
        longest: tokens of the longest sequence.
    """
    named: dict[str, Any] = {"window_size": (-1, 0)}
    if _takes(varlen.varlen_attn, "enable_gqa"):
        named["enable_gqa"] = True
    elif query.shape[1] != key.shape[1]:  # torch 2.11 and 2.12
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    out = varlen.varlen_attn(
        query, key, value, starts, starts, longest, longest, scale=scale, **named
    )
    assert isinstance(out, Tensor)
    return out


def compile_function(function: Callable[..., Any]) -> Any:
    """`torch.compile` with `RECOMPILE_LIMIT`."""
    compiler: Any = torch.compile  # whose stubs lack the limit
    return compiler(function, **_limit())


def compile_in_place(module: nn.Module, backend: str) -> None:
    """`module.compile` with `RECOMPILE_LIMIT`."""
    module.compile(backend=backend, **_limit())


def _limit() -> dict[str, int]:
    if _takes(torch.compile, "recompile_limit"):
        return {"recompile_limit": RECOMPILE_LIMIT}
    # torch 2.11 and 2.12 have it for the whole process only.
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, RECOMPILE_LIMIT)
    return {}


@cache  # asked in each layer, and `signature` takes 25 us
def _takes(function: Callable[..., Any], argument: str) -> bool:
    return argument in signature(function).parameters


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Have transformers recompute the activations of decoder layers in the backward pass."""
    enable: Any = getattr(model, "activation_checkpointing_enable", None)
    # The older name, of which transformers 5.23 warns.
    enable = enable or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
