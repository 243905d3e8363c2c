"""Sizes of models against published ones, and shapes read from `config.json`."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.catalogue.models import MODELS, ModelShape, find_model, from_config
from simulator.catalogue.transformer import LatentAttention
from tools.pages.hardware import page

# --- published sizes -----------------------------------------------------------------------------

# Stored numbers, as Hugging Face counts them; 671 B without the predictor of the second token.
PARAMETERS = {
    "R1-Distill-Qwen-1.5B": 1_777_088_000,
    "R1-Distill-Qwen-7B": 7_615_616_512,
    "R1-Distill-Qwen-14B": 14_770_033_664,
    "R1-Distill-Qwen-32B": 32_763_876_352,
    "R1-Distill-Llama-8B": 8_030_261_248,
    "R1-Distill-Llama-70B": 70_553_706_496,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.1-405B": 405_853_388_800,
    "SmolLM2-135M": 134_515_008,
    "Mixtral-8x7B": 46_702_792_704,
    "DeepSeek-V3": 671_026_404_352,
    # As transformers 5.23 counts their models without weights.
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "Gemma-3-27B": 27_009_002_240,
    "Qwen3-Next-80B-A3B": 79_674_391_296,
    "Qwen3.5-9B": 8_953_803_264,
    "Qwen3.5-27B": 26_895_998_464,
    "Qwen3.5-35B-A3B": 34_660_610_688,
    "Kimi-Linear-48B-A3B": 49_133_074_464,
}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_the_published_ones(name: str) -> None:
    # Norms and biases are missing.
    assert 0.9995 * PARAMETERS[name] < MODELS[name].parameters <= PARAMETERS[name]


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen3-30B-A3B", 3.3),  # Qwen3 (arXiv:2505.09388), table 2
        ("Qwen3-235B-A22B", 22),
        ("Mixtral-8x7B", 12.9),  # Mixtral (arXiv:2401.04088), section 2.1
        ("DeepSeek-V3", 37),  # DeepSeek-V3 (arXiv:2412.19437), section 4.2
    ],
)
def test_active_parameters_are_the_published_ones(name: str, billions: float) -> None:
    assert MODELS[name].active_parameters / 1e9 == pytest.approx(billions, rel=0.02)


# GB read by a decode step and cache bytes per token of the models of AReaL (arXiv:2505.24298).
@pytest.mark.parametrize(
    ("size", "weights_gb", "cache_bytes"),
    [
        ("1.5B", 3.09, 28_672),
        ("7B", 14.14, 57_344),
        ("14B", 27.98, 196_608),
        ("32B", 63.97, 262_144),
    ],
)
@pytest.mark.parametrize("family", ["Qwen2.5", "R1-Distill-Qwen"])
def test_the_bytes_read_by_a_decode_step_are_the_published_ones(
    family: str, size: str, weights_gb: float, cache_bytes: int
) -> None:
    shape = MODELS[f"{family}-{size}"]
    assert shape.decode_weight_bytes() / 1e9 == pytest.approx(weights_gb, abs=0.005)
    assert shape.cache_bytes_per_token() == cache_bytes


# Insights into DeepSeek-V3 (arXiv:2505.09343), table 1
@pytest.mark.parametrize(
    ("name", "kilobytes"),
    [("DeepSeek-V3", 70.272), ("Qwen2.5-72B", 327.680), ("Llama-3.1-405B", 516.096)],
)
def test_the_cache_of_a_token_is_the_published_one(name: str, kilobytes: float) -> None:
    assert MODELS[name].cache_bytes_per_token() / 1e3 == kilobytes


def test_distilled_models_have_an_untied_head() -> None:
    base, distilled = MODELS["Qwen2.5-1.5B"], MODELS["R1-Distill-Qwen-1.5B"]
    assert distilled.parameters - base.parameters == 151936 * 1536
    assert distilled.decode_parameters == base.decode_parameters
    assert not any(MODELS[name].tied_embeddings for name in MODELS if name.startswith("R1"))


# --- formulas ------------------------------------------------------------------------------------

SMALL = ModelShape(
    name="small",
    layers=2,
    hidden=8,
    heads=4,
    kv_heads=2,
    head_dim=3,
    intermediate=10,
    vocabulary=100,
    tied_embeddings=False,
)
MIXTURE = dataclasses.replace(
    SMALL,
    experts=5,
    active_experts=2,
    moe_intermediate=6,
    shared_intermediate=7,
    first_dense_layers=1,
)


def test_parameters_of_a_small_model_add_up_by_hand() -> None:
    attention = 8 * (4 * 3) + 2 * 8 * (2 * 3) + (4 * 3) * 8  # 288
    mlp = 3 * 8 * 10  # 240
    assert SMALL.parameters == 2 * 100 * 8 + 2 * (attention + mlp)
    assert SMALL.active_parameters == SMALL.parameters
    assert SMALL.decode_parameters == 100 * 8 + 2 * (attention + mlp)
    assert SMALL.weight_bytes() == 2 * SMALL.parameters
    assert SMALL.weight_bytes(4) == 4 * SMALL.parameters
    tied = dataclasses.replace(SMALL, tied_embeddings=True)
    assert tied.parameters == tied.decode_parameters == SMALL.decode_parameters
    ungated = dataclasses.replace(SMALL, gated=False)
    assert SMALL.parameters - ungated.parameters == 2 * 8 * 10


def test_parameters_of_a_small_mixture_add_up_by_hand() -> None:
    attention, mlp = 288, 240
    expert, shared, router = 3 * 8 * 6, 3 * 8 * 7, 8 * 5
    one_layer = 5 * expert + shared + router
    assert MIXTURE.moe_layers == 1
    assert MIXTURE.parameters == 2 * 800 + 2 * attention + mlp + one_layer
    assert MIXTURE.active_parameters == MIXTURE.parameters - 3 * expert
    assert MIXTURE.decode_weight_bytes() == 2 * (MIXTURE.parameters - 800)
    # one sequence reads its own experts
    assert MIXTURE.decode_weight_bytes(sequences=1) == 2 * (MIXTURE.active_parameters - 800)


def test_latent_attention_adds_up_by_hand() -> None:
    latent = LatentAttention(cached_rank=5, rope_head_dim=2, value_head_dim=4, query_rank=6)
    shape = dataclasses.replace(SMALL, latent=latent)
    queries = 8 * 6 + 6 * 4 * (3 + 2)
    keys_and_values = 8 * (5 + 2) + 5 * 4 * (3 + 4)
    attention = queries + keys_and_values + 4 * 4 * 8
    assert shape.parameters - SMALL.parameters == 2 * (attention - 288)
    assert shape.cache_bytes_per_token() == 2 * (5 + 2) * 2
    assert shape.attention_flops(10) == 2 * 2 * 4 * ((3 + 2) + 4) * 10
    direct = dataclasses.replace(latent, query_rank=0)
    without = dataclasses.replace(SMALL, latent=direct)
    assert shape.parameters - without.parameters == 2 * (queries - 8 * 4 * (3 + 2))


def test_flops_are_two_per_parameter_and_four_per_pair_and_width() -> None:
    assert SMALL.linear_flops_per_token() == 2 * SMALL.decode_parameters
    assert MIXTURE.linear_flops_per_token() == 2 * (MIXTURE.active_parameters - 800)
    assert SMALL.attention_flops(1000) == 4 * 2 * 4 * 3 * 1000


def test_the_cache_holds_keys_and_values_of_every_layer() -> None:
    assert SMALL.cache_bytes_per_token() == 2 * (2 * 2 * 3) * 2
    assert SMALL.cache_bytes_per_token(1) == 2 * (2 * 2 * 3)


def test_a_gpu_holds_at_least_one_key_value_head() -> None:
    shape = MODELS["Qwen2.5-32B"]
    assert [shape.cache_shards(gpus) for gpus in (1, 2, 8, 16)] == [1, 2, 8, 8]
    assert MODELS["DeepSeek-V3"].cache_shards(8) == 1


def test_experts_read_is_the_mean_over_all_choices() -> None:
    choices = list(itertools.combinations(range(5), 2))
    for sequences in (1, 2, 3):
        taken = [
            len(set(itertools.chain(*together)))
            for together in itertools.product(choices, repeat=sequences)
        ]
        mean = sum(taken) / len(taken)
        assert MIXTURE.experts_read(sequences) == pytest.approx(mean, rel=1e-12)


@given(few=st.floats(0, 1e4), more=st.floats(0, 1e4))
def test_more_sequences_never_read_less(few: float, more: float) -> None:
    few, more = sorted((few, more))
    shape = MODELS["Qwen3-30B-A3B"]
    assert shape.decode_weight_bytes(sequences=few) <= shape.decode_weight_bytes(sequences=more)
    assert shape.decode_weight_bytes(sequences=more) <= shape.decode_weight_bytes()
    assert SMALL.decode_weight_bytes(sequences=few) == SMALL.decode_weight_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers of small is 0, but must be a whole number >= 1"),
        ({"hidden": 2.5}, r"hidden of small is 2\.5"),
        ({"heads": True}, "heads of small is True"),
        ({"kv_heads": 3}, "4 heads and 3 key-value heads"),
        ({"first_dense_layers": 3}, r"first_dense_layers of small is 3, but must be <= layers"),
        ({"experts": 4, "moe_intermediate": 1}, "active_experts of small is 0"),
        ({"experts": 4, "active_experts": 2}, "moe_intermediate of small is 0"),
        (
            {"experts": 4, "active_experts": 5, "moe_intermediate": 1},
            r"active_experts of small is 5, but must be <= experts \(4\)",
        ),
    ],
)
def test_an_impossible_shape_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)


def test_an_impossible_latent_width_is_refused() -> None:
    with pytest.raises(ValueError, match="cached_rank of latent attention is 0"):
        LatentAttention(cached_rank=0, rope_head_dim=1, value_head_dim=1)


# --- config.json ---------------------------------------------------------------------------------

# As converted from the GGUF of SmolLM2-135M-Instruct, with an explicit head_dim.
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "head_dim": 64,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}
QWEN2_5_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "vocab_size": 152064,
}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "vocab_size": 32000,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "tie_word_embeddings": False,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
CONFIGS = {
    "SmolLM2-135M": SMOLLM2,
    "Qwen2.5-7B": QWEN2_5_7B,
    "Qwen3-30B-A3B": QWEN3_30B_A3B,
    "Mixtral-8x7B": MIXTRAL,
    "DeepSeek-V3": DEEPSEEK_V3,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_gives_the_shape_of_the_catalogue(name: str) -> None:
    read = from_config(CONFIGS[name], name)
    assert dataclasses.replace(read, source=MODELS[name].source) == MODELS[name]


def test_a_config_is_read_from_its_folder_or_file(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMOLLM2))
    (tmp_path / "other.json").write_text(json.dumps(SMOLLM2))
    read = [
        find_model(str(path)) for path in (folder, folder / "config.json", tmp_path / "other.json")
    ]
    assert [shape.name for shape in read] == ["my-model", "my-model", "other"]
    assert len({shape.parameters for shape in read} | {MODELS["SmolLM2-135M"].parameters}) == 1


@pytest.mark.parametrize(
    "missing",
    ["num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"],
)
def test_a_missing_field_of_a_config_is_named(missing: str) -> None:
    config = {key: value for key, value in SMOLLM2.items() if key != missing}
    with pytest.raises(ValueError, match=f"config.json of it has no '{missing}'"):
        from_config(config, "it")


@pytest.mark.parametrize("missing", ["num_experts_per_tok", "qk_nope_head_dim", "v_head_dim"])
def test_a_missing_field_of_a_mixture_or_latent_attention_is_named(missing: str) -> None:
    config = {key: value for key, value in DEEPSEEK_V3.items() if key != missing}
    with pytest.raises(ValueError, match=f"config.json of it has no '{missing}'"):
        from_config(config, "it")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"hidden_size": "576"},
            "'hidden_size' in config.json of it is '576', but must be a whole",
        ),
        ({"hidden_size": -1}, "'hidden_size' in config.json of it is -1"),
        ({"num_attention_heads": True}, "'num_attention_heads' in config.json of it is True"),
        ({"num_attention_heads": 0, "head_dim": None}, r"multiple of its heads \(0\)"),
        ({"num_hidden_layers": 0}, "layers of it is 0, but must be a whole number >= 1"),
        (
            {"head_dim": None, "num_attention_heads": 10},
            r"no 'head_dim', .*\(576\).*\(10\)",
        ),
        ({"num_key_value_heads": 2}, "9 heads and 2 key-value heads"),
        ({"is_encoder_decoder": True}, "it is an encoder-decoder model"),
        ({"layer_types": ["full_attention", "linear_attention"]}, r"\(linear_attention\)"),
        ({"layer_types": 5}, "'layer_types' in config.json of it is 5, but must be a list"),
        (
            {
                **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
                "mlp_only_layers": 5,
            },
            "'mlp_only_layers' in config.json of it is 5, but must be a list",
        ),
        ({"mamba_d_state": 16}, r"layers other than attention \(mamba_d_state\)"),
    ],
)
def test_an_impossible_config_is_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        from_config({**SMOLLM2, **change}, "it")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "cannot be read"), ("[]", "holds a list, but must hold an object")],
)
def test_a_broken_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=rf"config\.json {message}"):
        find_model(str(tmp_path))


def test_the_default_head_width_is_hidden_over_heads() -> None:
    without = {key: value for key, value in SMOLLM2.items() if key != "head_dim"}
    assert from_config(without, "it").head_dim == 576 // 9
    assert from_config({**without, "head_dim": 128}, "it").head_dim == 128


def test_without_key_value_heads_every_head_has_its_own() -> None:
    without = {key: value for key, value in SMOLLM2.items() if key != "num_key_value_heads"}
    assert from_config(without, "it").kv_heads == 9
    assert from_config({**without, "multi_query": True}, "it").kv_heads == 1


def test_gpt2_names_of_fields_are_read() -> None:
    config = {
        "model_type": "gpt2",
        "n_layer": 12,
        "n_head": 12,
        "n_embd": 768,
        "n_inner": None,
        "vocab_size": 50257,
    }
    shape = from_config(config, "gpt2")
    assert (shape.intermediate, shape.gated, shape.tied_embeddings) == (3072, False, True)
    # GPT-2 small: 124 M, of which 0.8 M are positions.
    assert shape.parameters / 1e6 == pytest.approx(124.4 - 0.8, abs=0.2)


def test_whether_the_head_is_tied_defaults_to_the_family() -> None:
    plain = {key: value for key, value in SMOLLM2.items() if key != "tie_word_embeddings"}
    assert not from_config(plain, "it").tied_embeddings
    assert from_config({**plain, "model_type": "gemma2"}, "it").tied_embeddings
    untied = {**plain, "model_type": "gemma2", "tie_word_embeddings": False}
    assert not from_config(untied, "it").tied_embeddings


def test_the_language_model_of_a_multimodal_model_is_read() -> None:
    vision = {"hidden_size": 1024, "num_hidden_layers": 24}
    config = {"model_type": "qwen3_vl", "vision_config": vision, "text_config": SMOLLM2}
    shape = from_config(config, "SmolLM2-135M")
    assert shape.parameters == MODELS["SmolLM2-135M"].parameters
    assert shape.caveats == ("only its language model is counted",)
    outside = {**config, "tie_word_embeddings": False}
    assert not from_config(outside, "it").tied_embeddings


@pytest.mark.parametrize(
    ("change", "dense"),
    [
        ({}, 0),
        ({"decoder_sparse_step": 2}, 24),
        ({"decoder_sparse_step": 5}, 48 - 9),  # counted from 1: 5, 10, ..., 45
        ({"mlp_only_layers": [0, 47]}, 2),
        ({"first_k_dense_replace": 3}, 3),
        ({"moe_layer_freq": 5}, 48 - 10),  # counted from 0: 0, 5, ..., 45
        ({"first_k_dense_replace": 1, "moe_layer_freq": 5}, 48 - 9),
        ({"moe_layer_freq": [0] * 3 + [1] * 45}, 3),
        ({"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 46}, 2),
        ({"moe_layers": list(range(1, 48, 2))}, 24),
        ({"num_experts": 1}, 0),
    ],
)
def test_dense_layers_of_a_mixture_are_counted(change: dict[str, Any], dense: int) -> None:
    shape = from_config({**QWEN3_30B_A3B, **change}, "it")
    assert shape.first_dense_layers == dense
    assert shape.moe_layers == (48 - dense if shape.experts else 0)


def test_shared_experts_are_counted_by_width_or_number() -> None:
    by_width = from_config({**QWEN3_30B_A3B, "shared_expert_intermediate_size": 512}, "it")
    by_number = from_config({**QWEN3_30B_A3B, "n_shared_experts": 2}, "it")
    assert (by_width.shared_intermediate, by_number.shared_intermediate) == (512, 2 * 768)


@pytest.mark.parametrize(
    ("change", "caveat"),
    [
        ({"model_type": "llamas"}, "family 'llamas' is unknown"),
        ({"sliding_window": 4096}, "30 of its 30 layers attend to only a part of the context"),
        (
            {"layer_types": ["indexed_attention", "full_attention"] * 15},
            "15 of its 30 layers attend to only a part",
        ),
        ({"global_head_dim": 512}, "global layers have heads of another width"),
        ({"quantization_config": {"quant_method": "fp8"}}, "are quantized"),
    ],
)
def test_caveats_name_what_the_sizes_do_not_cover(change: dict[str, Any], caveat: str) -> None:
    (said,) = from_config({**SMOLLM2, **change}, "it").caveats
    assert caveat in said


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"sliding_window": None},
        {"sliding_window": 8192},
        {"sliding_window": 4096, "use_sliding_window": False},
    ],
)
def test_windows_that_are_off_or_never_exceeded_have_no_caveat(change: dict[str, Any]) -> None:
    assert from_config({**SMOLLM2, **change}, "it").caveats == ()


@pytest.mark.parametrize(
    "family",
    [
        *("llama", "qwen2", "qwen3", "qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "llama4_text"),
        *("deepseek_v3", "gpt_oss", "ernie4_5_moe", "phi3", "phi", "gemma2", "starcoder2"),
        *("gpt_neox", "nemotron", "glm4"),
        *("gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear"),
    ],
)
def test_transformers_counts_the_same_parameters(family: str) -> None:
    """Compared with transformers' models without weights, in the defaults of each family."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    changes = {"num_key_value_heads": 8} if family == "nemotron" else {}
    config = transformers.AutoConfig.for_model(family, **changes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert from_config(config.to_dict(), family).parameters == pytest.approx(counted, rel=5e-4)


# --- by name -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("R1-Distill-Qwen-1.5B", "R1-Distill-Qwen-1.5B"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "R1-Distill-Qwen-1.5B"),
        ("qwen/qwen2.5-7b-instruct", "Qwen2.5-7B"),
        ("Qwen2.5-Math-1.5B", "Qwen2.5-1.5B"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen3-30B-A3B"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("Llama-3.3-70B-Instruct", "Llama-3.1-70B"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "SmolLM2-135M"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "Mixtral-8x7B"),
        ("deepseek-ai/DeepSeek-R1", "DeepSeek-V3"),
        ("DeepSeek-V3-0324", "DeepSeek-V3"),
    ],
)
def test_names_are_found_as_people_write_them(written: str, name: str) -> None:
    assert find_model(written) is MODELS[name]


def test_an_unknown_model_names_the_nearest() -> None:
    with pytest.raises(
        ValueError, match=r"^unknown model 'Qwen2.5-8B'; did you mean .*'Qwen2.5-7B'"
    ):
        find_model("Qwen2.5-8B")
    with pytest.raises(ValueError, match=r"known are .*SmolLM2-135M") as refused:
        find_model("gpt5")
    assert "\n" not in str(refused.value)


def test_a_path_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json does not exist \(looked in "):
        find_model(str(tmp_path))
    with pytest.raises(ValueError, match=r"nowhere\.json does not exist"):
        find_model("nowhere.json")


def test_the_page_shows_the_models() -> None:
    assert "| GFLOPs per token | and per 1,000 of context |" in page()
    for shape in MODELS.values():
        assert f"| {shape.name} | {shape.parameters / 1e9:.3f} B |" in page()
        assert f" | {shape.linear_flops_per_token() / 1e9:.3g} | " in page()
        assert shape.source
        assert math.isfinite(shape.weight_bytes())
