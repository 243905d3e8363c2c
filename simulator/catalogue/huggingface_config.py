"""Read the shape of a model from a Hugging Face `config.json`.

Families name the same field differently (`num_hidden_layers`, `n_layer`). Families that were not
compared with their implementation are read like Llama, with a note in `caveats`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from areal_lab.host.foreign import parse_json, read_text, unreadable
from simulator.catalogue.transformer import (
    LatentAttention,
    LinearAttention,
    ModelShape,
    SlidingWindow,
)

_SPELLINGS = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "intermediate": ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "active_experts": (
        "num_experts_per_tok",
        "num_experts_per_token",
        "moe_k",
        "moe_topk",
        "top_k_experts",
    ),
    "moe_intermediate": ("moe_intermediate_size", "expert_ffn_hidden_size"),
}
"""Names of each field in configurations, in order of precedence."""


def _families(names: str) -> frozenset[str]:
    return frozenset(names.split())


_SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_FIRST_MIXTURE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
_SHARED_WIDTH = "shared_intermediate_size"
_EVERY_MIXTURE = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
"""Settings that a family may leave out: the number of shared experts, the first layer that is a
mixture of experts, and the distance between two of them."""

_TWO_MATRICES = _families(
    "apertus arcee bloom codegen falcon gpt2 gpt_bigcode gpt_neox gptj nanochat nemotron opt "
    "persimmon phi starcoder2"
)
"""Families whose MLP has no gate."""

_GATED = _families("qwen3_next qwen3_5 qwen3_5_moe")
"""Families whose attention gates its output by default."""

_COMPARED = _TWO_MATRICES | _families(
    "cohere cohere2 cohere2_moe cwm deepseek_v2 deepseek_v3 dots1 ernie4_5 ernie4_5_moe exaone4 "
    "exaone_moe flex_olmo gemma gemma2 gemma3 glm glm4 glm4_moe glm4_moe_lite gpt_oss granite "
    "granitemoe helium hunyuan_v1_dense llama llama4 minimax_m2 ministral ministral3 mistral "
    "mixtral olmo olmo2 olmo3 olmoe phi3 phimoe qwen2 qwen2_5_vl qwen2_moe qwen2_vl qwen3 "
    "qwen3_moe qwen3_next qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe seed_oss smollm3 solar_open "
    "stablelm vaultgemma youtu kimi_linear"
)
"""Families whose parameters were compared with transformers 5.23: equal within 1.4 %, and within
0.1 % if positions are not learned."""

_FULL = _families("full_attention attention global_attention")
"""Kinds of layers that attend to the whole context; `attention` is Granite 4's."""
_WINDOWED = _families(
    "sliding_attention chunked_attention sliding_window_attention local_attention"
)
"""Kinds of layers that attend to the last tokens, or to those of the same chunk."""
_CHOOSING = _families(
    "indexed_attention sparse_attention deepseek_sparse_attention compressed_sparse_attention "
    "heavily_compressed_attention"
)
"""Kinds of layers that choose or compress what they attend to; they are counted as if they attended
to all of it, with a note."""
_LINEAR = "linear_attention"
PATTERN_KINDS: Final = _WINDOWED | _CHOOSING | {"full_attention"}
"""Kinds of layers that `FAMILIES_FILE` has patterns of."""
_INDEXES = ("index_topk", "index_head_dim", "compress_ratios", "sparse_attention_config")
"""Settings of layers that choose or compress what they attend to, of configs without
`layer_types`."""

_NO_CONTEXT = ("mamba", "ssm_", "state_size", "conv_L_cache", "lru_width")
"""Prefixes of settings of layers with a state that is not modeled."""
_HARMLESS = ("mamba_ssm_dtype",)
"""Settings with such a prefix that say nothing about layers."""

