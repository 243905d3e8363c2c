"""Models with windows and states: published sizes, their config.json, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from simulator.catalogue.models import MODELS, find_model, from_config
from simulator.catalogue.transformer import MXFP4_BYTES, LinearAttention, ModelShape, SlidingWindow

GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss",
    "quantization_config": {"quant_method": "mxfp4"},
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "sliding_window": 128,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
DELTA_NET: dict[str, Any] = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
}
QWEN3_5_27B: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
    **DELTA_NET,
    "linear_num_value_heads": 48,
    "mamba_ssm_dtype": "float32",
    "num_attention_heads": 24,
    "num_hidden_layers": 64,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "vocab_size": 248320,
}
QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next",
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    **DELTA_NET,
    "linear_num_value_heads": 32,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
KIMI_LINEAR: dict[str, Any] = {
    "model_type": "kimi_linear",
    "first_k_dense_replace": 1,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [5, 9, 13, 17, 21, 25],
        "head_dim": 128,
        "kda_layers": [one for one in range(1, 28) if one not in (5, 9, 13, 17, 21, 25)],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "moe_intermediate_size": 1024,
    "num_attention_heads": 32,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "tie_word_embeddings": False,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
CONFIGS = {
    "gpt-oss-20b": GPT_OSS_20B,
    "Qwen3.5-27B": QWEN3_5_27B,
    "Qwen3-Next-80B-A3B": QWEN3_NEXT,
    "Kimi-Linear-48B-A3B": KIMI_LINEAR,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_gives_the_shape_of_the_catalogue(name: str) -> None:
    read = from_config(CONFIGS[name], name)
    assert dataclasses.replace(read, source=MODELS[name].source) == MODELS[name]
    assert read.caveats == ()


@pytest.mark.parametrize(
    ("name", "total_b", "active_b"),
    [
        # OpenAI's model card (arXiv:2508.10925), table 1: active without the embedding.
        ("gpt-oss-20b", 20.91, 3.61),
        ("gpt-oss-120b", 116.83, 5.13),
    ],
)
def test_published_parameters(name: str, total_b: float, active_b: float) -> None:
    shape = find_model(name)
    assert shape.parameters / 1e9 == pytest.approx(total_b, rel=2e-3)
    without = shape.active_parameters - shape.embedding_parameters
    assert without / 1e9 == pytest.approx(active_b, rel=5e-3)


# OpenAI's model card (arXiv:2508.10925), table 1: GiB of the checkpoint.
@pytest.mark.parametrize(("name", "gib"), [("gpt-oss-20b", 12.8), ("gpt-oss-120b", 60.8)])
def test_published_checkpoints_have_experts_in_mxfp4(name: str, gib: float) -> None:
    """Biases are not counted: 0.07 GiB of the larger one."""
    shape = find_model(name)
    assert shape.checkpoint_bytes() / 2**30 == pytest.approx(gib, rel=2e-3)
    assert shape.weight_bytes() > 2.9 * shape.checkpoint_bytes()
    assert MXFP4_BYTES == 4.25 / 8


def test_a_step_reads_experts_in_mxfp4_and_the_rest_in_bf16() -> None:
    shape = find_model("gpt-oss-120b")
    rest = 2 * (shape.decode_parameters - 36 * 128 * shape.expert_parameters)
    expert = 36 * MXFP4_BYTES * shape.expert_parameters
    assert shape.decode_checkpoint_bytes() == pytest.approx(rest + 128 * expert)
    assert shape.decode_checkpoint_bytes(sequences=1) == pytest.approx(rest + 4 * expert)


@pytest.mark.parametrize("name", MODELS)
def test_other_checkpoints_count_as_bf16(name: str) -> None:
    shape = MODELS[name]
    assert (shape.checkpoint_bytes() == shape.weight_bytes()) == (not name.startswith("gpt-oss"))


def test_other_quantizations_count_as_bf16_with_a_warning() -> None:
    for quantized in ({"quant_method": "awq"}, "awq"):
        shape = from_config({**GPT_OSS_20B, "quantization_config": quantized}, "it")
        assert shape.checkpoint_bytes() == shape.weight_bytes()
        assert shape.caveats == ("its weights are quantized, but sizes are computed for bf16",)


@pytest.mark.parametrize(
    ("name", "total_b", "active_b"),
    [
        ("Qwen3-Next-80B-A3B", 80, 3),
        ("Qwen3.5-27B", 27, 27),
        ("Qwen3.5-35B-A3B", 35, 3),
        ("Kimi-Linear-48B-A3B", 48, 3),
        ("Gemma-3-27B", 27, 27),
    ],
)
def test_names_say_the_size(name: str, total_b: float, active_b: float) -> None:
    shape = find_model(name)
    assert shape.parameters / 1e9 == pytest.approx(total_b, rel=0.03)
    used = shape.active_parameters - 2 * shape.embedding_parameters
    assert used / 1e9 == pytest.approx(active_b, rel=0.2)


def test_kimi_linear_caches_a_quarter_of_full_attention() -> None:
    """ "Reduces the need for large KV caches by up to 75 %" (arXiv:2510.26692, abstract)."""
    shape = find_model("Kimi-Linear-48B-A3B")
    full = dataclasses.replace(shape, linear=None)
    assert shape.cache_bytes_per_token() / full.cache_bytes_per_token() == pytest.approx(
        0.25, abs=0.04
    )


def test_cache_and_states_by_hand() -> None:
    shape = find_model("Qwen3.5-27B")
    assert (shape.full_layers, shape.attention_layers) == (16, 16)
    assert shape.cache_bytes_per_token() == 16 * 2 * 4 * 256 * 2
    matrices = 48 * 48 * 128 * 128 * 4
    kept = 48 * (2 * 16 * 128 + 48 * 128) * 3 * 2
    assert shape.state_bytes() == matrices + kept
    windows = find_model("gpt-oss-120b")
    assert windows.cache_bytes_per_token() == 18 * 2 * 8 * 64 * 2
    assert windows.window_bytes() == 128 * windows.cache_bytes_per_token()
    assert windows.window_bytes(1) == windows.window_bytes() / 2
    assert windows.window_flops() == windows.attention_flops(1)
    assert find_model("Qwen3-8B").window_bytes() == find_model("Qwen3-8B").state_bytes() == 0


def test_parameters_of_states_by_hand() -> None:
    """As the modules of transformers 5.23 have them, without biases and norms."""
    kimi = find_model("Kimi-Linear-48B-A3B").linear
    qwen = find_model("Qwen3.5-27B").linear
    assert kimi is not None
    assert qwen is not None
    hidden, width = 2304, 32 * 128
    queries_keys_values, output, conv = 3 * hidden * width, width * hidden, 3 * width * 4
    gates = 2 * (hidden * 128 + 128 * width)  # to forget, and of the output
    learning = hidden * 32
    assert kimi.layer_parameters(hidden) == queries_keys_values + output + conv + gates + learning
    keys, values, hidden = 16 * 128, 48 * 128, 5120
    mixed = 2 * keys + values
    gated = hidden * (mixed + values) + hidden * 2 * 48
    assert qwen.layer_parameters(hidden) == gated + mixed * 4 + values * hidden


def test_flops_of_states_do_not_depend_on_the_context() -> None:
    shape = find_model("Qwen3-Next-80B-A3B")
    assert shape.linear is not None
    assert shape.linear.flops_per_token() == 36 * 32 * 6 * 128 * 128
    # 12 of 48 layers attend.
    full = dataclasses.replace(shape, linear=None)
    assert 4 * shape.attention_flops(1000) == full.attention_flops(1000)


def test_a_window_that_is_never_exceeded_is_none() -> None:
    short = {**GPT_OSS_20B, "max_position_embeddings": 128}
    assert from_config(short, "it").window is None
    off = {**GPT_OSS_20B, "use_sliding_window": False}
    assert from_config(off, "it").window is None
    pattern = {**GPT_OSS_20B, "layer_types": None, "sliding_window_pattern": 6}
    assert from_config(pattern, "it").window == SlidingWindow(layers=20, tokens=128)
    chunks = {**GPT_OSS_20B, "sliding_window": None, "attention_chunk_size": 8192}
    assert from_config(chunks, "it").window == SlidingWindow(layers=12, tokens=8192)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**QWEN3_5_27B, "linear_key_head_dim": None}, "has no 'linear_key_head_dim'"),
        ({**QWEN3_5_27B, "layer_types": ["linear_attention"] * 64}, "at least one must attend"),
        ({**QWEN3_5_27B, "linear_num_value_heads": 40}, "must be a multiple of its key_heads"),
        ({**KIMI_LINEAR, "routed_expert_hidden_size": 1152}, "experts of another width"),
        (
            {**KIMI_LINEAR, "linear_attn_config": {"kda_layers": [1], "num_heads": 32}},
            "has no 'head_dim'",
        ),
        ({**GPT_OSS_20B, "layer_types": ["sliding_attention"] * 24}, "at least one must attend"),
        ({**GPT_OSS_20B, "mamba_d_state": 16}, "layers other than attention"),
    ],
)
def test_an_impossible_config_is_refused_in_one_line(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        from_config(config, "it")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("wrong", [{"layers": 0}, {"key_heads": True}, {"gate_rank": -1}])
def test_impossible_states_and_windows_are_refused(wrong: dict[str, Any]) -> None:
    shape = find_model("Qwen3.5-27B").linear
    assert isinstance(shape, LinearAttention)
    with pytest.raises(ValueError, match="of linear attention is"):
        dataclasses.replace(shape, **wrong)
    with pytest.raises(ValueError, match="tokens of a sliding window is 0"):
        SlidingWindow(layers=1, tokens=0)


def test_hybrids_are_found_as_people_write_them() -> None:
    for written, name in (
        ("openai/gpt-oss-120b", "gpt-oss-120b"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen3-Next-80B-A3B"),
        ("moonshotai/Kimi-Linear-48B-A3B-Instruct", "Kimi-Linear-48B-A3B"),
        ("google/gemma-3-27b-it", "Gemma-3-27B"),
    ):
        assert find_model(written) is MODELS[name]
    assert all(isinstance(one, ModelShape) and one.source for one in MODELS.values())
