"""Check a model folder before anything is started: its files, and the tensors it must have.

    config.json --expected--> names and shapes  <--compared-->  headers of the weights

Engines and transformers fill missing tensors with random numbers, at most with a warning in a log.
Llama, Mistral, Qwen2, Qwen3 and the language models of Qwen-VL are compared tensor by tensor; other
architectures must have every layer and every expert, and `models.load` compares the rest with
transformers' model. Reads no tensor and needs no torch.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from areal_lab.models.files import (
    MOST_INDEX_BYTES,
    StoredTensor,
    check_json_ends,
    foreign,
    invalid,
    listed,
    read_header,
    read_object,
)

CONFIG: Final = "config.json"
ADAPTER_CONFIG: Final = "adapter_config.json"
QUANTIZATION: Final = "hf_quant_config.json"
"""File in which NVIDIA's ModelOpt describes quantized weights; config.json may not."""
SINGLE: Final = ("model.safetensors", "pytorch_model.bin")
INDEXES: Final = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_OBJECTS: Final = (
    *("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", QUANTIZATION),
    *("preprocessor_config.json", "processor_config.json"),
)
_LAYERS: Final = (
    *("model.language_model.layers.", "language_model.model.layers.", "model.layers."),
    *("model.text_model.layers.", "text_model.model.layers.", "language_model.layers."),
    *("model.decoder.layers.", "transformer.h.", "transformer.blocks.", "transformer.layers."),
    *("gpt_neox.layers.", "backbone.layers.", "layers.", "h."),
)
"""Prefix of the names of a decoder's layers, before their number."""
_FLOATS: Final = frozenset(("F16", "BF16", "F32", "F64"))
_MOST_NAME_BYTES: Final = 255
_EXPERT: Final = re.compile(r"(.*\.experts\.)(\d+)\.")

_Size = Annotated[int, Field(ge=1)]
_Layers = Annotated[int, Field(ge=1, le=10_000)]
_Each = _Size | list[Any] | None
"""A number for all layers, or one for each."""


def _named(*names: str) -> Any:
    return Field(None, validation_alias=AliasChoices(*names))


class Sizes(BaseModel):
    """Fields of a configuration with the sizes of a decoder; None for missing ones."""

    model_config = ConfigDict(strict=True, frozen=True, protected_namespaces=())

    model_type: str | None = None
    architectures: list[str] | None = None
    layers: _Layers | None = _named("num_hidden_layers", "n_layer")
    hidden: _Size | None = _named("hidden_size", "n_embd")
    heads: _Each = _named("num_attention_heads", "n_head")
    kv_heads: _Each = _named("num_key_value_heads")
    head_dim: Annotated[int, Field(ge=0)] | None = None
    intermediate: _Each = _named("intermediate_size")
    vocab: _Size | None = _named("vocab_size")
    context: _Size | None = _named("max_position_embeddings", "n_positions")
    experts: _Each = _named("num_experts", "num_local_experts", "n_routed_experts")
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    mixture: bool = False
    """True if some layer is a mixture of experts."""
    nested: bool = False
    """True if it is one of several parts of a model."""


