"""What a Hugging Face model folder says about itself, read without torch."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SMALLEST_BYTES_PER_PARAMETER = 2  # of a .bin file, whose header needs torch to be read


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Size and context of a model."""

    parameters: int
    """Stored numbers; tied weights count once. An upper bound if the weights are `.bin` files."""
    context_tokens: int | None
    """Maximum tokens of prompt and response together; None if the config does not say."""


def read_model_facts(folder: Path) -> ModelFacts:
    """Read `config.json` and the headers of the weights.

    Raises:
        ValueError: in one line, naming the file that is broken.
    """
    config = _config(folder)
    context = config.get("max_position_embeddings", config.get("n_positions"))
    if context is None:  # models of several modalities keep the language model's settings apart
        context = config.get("text_config", {}).get("max_position_embeddings")
    safetensors = sorted(folder.glob("*.safetensors"))
    if safetensors:
        parameters = sum(_parameters(file) for file in safetensors)
    else:
        stored_bytes = sum(file.stat().st_size for file in folder.glob("*.bin"))
        parameters = stored_bytes // _SMALLEST_BYTES_PER_PARAMETER
    return ModelFacts(parameters, context)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Widths of a decoder, in numbers per token."""

    kind: str
    """`model_type` of its configuration."""
    layers: int
    hidden: int
    intermediate: int
    head_width: int
    query_width: int
    """Of all query heads together."""
    kv_width: int
    """Of the keys of one token in one layer."""
    vocab: int
    head_norms: bool
    """Whether queries and keys are normalized, as in Qwen3."""
    dense: bool
    """Whether each layer has one feed-forward network of width `intermediate`."""
    context_tokens: int | None

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.query_width // self.head_width

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_width // self.head_width


def read_model_shape(folder: Path) -> ModelShape | None:
    """Read `config.json`; None if it does not give heads and widths as Llama and Qwen do.

    Raises:
        ValueError: as `read_model_facts`.
    """
    config = _config(folder)
    config = config.get("text_config", config)
    try:
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        width = config.get("head_dim") or hidden // heads
        return ModelShape(
            kind=str(config.get("model_type")),
            head_width=width,
            layers=config["num_hidden_layers"],
            hidden=hidden,
            intermediate=config.get("intermediate_size", 0),
            query_width=heads * width,
            kv_width=(config.get("num_key_value_heads") or heads) * width,
            vocab=config.get("vocab_size", 0),
            head_norms=str(config.get("model_type")).startswith("qwen3"),
            dense="intermediate_size" in config and not any("experts" in key for key in config),
            context_tokens=config.get("max_position_embeddings"),
        )
    except (KeyError, TypeError, ZeroDivisionError):
        return None


@dataclass(frozen=True, slots=True)
class CacheRoom:
    """Keys and values that a server keeps on a CPU."""

    tokens: int
    bytes: int


CACHE_BYTES = 2 << 30
"""Largest key-value cache of a server on a CPU, unless one sequence needs more."""
_UNKNOWN_ROOM = CacheRoom(32768, 1 << 30)  # of models whose configuration says no sizes


def cache_room(
    folder: Path, *, dtype: str, sequences: int, context_tokens: int | None = None
) -> CacheRoom:
    r"""Room for `sequences` of the longest kind, within `CACHE_BYTES`; for one in any case.

    $$ 2 \cdot layers \cdot heads_{kv} \cdot width_{head} \cdot bytes $$

    per token, from `config.json`. Servers that run out of room compute tokens again, so less room
    costs time and nothing else.

    Args:
        context_tokens: longest sequence; None takes the model's.
    """
    shape = read_model_shape(folder)
    if shape is None or not (context := context_tokens or shape.context_tokens):
        return _UNKNOWN_ROOM
    numbers = 2 * shape.layers * shape.kv_width
    token_bytes = numbers * (2 if dtype == "bfloat16" else 4)
    tokens = max(context, min(sequences * context, CACHE_BYTES // token_bytes))
    return CacheRoom(tokens, tokens * token_bytes)


def transfer_bytes(parameters: int, dtype: str) -> int:
    """Largest size of one set of weights on its way to the engines.

    Args:
        dtype: `rollout.dtype`; `auto` may turn out to be float32, whatever is stored.
    """
    return parameters * (2 if dtype == "bfloat16" else 4)


def end_token_ids(folder: Path) -> frozenset[int]:
    """Tokens that end a response, from the generation config or else the config."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        value = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        if value is not None:
            return frozenset(value if isinstance(value, list) else (value,))
    return frozenset()


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return config


def _parameters(file: Path) -> int:
    """Numbers in a safetensors file: 8 bytes of header length, then the header as JSON."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 0 < length < file.stat().st_size:
                raise ValueError("it is cut off or of another kind")
            header: dict[str, Any] = json.loads(opened.read(length))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is not a safetensors file: {error}") from error
    return sum(math.prod(v["shape"]) for name, v in header.items() if name != "__metadata__")