READ_FIELDS: Final = frozenset(
    _families(
        "vocab_size head_dim kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim "
        "sliding_window attention_chunk_size use_sliding_window max_position_embeddings "
        "global_head_dim shared_expert_intermediate_size full_attention_interval "
        "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim "
        "linear_conv_kernel_dim tie_word_embeddings moe_layer_freq"
    )
).union(*_SPELLINGS.values(), _SHARED_EXPERTS, _FIRST_MIXTURE, _EVERY_MIXTURE)
"""Fields whose defaults are in `FAMILIES_FILE`."""
FAMILIES_FILE: Final = Path(__file__).parent / "data" / "families.json"
"""Defaults of transformers 5.23 for fields that a config leaves out, by family
(`tools.model_families`)."""
_QUANTIZATION_FILE: Final = "hf_quant_config.json"
"""Beside a config: NVIDIA's ModelOpt names the quantization there; some releases only there."""
_NESTED: Final = ("text_config", "llm_config", "language_config")
_PATTERNS: Final = ("sliding_window_pattern", "_sliding_window_pattern")
_MOST: Final = 1 << 40
_MOST_LAYERS: Final = 10_000


def read_config(path: Path) -> ModelShape:
    """Shape of the model in a folder or a `config.json`."""
    file = path / "config.json" if path.is_dir() else path
    config = _read_object(file)
    beside = file.with_name(file.name.removesuffix("config.json") + _QUANTIZATION_FILE)
    if file.name.endswith("config.json") and beside.is_file():
        quantized = _read_object(beside).get("quantization")
        if isinstance(quantized, dict) and quantized.get("quant_algo"):
            config = {"quantization_config": {"quant_method": "modelopt", **quantized}, **config}
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    return from_config(config, name)


def _read_object(file: Path) -> dict[str, Any]:
    try:
        value = parse_json(read_text(file))
    except (OSError, ValueError) as error:
        raise unreadable(file, error) from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds a {type(value).__name__}, but must hold an object")
    return value


def from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """Shape of the model that a `config.json` describes.

    Args:
        config: its content. Multimodal models describe the language model in `text_config`; only
            that part is counted, because only it generates.
        name: name of the model, for results and messages.
    """
    whole = config
    for key in _NESTED:
        nested = config.get(key)
        if isinstance(nested, Mapping):
            config = nested
            break
    family = str(config.get("model_type", whole.get("model_type", ""))).removesuffix("_text")
    defaults = _family_defaults().get(family, {})
    if config is not whole:
        config = {**defaults, **config, "layer_types": config.get("layer_types")}
    config = _with_kinds(config, defaults)
    read = _Fields(config, name)
    if whole.get("is_encoder_decoder") or config.get("is_encoder_decoder"):
        raise ValueError(f"{name} is an encoder-decoder model; only decoders can be simulated")
    linear = _linear(read)
    _refuse_other_layers(read, linear)
    heads, hidden = read.number("heads"), read.number("hidden")
    kv_heads = _kv_heads(read, heads)
    layers = read.number("layers")
    if layers > _MOST_LAYERS:
        raise ValueError(
            f"config.json of {name} has {layers} layers; at most {_MOST_LAYERS} can be"
        )
    mixture = _mixture(read, layers)
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(read, hidden, heads),
        intermediate=_intermediate(read, hidden, mixture),
        vocabulary=read.exactly("vocab_size"),
        tied_embeddings=_tied(whole, config, family),
        mxfp4_experts=_quantization(whole, config).get("quant_method") == "mxfp4" and bool(mixture),
        gated=family not in _TWO_MATRICES,
        latent=_latent(read),
        window=_window(read, layers),
        linear=linear,
        gated_attention=bool(config.get("attn_output_gate", family in _GATED)),
        caveats=tuple(_caveats(whole, read, family, layers)),
        source=f"config.json of {name}",
        **mixture,
    )


@cache
def _family_defaults() -> Mapping[str, Mapping[str, Any]]:
    found: dict[str, dict[str, Any]] = parse_json(read_text(FAMILIES_FILE))
    return found


