"""Configurations as they are published: read, or refused in one line with the reason."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Final

import pytest

from areal_lab.models.complete import read_sizes
from simulator.catalogue.huggingface_config import FAMILIES_FILE, from_config
from simulator.catalogue.models import find_model
from tests.fuzz import damaged_json, mutations, one_line
from tools.model_families import families, text

GEMMA_3_4B: Final = {
    "model_type": "gemma3",
    "text_config": {
        **{"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240},
        **{"num_hidden_layers": 34, "sliding_window": 1024},
    },
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
}
"""As google/gemma-3-4b-it: what equals the family's defaults is left out."""
GRANITE_4_MICRO: Final = {
    **{"model_type": "granitemoehybrid", "hidden_size": 2560, "num_hidden_layers": 40},
    **{"num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 100352},
    **{"intermediate_size": 8192, "shared_intermediate_size": 8192, "num_local_experts": 0},
    **{"num_experts_per_tok": 0, "tie_word_embeddings": True, "layer_types": ["attention"] * 40},
    **{"mamba_d_state": 256, "mamba_n_heads": 128, "mamba_d_conv": 4, "mamba_expand": 2},
}
"""As ibm-granite/granite-4.0-micro."""
GEMMA_4_26B: Final = {
    "model_type": "gemma4",
    "text_config": {
        **{"model_type": "gemma4_text", "hidden_size": 2816, "intermediate_size": 2112},
        **{"num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8},
        **{"head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 2},
        **{"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8},
        **{"moe_intermediate_size": 704, "sliding_window": 1024, "vocab_size": 262144},
        **{"max_position_embeddings": 262144, "tie_word_embeddings": True},
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
    },
}
"""As google/gemma-4-26B-A4B."""
GLM_5: Final = {
    **{"model_type": "glm_moe_dsa", "hidden_size": 6144, "intermediate_size": 12288},
    **{"num_hidden_layers": 78, "num_attention_heads": 64, "num_key_value_heads": 64},
    **{"kv_lora_rank": 512, "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256},
    **{"qk_rope_head_dim": 64, "n_routed_experts": 256, "n_shared_experts": 1},
    **{"num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 3},
    **{"vocab_size": 154880, "index_topk": 2048, "tie_word_embeddings": False},
}
"""As zai-org/GLM-5."""
LLAMA: Final = {
    **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 100},
    **{"num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 8192},
}
PART: Final = "layers attend to only a part of the context"
QUANTIZED: Final = "its weights are quantized, but sizes are computed for bf16"


def test_what_a_nested_configuration_leaves_out_is_the_default_of_its_family() -> None:
    shape = from_config(GEMMA_3_4B, "gemma")
    assert (shape.vocabulary, shape.heads, shape.kv_heads, shape.head_dim) == (262208, 8, 4, 256)
    assert shape.tied_embeddings
    assert shape.parameters / 1e9 == pytest.approx(3.88, abs=0.01)
    assert shape.window is not None
    assert (shape.window.layers, shape.window.tokens) == (29, 1024)  # every sixth is global
    assert shape.caveats == ("only its language model is counted",)
    # Llava's language model is a plain Llama: what is given has precedence.
    llava = {"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064}}
    shape = from_config(llava, "llava")
    assert (shape.vocabulary, shape.layers, shape.hidden) == (32064, 32, 4096)


def test_settings_of_layers_that_a_model_does_not_have_are_ignored() -> None:
    shape = from_config(GRANITE_4_MICRO, "granite")
    assert shape.parameters / 1e9 == pytest.approx(3.40, abs=0.01)
    assert (shape.experts, shape.intermediate, shape.tied_embeddings) == (0, 8192, True)
    hybrid = {**GRANITE_4_MICRO, "layer_types": ["mamba"] * 36 + ["attention"] * 4}
    with pytest.raises(ValueError, match=r"layers other than attention \(mamba, mamba_d_state"):
        from_config(hybrid, "it")


def test_experts_beside_a_dense_network_are_counted_with_it() -> None:
    shape = from_config(GEMMA_4_26B, "gemma")
    assert (shape.experts, shape.active_experts, shape.shared_intermediate) == (128, 8, 2112)
    assert shape.parameters / 1e9 == pytest.approx(25.2, abs=0.1)  # "26B"
    assert shape.active_parameters / 1e9 == pytest.approx(3.8, abs=0.1)  # "A4B"


def test_siblings_with_the_same_attention_have_the_same_caveat() -> None:
    """One release lists the kinds of its layers, the other has only the settings of an indexer."""
    for kind in ("deepseek_sparse_attention", "indexed_attention"):
        listed = from_config({**GLM_5, "layer_types": [kind] * 78}, "GLM-5")
        for family in ("glm_moe_dsa", "not_known_yet"):
            plain = from_config({**GLM_5, "model_type": family}, "GLM-5")
            assert any(f"78 of its 78 {PART}" in one for one in plain.caveats)
            assert plain.parameters == listed.parameters
        assert any(f"78 of its 78 {PART}" in one for one in listed.caveats)


@pytest.mark.parametrize(
    ("change", "window", "partly"),
    [
        ({}, None, 0),
        ({"sliding_window": 1024}, None, 4),
        ({"sliding_window": 1024, "use_sliding_window": False}, None, 0),
        ({"sliding_window": 8192}, None, 0),
        ({"sliding_window": 1024, "sliding_window_pattern": 2}, (2, 1024), 0),
        ({"model_type": "gemma2", "sliding_window": 1024}, (2, 1024), 0),
        ({"model_type": "gemma2", "sliding_window": None}, None, 0),
        ({"model_type": "llama4_text", "attention_chunk_size": 2048}, (3, 2048), 0),
        (
            {"layer_types": ["sliding_attention", "attention"] * 2, "sliding_window": 512},
            (2, 512),
            0,
        ),
        ({"compress_ratios": [0, 4, 4, 4]}, None, 4),
        ({"sparse_attention_config": {"use_sparse_attention": True}}, None, 4),
        ({"intermediate_size": [128] * 4, "num_key_value_heads": [2] * 4}, None, 0),
    ],
)
def test_windows_and_lists_are_read_as_each_family_writes_them(
    change: dict[str, Any], window: tuple[int, int] | None, partly: int
) -> None:
    shape = from_config({**LLAMA, **change}, "it")
    found = None if shape.window is None else (shape.window.layers, shape.window.tokens)
    assert found == window
    assert [one.split()[0] for one in shape.caveats if PART in one] == [str(partly)] * bool(partly)
    assert shape.intermediate == 128


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"intermediate_size": [128, 256, 128, 128]},
            "differs between layers .*cannot be simulated",
        ),
        ({"block_configs": [{}]}, r"differ in width \(block_configs\)"),
        ({"num_hidden_layers": 10**9}, "has 1000000000 layers; at most 10000 can be"),
        ({"hidden_size": 10**30}, r"'hidden_size' .* whole number >= 0 and < "),
        ({"max_position_embeddings": "8k"}, "'max_position_embeddings' .* must be a whole number"),
        ({"vocab_size": None}, "has no 'vocab_size'; add it to the file"),
    ],
)
def test_what_is_not_modeled_is_refused_with_the_setting(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        from_config({**LLAMA, **change}, "it")
    assert one_line(refused.value)


@pytest.mark.parametrize(
    ("config", "beside", "quantized"),
    [
        ({}, None, False),
        ({}, {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}, True),
        ({}, {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}, True),
        ({}, {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}, False),
        ({}, {"quantization": []}, False),
        *(
            ({"quantization_config": {"quant_method": method}}, None, True)
            for method in ("fp8", "gptq", "awq", "bitsandbytes", "compressed-tensors", "modelopt")
        ),
        ({"quantization_config": {"config_groups": {}}}, None, True),
        ({"quantization_config": {"quant_method": "mxfp4"}}, None, False),  # sizes are in MXFP4
    ],
)
@pytest.mark.parametrize("prefix", ["", "nvidia--Llama_"])
def test_quantized_releases_have_the_caveat_whichever_file_says_so(
    tmp_path: Path, config: dict[str, Any], beside: Any, quantized: bool, prefix: str
) -> None:
    file = tmp_path / f"{prefix}config.json"
    file.write_text(json.dumps({**LLAMA, **config}))
    if beside is not None:
        (tmp_path / f"{prefix}hf_quant_config.json").write_text(json.dumps(beside))
    assert (QUANTIZED in find_model(str(file)).caveats) == quantized
    if not prefix:
        assert (QUANTIZED in find_model(str(tmp_path)).caveats) == quantized


def test_files_that_are_no_configuration_are_refused(tmp_path: Path) -> None:
    for content in ("{", "[]", '{"a": ' * 100_000, "", "\ufeff", "<html>"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match=r"config\.json (cannot be read|holds a)") as refused:
            find_model(str(tmp_path))
        assert one_line(refused.value)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "hf_quant_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"hf_quant_config\.json holds a list"):
        find_model(str(tmp_path))


def test_every_family_of_transformers_is_read_or_refused_in_one_line() -> None:
    """The defaults of all decoders that the installed transformers has, as it saves them."""
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    known = json.loads(FAMILIES_FILE.read_text(encoding="utf-8"))
    read: dict[str, int] = {}
    refused: dict[str, ValueError] = {}
    for name in [*known, *(f"{one}_text" for one in known)]:
        if name not in auto.CONFIG_MAPPING:
            continue
        config = auto.CONFIG_MAPPING[name]().to_diff_dict()
        assert read_sizes(Path("config.json"), config).model_type == config["model_type"]
        try:
            read[name] = from_config(config, name).parameters
        except ValueError as error:
            refused[name] = error
    assert all(parameters > 0 for parameters in read.values())
    assert all(map(one_line, refused.values()))
    assert len(read) > 2 * len(refused)
    # Each for a reason that has to do with what is modeled.
    reasons = (
        *("layers other than attention", "encoder-decoder", "not modeled", "at least one must"),
        *("has no 'head_dim', so", "has no 'num_attention_heads'", "has no 'num_experts_per_tok'"),
        *("has no 'intermediate_size'", "has no 'hidden_size'"),
    )
    said = map(str, refused.values())
    assert [text for text in said if not any(one in text for one in reasons)] == []


def test_the_defaults_of_families_are_those_of_transformers() -> None:
    """After an update of transformers: `python -m tools.model_families`."""
    assert FAMILIES_FILE.read_text(encoding="utf-8") == text(families())


@mutations
def test_damaged_configurations_are_read_or_refused_in_one_line(count: int) -> None:
    rng, refused = random.Random(5), []
    for _ in range(count):
        config = damaged_json(rng, rng.choice((GEMMA_3_4B, GRANITE_4_MICRO, GEMMA_4_26B, GLM_5)))
        if not isinstance(config, dict):
            continue
        try:
            assert from_config(config, "it").parameters >= 0
        except ValueError as error:
            refused.append(error)
    assert all(map(one_line, refused))
    assert count / 5 < len(refused) < count
