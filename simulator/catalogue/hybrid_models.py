"""Models some of whose layers have a window or a state instead of full attention."""

from __future__ import annotations

from typing import Final

from simulator.catalogue.linear_attention import LinearAttention, SlidingWindow
from simulator.catalogue.transformer import LatentAttention, ModelShape

_AICONFIGURATOR: Final = (
    "config.json on Hugging Face as in AIConfigurator 0.12.0 model_configs (NVIDIA, 2026-09)"
)
_TRANSFORMERS: Final = "default of its class in transformers 5.23 (2026)"
_LITGPT: Final = "config.json on Hugging Face as in LitGPT litgpt/config.py (2025)"


def _gpt_oss(name: str, layers: int, experts: int) -> ModelShape:
    """Every second layer has a window of 128 tokens.

    Experts are published in MXFP4 (model card, arXiv:2508.10925, section 2.1).
    """
    return ModelShape(
        name=name,
        layers=layers,
        hidden=2880,
        heads=64,
        kv_heads=8,
        head_dim=64,
        intermediate=2880,
        vocabulary=201088,
        tied_embeddings=False,
        experts=experts,
        active_experts=4,
        moe_intermediate=2880,
        mxfp4_experts=True,
        window=SlidingWindow(layers=layers // 2, tokens=128),
        source=_AICONFIGURATOR,
    )


def _delta_net(layers: int, value_heads: int) -> LinearAttention:
    """Three of four layers are Gated DeltaNet."""
    return LinearAttention(
        layers=layers * 3 // 4,
        key_heads=16,
        value_heads=value_heads,
        key_head_dim=128,
        value_head_dim=128,
        conv_width=4,
    )


HYBRIDS: Final = (
    _gpt_oss("gpt-oss-20b", 24, 32),
    _gpt_oss("gpt-oss-120b", 36, 128),
    # Every sixth layer attends to everything.
    ModelShape(
        name="Gemma-3-27B",
        layers=62,
        hidden=5376,
        heads=32,
        kv_heads=16,
        head_dim=128,
        intermediate=21504,
        vocabulary=262144,
        tied_embeddings=True,
        window=SlidingWindow(layers=52, tokens=1024),
        source=_LITGPT,
    ),
    ModelShape(
        name="Qwen3-Next-80B-A3B",
        layers=48,
        hidden=2048,
        heads=16,
        kv_heads=2,
        head_dim=256,
        intermediate=5632,
        vocabulary=151936,
        tied_embeddings=False,
        experts=512,
        active_experts=10,
        moe_intermediate=512,
        shared_intermediate=512,
        linear=_delta_net(48, 32),
        gated_attention=True,
        source=_TRANSFORMERS,
    ),
    ModelShape(
        name="Qwen3.5-27B",
        layers=64,
        hidden=5120,
        heads=24,
        kv_heads=4,
        head_dim=256,
        intermediate=17408,
        vocabulary=248320,
        tied_embeddings=False,
        linear=_delta_net(64, 48),
        gated_attention=True,
        source=_AICONFIGURATOR,
    ),
    ModelShape(
        name="Qwen3.5-35B-A3B",
        layers=40,
        hidden=2048,
        heads=16,
        kv_heads=2,
        head_dim=256,
        intermediate=512,
        vocabulary=248320,
        tied_embeddings=False,
        experts=256,
        active_experts=8,
        moe_intermediate=512,
        shared_intermediate=512,
        linear=_delta_net(40, 32),
        gated_attention=True,
        source=_AICONFIGURATOR,
    ),
    ModelShape(
        name="Kimi-Linear-48B-A3B",
        layers=27,
        hidden=2304,
        heads=32,
        kv_heads=32,
        head_dim=128,
        intermediate=9216,
        vocabulary=163840,
        tied_embeddings=False,
        experts=256,
        active_experts=8,
        moe_intermediate=1024,
        shared_intermediate=1024,
        first_dense_layers=1,
        latent=LatentAttention(cached_rank=512, rope_head_dim=64, value_head_dim=128),
        linear=LinearAttention(
            layers=21,
            key_heads=32,
            value_heads=32,
            key_head_dim=128,
            value_head_dim=128,
            conv_width=4,
            gate_rank=128,
        ),
        source=_TRANSFORMERS,
    ),
)