_QWEN2_VL: Final = {
    **{"vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568},
    **{"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8},
}
_QWEN2: Final = {
    **{"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016},
    **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32},
}
_QWEN3: Final = {**_QWEN2, "head_dim": 128}
_LLAMA: Final = {
    **{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008},
    **{"num_hidden_layers": 32, "num_attention_heads": 32},
}
_DEFAULTS: Final[Mapping[str, Mapping[str, int]]] = {
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8},
    "qwen2": _QWEN2,
    "qwen2_vl": _QWEN2_VL,
    "qwen2_5_vl": _QWEN2_VL,
    "qwen3": _QWEN3,
    "qwen3_vl": _QWEN3,
}
"""Architectures whose tensors are known, with the defaults of their configuration (transformers
5.23): for a language model with a vision tower, values that equal them are not written."""


class Quantization(NamedTuple):
    """Quantization of weights."""

    method: str
    """Such as `fp8` or `NVFP4`."""
    file: str
    """File that describes it."""


def check_folder(folder: Path) -> None:
    """Reject a broken or incomplete model folder.

    A tied head, a value output and buffers may be absent, and other files present.
    """
    if (folder / ADAPTER_CONFIG).is_file():
        base = read_object(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
        raise ValueError(
            f"{folder} has {ADAPTER_CONFIG}: it is a LoRA adapter of {str(base)[:200]}, not a "
            "model; merge it into that model (peft: merge_and_unload) and name the merged folder"
        )
    whole = read_object(folder / CONFIG)
    sizes = read_sizes(folder / CONFIG, whole)
    for name in _OBJECTS:
        if (folder / name).is_file():
            read_object(folder / name)
    check_json_ends(folder / "tokenizer.json")
    stored = _stored(folder)
    if stored is not None:
        plain = quantization(folder, whole) is None
        _check_tensors(folder, sizes, stored, exact=plain)
        if plain:
            _check_types(folder, stored)


def read_sizes(path: Path, config: Mapping[str, Any] | None = None) -> Sizes:
    """Sizes of the decoder in a `config.json`."""
    whole = read_object(path) if config is None else config
    text = whole.get("text_config")
    if text is None:
        text = {}
    elif not isinstance(text, dict):
        raise ValueError(f"{path}: text_config is a {type(text).__name__}, but must be an object")
    kind = str(text.get("model_type") or whole.get("model_type")).removesuffix("_text")
    one = {**_DEFAULTS.get(kind, {}), **(text or whole)}
    one["model_type"] = kind if text else whole.get("model_type")
    one["architectures"] = whole.get("architectures")
    one["tie_word_embeddings"] = (
        whole.get("tie_word_embeddings") or text.get("tie_word_embeddings") or None
    )
    if one.get("max_position_embeddings") is None:
        one["max_position_embeddings"] = whole.get("max_position_embeddings")
    one["nested"] = bool(text)
    one["mixture"] = any("experts" in key for key in one)
    try:
        sizes = Sizes.model_validate(one)
        if kind in _DEFAULTS:
            _known(sizes)
    except ValidationError as error:
        raise ValueError(f"{path}: {invalid(error)}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return sizes


def quantization(folder: Path, config: Mapping[str, Any] | None = None) -> Quantization | None:
    """Quantization of the weights of a folder; None if they are not quantized."""
    whole = read_object(folder / CONFIG) if config is None else config
    text = whole.get("text_config")
    for one in (whole, text if isinstance(text, dict) else {}):
        if found := one.get("quantization_config"):
            named = found if isinstance(found, dict) else {"quant_method": found}
            method = named.get("quant_algo") or named.get("quant_method") or "unnamed"
            return Quantization(str(method)[:60], CONFIG)
    if not (folder / QUANTIZATION).is_file():
        return None
    found = read_object(folder / QUANTIZATION).get("quantization")
    method = found.get("quant_algo") if isinstance(found, dict) else None
    return Quantization(str(method)[:60], QUANTIZATION) if method else None


def weight_files(folder: Path) -> list[Path]:
    """The files with weights that transformers loads; empty if there are none."""
    for single, index in zip(SINGLE, INDEXES, strict=True):
        if (folder / single).is_file():
            return [folder / single]
        if (folder / index).is_file():
            return sorted({folder / name for name in _weight_map(folder / index).values()})
    return []


def _weight_map(index: Path) -> Mapping[str, str]:
    """File of each tensor."""
    whole = read_object(index, MOST_INDEX_BYTES)
    found = whole.get("weight_map")
    if not isinstance(found, dict) or not found:
        raise ValueError(f"{index} has no weight_map that names tensors and their files")
    if not isinstance(whole.get("metadata"), dict):
        raise ValueError(f'{index} has no metadata, which transformers reads; add "metadata": {{}}')
    for tensor, file in found.items():
        if not isinstance(file, str) or not _is_name(file):
            raise ValueError(
                f"{index}: weight_map says {file!r:.80} of {tensor[:120]}, but must name a file of "
                "its folder"
            )
    files = sorted(set(found.values()))
    missing = [file for file in files if not (index.parent / file).is_file()]
    if missing:
        raise ValueError(
            f"{index} names {len(files)} files, of which {len(missing)} are missing: "
            f"{listed(missing)}; download or copy the folder again"
        )
    return found


def _is_name(file: str) -> bool:
    short = len(file.encode("utf-8", "replace")) <= _MOST_NAME_BYTES
    return short and file.isprintable() and file not in ("", "..") and Path(file).name == file


def _stored(folder: Path) -> dict[str, StoredTensor] | None:
    """Tensors of all files; None if they are pickled, which only torch can read."""
    files = weight_files(folder)
    if not files or files[0].suffix == ".bin":
        for file in files:
            _check_pickled(file)
        return None
    stored: dict[str, StoredTensor] = {}
    for file in files:
        found = read_header(file)
        if twice := sorted(stored.keys() & found.keys()):
            raise ValueError(
                f"{folder} has {len(twice)} tensors in more than one file: {listed(twice)}; "
                "which of them counts is not known: save the model again"
            )
        stored |= found
    if files != [folder / SINGLE[0]]:
        absent = sorted(_weight_map(folder / INDEXES[0]).keys() - stored.keys())
        if absent:
            raise ValueError(
                f"{folder / INDEXES[0]} names {len(absent)} tensors that its files lack: "
                f"{listed(absent)}; download or copy the folder again"
            )
    return stored


def _check_pickled(file: Path) -> None:
    """Check for a zip archive (since torch 1.6), whose directory is at its end, or a plain
    pickle.
    """
    with file.open("rb") as opened:
        start = opened.read(512)
    why = foreign(start)
    if not why and not start.startswith(b"\x80") and not zipfile.is_zipfile(file):
        why = f"its {file.stat().st_size:,} bytes are not an archive of torch: cut off, or other"
    if why:
        raise ValueError(f"{file} has no weights: {why}")


def _check_tensors(
    folder: Path, sizes: Sizes, stored: Mapping[str, StoredTensor], *, exact: bool
) -> None:
    prefix = next((p for p in _LAYERS if any(name.startswith(p) for name in stored)), None)
    kind, layers = sizes.model_type, sizes.layers
    # The prefix of a decoder in a model with other parts depends on the model.
    if exact and kind in _DEFAULTS and (prefix or not sizes.nested):
        prefix = prefix or "model.layers."
        expected = dict(expected_tensors(sizes, prefix.removesuffix("layers.")))
        refuse_tensors(
            folder,
            f"{kind}, {layers} layers",
            expected=expected,
            stored={name: tensor.shape for name, tensor in stored.items()},
            extra=[
                name
                for name in stored
                if name.startswith(prefix) and name.endswith(".weight") and name not in expected
            ],
        )
        wants = not sizes.tie_word_embeddings and _has_head(sizes)
        if wants and not any(name.endswith("lm_head.weight") for name in stored):
            raise ValueError(
                f"{folder} lacks lm_head.weight, its output layer, which is not tied to the "
                "embedding (tie_word_embeddings in config.json); save the whole model"
            )
    elif prefix is not None and layers is not None:
        _check_numbers(folder, sizes, prefix, stored)


def _check_types(folder: Path, stored: Mapping[str, StoredTensor]) -> None:
    """Require scales for weights of integers and 8-bit numbers, which are quantized."""
    odd = [
        f"{name} is {tensor.dtype}"
        for name, tensor in stored.items()
        if name.startswith(_LAYERS) and name.endswith(".weight") and tensor.dtype not in _FLOATS
    ]
    if odd:
        raise ValueError(
            f"{folder} has {len(odd)} weights that are quantized ({listed(odd, 3)}), but neither "
            f"its {CONFIG} (quantization_config) nor {QUANTIZATION} says how; use the release in "
            "bf16, or add that file"
        )


def refuse_tensors(
    folder: Path,
    kind: str,
    *,
    expected: Mapping[str, list[int]],
    stored: Mapping[str, list[int]],
    extra: list[str],
) -> None:
    """Compare the shapes of `stored` tensors with the `expected` ones of an architecture."""
    wanted = f"of the {len(expected)} that config.json asks for ({kind})"
    if missing := [name for name in expected if name not in stored]:
        raise ValueError(
            f"{folder} lacks {len(missing)} tensors {wanted}: {listed(missing)}; download or copy "
            "the folder again, or correct its config.json"
        )
    if other := [name for name, shape in expected.items() if list(stored[name]) != list(shape)]:
        shown = [f"{one} is {list(stored[one])} and must be {list(expected[one])}" for one in other]
        raise ValueError(
            f"{folder} has {len(other)} tensors of another size {wanted}: {listed(shown, 3)}; "
            "its config.json belongs to another model"
        )
    if extra:
        raise ValueError(
            f"{folder} has {len(extra)} tensors in its layers that config.json has no place for "
            f"({kind}): {listed(extra)}; its config.json belongs to another model"
        )


def _check_numbers(
    folder: Path, sizes: Sizes, prefix: str, stored: Mapping[str, StoredTensor]
) -> None:
    """Check that every layer, and every expert of a mixture, is there."""
    found: set[int] = set()
    experts: dict[str, set[int]] = {}
    for name in stored:
        number = name.removeprefix(prefix).partition(".")[0]
        if name.startswith(prefix) and number.isdecimal():
            found.add(int(number))
        if match := _EXPERT.match(name):
            experts.setdefault(match[1], set()).add(int(match[2]))
    layers = sizes.layers or 0
    if missing := [f"{prefix}{n}.*" for n in range(layers) if n not in found]:
        raise ValueError(
            f"{folder} lacks {len(missing)} of the {layers} layers that config.json asks for "
            f"({sizes.model_type}): {listed(missing)}; download or copy the folder again"
        )
    if isinstance(sizes.experts, int):
        absent = [
            f"{one}{n}.*"
            for one, numbers in experts.items()
            for n in range(min(sizes.experts, 100_000))
            if n not in numbers
        ]
        if absent:
            raise ValueError(
                f"{folder} lacks {len(absent)} of {sizes.experts} experts a layer that config.json "
                f"asks for ({sizes.model_type}): {listed(absent)}; download or copy the folder "
                "again"
            )


def _has_head(sizes: Sizes) -> bool:
    """True if the saved model has an output layer: a body or a reward model has none."""
    named = sizes.architectures
    return not named or any(one.endswith(("LM", "LMHeadModel", "Generation")) for one in named)


def _known(sizes: Sizes) -> tuple[int, int, int, int, int, int]:
    """Layers, hidden width, widths of queries, keys, head and feed-forward of a known family."""
    layers, hidden, heads, inner = sizes.layers, sizes.hidden, sizes.heads, sizes.intermediate
    kv = sizes.kv_heads
    if not (layers and hidden and isinstance(heads, int) and isinstance(inner, int)) or isinstance(
        kv, list
    ):
        raise ValueError(
            "num_hidden_layers, hidden_size, num_attention_heads, num_key_value_heads and "
            f"intermediate_size must be whole numbers in a {sizes.model_type} model"
        )
    width = sizes.head_dim or hidden // heads
    return layers, hidden, heads * width, (kv or heads) * width, width, inner


def expected_tensors(sizes: Sizes, prefix: str = "model.") -> Iterator[tuple[str, list[int]]]:
    """Names and shapes of a known decoder's tensors, without those of its head."""
    layers, hidden, queries, keys, width, inner = _known(sizes)
    kind = str(sizes.model_type)
    qwen2, qwen3 = kind.startswith("qwen2"), kind.startswith("qwen3")
    biased = qwen2 or (kind != "mistral" and bool(sizes.attention_bias))
    matrices: Iterable[tuple[str, int, int, bool]] = (
        ("self_attn.q_proj", queries, hidden, biased),
        ("self_attn.k_proj", keys, hidden, biased),
        ("self_attn.v_proj", keys, hidden, biased),
        ("self_attn.o_proj", hidden, queries, biased and not qwen2),
        ("mlp.gate_proj", inner, hidden, kind == "llama" and bool(sizes.mlp_bias)),
        ("mlp.up_proj", inner, hidden, kind == "llama" and bool(sizes.mlp_bias)),
        ("mlp.down_proj", hidden, inner, kind == "llama" and bool(sizes.mlp_bias)),
    )
    yield f"{prefix}embed_tokens.weight", [sizes.vocab or 0, hidden]
    for number in range(layers):
        layer = f"{prefix}layers.{number}."
        for name, rows, columns, bias in matrices:
            yield f"{layer}{name}.weight", [rows, columns]
            if bias:
                yield f"{layer}{name}.bias", [rows]
        if qwen3:
            yield f"{layer}self_attn.q_norm.weight", [width]
            yield f"{layer}self_attn.k_norm.weight", [width]
        yield f"{layer}input_layernorm.weight", [hidden]
        yield f"{layer}post_attention_layernorm.weight", [hidden]
    yield f"{prefix}norm.weight", [hidden]