def _with_kinds(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config with the kinds of its layers, where its family has a pattern and it says nothing."""
    pattern, layers = defaults.get("layer_types"), config.get("num_hidden_layers")
    said = any(config.get(key) is not None for key in ("layer_types", *_PATTERNS))
    if said or not pattern or not isinstance(layers, int) or not 0 < layers <= _MOST_LAYERS:
        return config
    return {**config, "layer_types": (pattern * layers)[:layers]}


class _Fields:
    """A config whose readers raise errors that name a missing or wrong field."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.config = config
        self.name = name

    def exactly(self, key: str) -> int:
        """A field by its exact name."""
        return self._first((key,))

    def number(self, field: str) -> int:
        """A field under any of its spellings."""
        return self._first(_SPELLINGS[field])

    def has(self, field: str) -> bool:
        """Return whether any of its spellings has a value."""
        return any(self.config.get(key) is not None for key in _SPELLINGS[field])

    def optional(self, keys: tuple[str, ...], default: int) -> int:
        """The first of these fields that has a value other than 0, or the default."""
        given = tuple(key for key in keys if self.config.get(key))
        return self._first(given) if given else default

    def listed(self, key: str) -> list[Any]:
        """A field that is a list; empty without one."""
        value = self.config.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise ValueError(
                f"{key!r} in config.json of {self.name} is {value!r:.80}, but must be a list"
            )
        return value

    def _first(self, keys: tuple[str, ...]) -> int:
        for key in keys:
            value = self.config.get(key)
            if value is None:
                continue
            if isinstance(value, list) and value:
                if any(one != value[0] for one in value):
                    raise ValueError(
                        f"{key!r} in config.json of {self.name} differs between layers "
                        f"({str(value)[:60]}...), which is not modeled; it cannot be simulated"
                    )
                value = value[0]
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MOST:
                raise ValueError(
                    f"{key!r} in config.json of {self.name} is {value!r:.80}, "
                    "but must be a whole number >= 0"
                    + (f" and < {_MOST}" if isinstance(value, int) and value >= _MOST else "")
                )
            return value
        others = f" (nor {', '.join(map(repr, keys[1:]))})" if keys[1:] else ""
        raise ValueError(
            f"config.json of {self.name} has no {keys[0]!r}{others}; add it to the file"
        )


def _refuse_other_layers(read: _Fields, linear: LinearAttention | None) -> None:
    known = _FULL | _WINDOWED | _CHOOSING | {_LINEAR for _ in (linear,) if linear}
    kinds = {str(kind) for kind in read.listed("layer_types")}
    strange = sorted(kinds - known)
    if read.config.get("block_configs"):
        raise ValueError(
            f"{read.name} has layers that differ in width (block_configs), which are not modeled; "
            "it cannot be simulated"
        )
    # Granite 4 has settings of Mamba layers even if all of its layers are attention.
    granite = str(read.config.get("model_type", "")).startswith("granite")
    if strange or not (granite and kinds):
        strange += [
            key
            for key, value in read.config.items()
            if key.startswith(_NO_CONTEXT) and key not in _HARMLESS and value
        ]
    width, hidden = read.config.get("routed_expert_hidden_size"), read.config.get("hidden_size")
    if width is not None and width != hidden:
        raise ValueError(
            f"{read.name} has experts of another width than its layers (routed_expert_hidden_size "
            f"{width}), which are not modeled; it cannot be simulated"
        )
    if strange:
        named = ", ".join(strange[:3])[:200]
        raise ValueError(
            f"{read.name} has layers other than attention ({named}), whose cost "
            "does not grow with the context as in a transformer; it cannot be simulated"
        )


def _kv_heads(read: _Fields, heads: int) -> int:
    if read.config.get("multi_query") and not read.config.get("new_decoder_architecture"):
        return 1
    # Llama 1 and older models have no such field: every head has its own keys and values.
    return read.number("kv_heads") if read.has("kv_heads") else heads


def _head_dim(read: _Fields, hidden: int, heads: int) -> int:
    if read.config.get("kv_lora_rank") is not None:
        return read.exactly("qk_nope_head_dim")
    if read.config.get("head_dim") is not None:
        return read.exactly("head_dim")
    if not heads or hidden % heads:
        raise ValueError(
            f"config.json of {read.name} has no 'head_dim', so its hidden size ({hidden}) must be "
            f"a multiple of its heads ({heads})"
        )
    return hidden // heads


def _intermediate(read: _Fields, hidden: int, mixture: Mapping[str, int]) -> int:
    if read.config.get("intermediate_size_mlp") is not None:  # Llama 4: the other one is an expert
        return read.exactly("intermediate_size_mlp")
    if not mixture and read.config.get(_SHARED_WIDTH):  # Granite 4 without experts
        return read.exactly(_SHARED_WIDTH)
    if read.has("intermediate"):
        return read.number("intermediate")
    if "n_embd" in read.config or "n_layer" in read.config:  # GPT-2 and relatives
        return 4 * hidden
    if mixture and not mixture["first_dense_layers"]:
        return mixture["moe_intermediate"]
    return read.number("intermediate")


def _mixture(read: _Fields, layers: int) -> dict[str, int]:
    config = read.config
    if not read.has("experts") or read.number("experts") < 2:
        return {}
    # Mixtral, Phi-3.5-MoE, gpt-oss and Llama 4 have experts of `intermediate_size`.
    width = read.number("moe_intermediate" if read.has("moe_intermediate") else "intermediate")
    shared = read.optional(("shared_expert_intermediate_size", _SHARED_WIDTH), 0)
    if config.get("enable_moe_block"):  # Gemma 4 adds the experts to the network of a dense layer
        shared += read.number("intermediate")
    elif config.get("shared_expert_intermediate_size") is None and not shared:
        llama_4 = str(config.get("model_type", "")).startswith("llama4")
        shared = width * (1 if llama_4 else read.optional(_SHARED_EXPERTS, 0))
    return {
        "experts": read.number("experts"),
        "active_experts": read.number("active_experts"),
        "moe_intermediate": width,
        "shared_intermediate": shared,
        "first_dense_layers": layers - _mixture_layers(read, layers),
    }


def _mixture_layers(read: _Fields, layers: int) -> int:
    config = read.config
    for key, dense in (("mlp_layer_types", "dense"), ("moe_layer_freq", 0)):
        kinds = config.get(key)
        if isinstance(kinds, list):
            return sum(kind != dense for kind in kinds)
    listed = config.get("moe_layers")  # Llama 4
    if isinstance(listed, list):
        return len(listed)
    first = read.optional(_FIRST_MIXTURE, 0)
    every = read.optional(("moe_layer_freq",), 1)
    step = read.optional(_EVERY_MIXTURE, 1)
    without = read.listed("mlp_only_layers")
    return sum(
        layer >= first and layer % every == 0 and (layer + 1) % step == 0 and layer not in without
        for layer in range(layers)
    )


def _latent(read: _Fields) -> LatentAttention | None:
    if read.config.get("kv_lora_rank") is None:
        return None
    return LatentAttention(
        cached_rank=read.exactly("kv_lora_rank"),
        rope_head_dim=read.exactly("qk_rope_head_dim"),
        value_head_dim=read.exactly("v_head_dim"),
        query_rank=read.optional(("q_lora_rank",), 0),
    )


def _linear(read: _Fields) -> LinearAttention | None:
    config = read.config
    layers = sum(kind == _LINEAR for kind in read.listed("layer_types"))
    nested = config.get("linear_attn_config")
    if isinstance(nested, Mapping):  # Kimi Linear as published
        inner = _Fields(nested, read.name)
        return LinearAttention(
            layers=len(inner.listed("kda_layers")),
            **_equal_heads(inner, ("num_heads", "head_dim", "short_conv_kernel_size")),
        )
    if config.get("linear_num_heads") is not None:  # the same in transformers
        names = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
        return LinearAttention(layers=layers, **_equal_heads(read, names))
    if config.get("linear_num_value_heads") is None:
        return None
    every = read.optional(("full_attention_interval",), 4)
    count = read.number("layers")
    return LinearAttention(
        layers=layers if config.get("layer_types") is not None else count - count // every,
        key_heads=read.exactly("linear_num_key_heads"),
        value_heads=read.exactly("linear_num_value_heads"),
        key_head_dim=read.exactly("linear_key_head_dim"),
        value_head_dim=read.exactly("linear_value_head_dim"),
        conv_width=read.exactly("linear_conv_kernel_dim"),
    )


def _equal_heads(read: _Fields, names: tuple[str, str, str]) -> dict[str, int]:
    """Kimi Delta Attention: heads of keys and values are alike; gates have the rank of a head."""
    heads, width, conv = (read.exactly(name) for name in names)
    return {
        **dict.fromkeys(("key_heads", "value_heads"), heads),
        **dict.fromkeys(("key_head_dim", "value_head_dim", "gate_rank"), width),
        "conv_width": conv,
    }


def _window(read: _Fields, layers: int) -> SlidingWindow | None:
    kinds = [str(kind) for kind in read.listed("layer_types")]
    windowed = sum(kind in _WINDOWED for kind in kinds)
    tokens = _window_tokens(read)
    if tokens is None:
        return None
    if not kinds:
        pattern = read.optional(_PATTERNS, 0)
        windowed = layers - layers // pattern if pattern else 0
    return SlidingWindow(layers=windowed, tokens=tokens) if windowed else None


def _whole_window(read: _Fields, layers: int) -> int | None:
    """The window of a model that has one in every layer; its cache is bounded, as none here."""
    if read.listed("layer_types") or _window(read, layers) is not None:
        return None
    return _window_tokens(read)


def _window_tokens(read: _Fields) -> int | None:
    config = read.config
    if not config.get("use_sliding_window", True):
        return None
    longest = read.optional(("max_position_embeddings",), 0) or math.inf
    for key in ("sliding_window", "attention_chunk_size"):
        tokens = config.get(key)
        if isinstance(tokens, int) and not isinstance(tokens, bool) and 0 < tokens < longest:
            return tokens
    return None


def _tied(whole: Mapping[str, Any], config: Mapping[str, Any], family: str) -> bool:
    for one in (whole, config):
        tied = one.get("tie_word_embeddings")
        if tied is not None:
            return bool(tied)
    return bool(_family_defaults().get(family, {}).get("tie_word_embeddings"))


def _quantization(whole: Mapping[str, Any], config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = whole.get("quantization_config") or config.get("quantization_config") or {}
    return found if isinstance(found, Mapping) else {"quant_method": found}


def _caveats(whole: Mapping[str, Any], read: _Fields, family: str, layers: int) -> Iterator[str]:
    config = read.config
    if family not in _COMPARED:
        yield f"family {family!r} is unknown: it is counted like Llama"
    if any(isinstance(whole.get(key), Mapping) for key in _NESTED):
        yield "only its language model is counted"
    quantized = _quantization(whole, config)
    if quantized and quantized.get("quant_method") != "mxfp4":
        yield "its weights are quantized, but sizes are computed for bf16"
    kinds = [str(kind) for kind in read.listed("layer_types")]
    indexed = sum(kind in _CHOOSING for kind in kinds)
    chooses = not kinds and any(config.get(key) for key in _INDEXES)
    if chooses or _whole_window(read, layers) is not None:
        indexed = layers
    if indexed:
        yield (
            f"{indexed} of its {layers} layers attend to only a part of the context, but are "
            "counted as if they attended to all of it: cache and attention are upper bounds"
        )
    if config.get("global_head_dim"):
        yield "its global layers have heads of another width, but are counted like the others"
