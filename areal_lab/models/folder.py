"""Facts about a Hugging Face model folder, read without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from areal_lab.host.machine import fast_bfloat16
from areal_lab.models.complete import CONFIG, read_sizes, weight_files
from areal_lab.models.files import read_header, read_object

if TYPE_CHECKING:
    import torch


_SMALLEST_BYTES_PER_PARAMETER = 2  # of a .bin file, whose header needs torch


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Size and context of a model."""

    parameters: int
    """Stored numbers; tied weights count once. An upper bound if the weights are `.bin` files."""
    context_tokens: int | None
    """Maximum tokens of prompt and response together; None if the config does not define it."""


def read_model_facts(folder: Path) -> ModelFacts:
    """Read `config.json` and the headers of the weights."""
    context = read_sizes(folder / CONFIG).context
    parameters = 0
    for file in weight_files(folder):  # others may exist as copies in another format
        if file.suffix == ".bin":
            parameters += file.stat().st_size // _SMALLEST_BYTES_PER_PARAMETER
        else:
            parameters += sum(tensor.numbers for tensor in read_header(file).values())
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
    """Width of all query heads together."""
    kv_width: int
    """Width of the keys of one token in one layer."""
    vocab: int
    head_norms: bool
    """True if queries and keys are normalized, as in Qwen3."""
    dense: bool
    """True if each layer has one feed-forward network of width `intermediate`."""
    context_tokens: int | None

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.query_width // self.head_width

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.kv_width // self.head_width


def read_model_shape(folder: Path) -> ModelShape | None:
    """Read `config.json`; None if it does not define heads and widths as Llama and Qwen do."""
    sizes = read_sizes(folder / CONFIG)
    heads, kv_heads, hidden = sizes.heads, sizes.kv_heads, sizes.hidden
    if not isinstance(heads, int) or isinstance(kv_heads, list) or not hidden or not sizes.layers:
        return None
    width = sizes.head_dim or hidden // heads
    if not width or isinstance(sizes.intermediate, list):
        return None
    return ModelShape(
        kind=str(sizes.model_type),
        head_width=width,
        layers=sizes.layers,
        hidden=hidden,
        intermediate=sizes.intermediate or 0,
        query_width=heads * width,
        kv_width=(kv_heads or heads) * width,
        vocab=sizes.vocab or 0,
        head_norms=str(sizes.model_type).startswith("qwen3"),
        dense=sizes.intermediate is not None and not sizes.mixture,
        context_tokens=sizes.context,
    )


@dataclass(frozen=True, slots=True)
class CacheRoom:
    """Size of the KV cache of a server on a CPU."""

    tokens: int
    bytes: int


CACHE_BYTES = 2 << 30
"""Largest KV cache of a server on a CPU, unless one sequence needs more."""
_UNKNOWN_ROOM = CacheRoom(32768, 1 << 30)  # of models whose configuration has no sizes


def cache_room(
    folder: Path, *, dtype: str, sequences: int, context_tokens: int | None = None
) -> CacheRoom:
    r"""Room for `sequences` of the longest kind, within `CACHE_BYTES`; for one in any case.

    $$ 2 \cdot layers \cdot heads_{kv} \cdot width_{head} \cdot bytes $$

    per token, from `config.json`. Servers that run out of room recompute tokens, so less room only
    costs time. `context_tokens` is the longest sequence; None takes the model's.
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

    `dtype` is `rollout.dtype`; `auto` may become float32, whatever is stored.
    """
    return parameters * (2 if dtype == "bfloat16" else 4)


def end_token_ids(folder: Path) -> frozenset[int]:
    """Tokens that end a response, from the generation config or else the config."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        value = read_object(file).get("eos_token_id") if file.is_file() else None
        if value is not None:
            tokens = value if isinstance(value, list) else [value]
            if not all(type(token) is int for token in tokens):
                raise ValueError(f"{file}: eos_token_id is {value!r:.80}, but must be token ids")
            return frozenset(tokens)
    return frozenset()


def dtype_name(name: str, *, native: bool) -> Literal["float32", "bfloat16"]:
    """Name of a type; `auto` is bfloat16 where it is faster than float32.

    On a CPU that only emulates bfloat16 it is three times slower than float32.
    """
    match name:
        case "float32" | "bfloat16":
            return name
        case "auto":
            return "bfloat16" if native else "float32"
    raise ValueError(f"dtype is {name!r}, but must be auto, float32 or bfloat16")


def has_bfloat16(device: str) -> bool:
    """Return whether `auto` is bfloat16 on this machine's `device`: on every GPU, without
    querying it, so a process that only sends weights there needs no GPU.
    """
    return device.partition(":")[0] == "cuda" or fast_bfloat16()


def compute_dtype(name: str = "auto", device: str = "cpu") -> torch.dtype:
    """Type of matrix products on this machine's `device`, see `dtype_name`."""
    import torch  # a late import: processes that only start servers have no torch

    found = dtype_name(name, native=has_bfloat16(device))
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[found]
