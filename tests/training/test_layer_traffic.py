"""Element-wise bytes and launches of a decoder layer, counted on fake tensors: they must not grow.

A Qwen2-1.5B layer, forward and backward. Bytes are per token: what more tokens move, without what
is moved per weight. Launches include products and attention, and no gathering of weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from transformers import Qwen2Config, Qwen2Model

from areal_lab.data.batch import TreeSpan
from areal_lab.training.attention import TREE_ATTENTION, TreeLayout
from areal_lab.training.decoder_layers import fuse_norms
from tests.training.traffic import Traffic

SHAPE: dict[str, Any] = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}
TOKENS = (1024, 2048)


class OfLayer(NamedTuple):
    """Of one layer, forward and backward."""

    bytes_per_token: float
    launches: int


def of_layer(*, working_copies: bool, monkeypatch: pytest.MonkeyPatch) -> OfLayer:
    """The difference between two layers and one, and between more tokens and fewer."""

    def count(layers: int, tokens: int) -> Traffic:
        return traffic_of(layers, tokens, working_copies=working_copies, patch=monkeypatch)

    many, few = ([count(layers, tokens) for layers in (1, 2)] for tokens in reversed(TOKENS))
    moved = (many[1].bytes - many[0].bytes) - (few[1].bytes - few[0].bytes)
    return OfLayer(
        moved / (TOKENS[1] - TOKENS[0]),
        few[1].launches.total() - few[0].launches.total(),
    )


def traffic_of(
    layers: int, tokens: int, *, working_copies: bool, patch: pytest.MonkeyPatch
) -> Traffic:
    dtype = torch.bfloat16 if working_copies else torch.float32
    traffic = Traffic()
    with FakeTensorMode():
        config = Qwen2Config(num_hidden_layers=layers, **SHAPE)
        model: Any = Qwen2Model._from_config(
            config, attn_implementation=TREE_ATTENTION, dtype=dtype
        )
        if working_copies:
            fuse_norms(model)
            patch.setattr(functional, "rms_norm", NormOnGPU.of(traffic))
        hidden = torch.empty(1, tokens, SHAPE["hidden_size"], dtype=dtype, requires_grad=True)
        layout = TreeLayout((TreeSpan(0, tokens, branching=False),), (None,))
        with traffic:
            with torch.autocast("cpu", torch.bfloat16, enabled=not working_copies):
                output = model(
                    inputs_embeds=hidden,
                    position_ids=torch.arange(tokens)[None],
                    use_cache=False,
                    tree_layout=layout,
                ).last_hidden_state
            output.backward(torch.empty_like(output))
    return traffic


class NormOnGPU(torch.autograd.Function):
    """What torch launches for `rms_norm` on a GPU: one kernel forward, two backward.

    Source: aten/src/ATen/native/cuda/layer_norm_kernel.cu; a CPU has no fused kernel.
    """

    @staticmethod
    def of(traffic: Traffic) -> Any:
        def rms_norm(hidden: Tensor, shape: Any, weight: Tensor, eps: float) -> Tensor:
            del shape, eps
            normalized: Tensor = NormOnGPU.apply(hidden, weight, traffic)  # type: ignore[no-untyped-call]
            return normalized

        return rms_norm

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, traffic: Traffic) -> Tensor:
        out = torch.empty_like(hidden)
        scale = torch.empty(hidden.shape[:-1], dtype=torch.float32)
        traffic.launched("rms_norm", hidden, weight, out, scale)
        ctx.save_for_backward(hidden, weight, scale)
        ctx.traffic = traffic
        return out

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight, scale = ctx.saved_tensors
        to_hidden, to_weight = torch.empty_like(hidden), torch.empty_like(weight)
        ctx.traffic.launched("rms_norm_backward", *given, hidden, weight, scale, to_hidden)
        ctx.traffic.launched("rms_norm_backward", *given, hidden, scale, to_weight)
        return to_hidden, to_weight, None


def test_bytes_and_launches_of_a_layer_do_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    casts = of_layer(working_copies=False, monkeypatch=monkeypatch)
    copies = of_layer(working_copies=True, monkeypatch=monkeypatch)
    assert casts.bytes_per_token <= 1.04e6
    assert casts.launches <= 144
    assert copies.bytes_per_token <= 0.46e6
    assert copies.launches <= 70
