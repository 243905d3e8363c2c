"""Models by name: those shipped with the simulator, and any Hugging Face `config.json`."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path
from types import MappingProxyType
from typing import Final

from areal_lab.config.given import given_text
from areal_lab.config.unknown import did_you_mean, plain
from simulator.catalogue.huggingface_config import from_config, read_config
from simulator.catalogue.transformer import (
    LatentAttention,
    LinearAttention,
    ModelShape,
    SlidingWindow,
)

__all__ = [
    "LatentAttention",
    "MODELS",
    "ModelShape",
    "find_model",
    "from_config",
    "model_table",
    "read_config",
]

_FILE: Final = Path(__file__).parent / "data" / "models.toml"
_PARTS: Final = {"linear": LinearAttention, "window": SlidingWindow, "latent": LatentAttention}


def _read_shapes() -> dict[str, ModelShape]:
    read = tomllib.loads(_FILE.read_text(encoding="utf-8"))
    shapes = {}
    for name, row in read["rows"].items():
        fields = dict(zip(read["columns"], row, strict=True)) | read["fields"].get(name, {})
        fields["source"] = read["sources"][fields["source"]]
        for part in _PARTS.keys() & fields.keys():
            fields[part] = _PARTS[part](**fields[part])
        shapes[name] = ModelShape(name=name, **fields)
    return shapes


def _distilled(base: ModelShape) -> ModelShape:
    """DeepSeek-R1's distilled model: the shape of its base, with an untied head.

    This only matters for the 1.5B: its config.json has `tie_word_embeddings: false`, and Hugging
    Face counts 1.78 B parameters instead of 1.54. The larger bases are untied as well.
    """
    return dataclasses.replace(
        base,
        name=f"R1-Distill-{re.sub(r'[-.0-9]+-', '-', base.name, count=1)}",
        tied_embeddings=False,
        source=f"DeepSeek-R1 (arXiv:2501.12948, 2025), section 2.4, for its base; {base.source}",
    )


_BASES: Final = _read_shapes()
_DISTILLED = tuple(
    _distilled(_BASES[name])
    for name in (
        *("Qwen2.5-1.5B", "Qwen2.5-7B", "Qwen2.5-14B", "Qwen2.5-32B"),
        *("Llama-3.1-8B", "Llama-3.1-70B"),
    )
)

MODELS = MappingProxyType({shape.name: shape for shape in (*_DISTILLED, *_BASES.values())})
"""Shapes by name; `data/models.toml` has the numbers and their sources."""

_ALIASES = MappingProxyType(
    {
        "DeepSeek-R1": "DeepSeek-V3",
        "Llama-3-8B": "Llama-3.1-8B",
        "Llama-3-70B": "Llama-3.1-70B",
        "Llama-3.3-70B": "Llama-3.1-70B",
        **{
            f"Qwen2.5-{kind}-{size}": f"Qwen2.5-{size}"
            for kind, sizes in (
                ("Math", ("1.5B", "7B", "72B")),
                ("Coder", ("0.5B", "1.5B", "3B", "7B", "14B", "32B")),
            )
            for size in sizes
        },
    }
)
"""Models of the same shape."""

_ADDITIONS = re.compile(
    r"(^(deepseek|meta)-(?=r1-distill|llama))|(-(instruct|base|chat|it|thinking|\d{4}|v0\.1)(?=-|$))",
    re.IGNORECASE,
)
"""Prefixes and suffixes of names that do not change the shape: `Meta-Llama-3.1-8B-Instruct`."""


def find_model(name_or_path: str | Path | ModelShape) -> ModelShape:
    """A model of the catalogue, or of a Hugging Face folder or `config.json`.

    Args:
        name_or_path: a name of the catalogue or of Hugging Face, with any case, organization and
            tuning (`Qwen/Qwen2.5-7B-Instruct`); or a path, which has precedence.

    Raises:
        ValueError: one line: an unknown name (with the nearest ones), or a broken file.
    """
    if isinstance(name_or_path, ModelShape):
        return name_or_path
    name_or_path = given_text(name_or_path, "the model")
    path = Path(name_or_path)
    if path.is_file() or (path / "config.json").is_file():
        return read_config(path)
    if path.suffix == ".json" or path.is_dir():
        wanted = path if path.suffix == ".json" else path / "config.json"
        raise ValueError(f"{wanted} does not exist (looked in {Path.cwd()})")
    known = {plain(one): one for one in MODELS} | {plain(a): one for a, one in _ALIASES.items()}
    short = _ADDITIONS.sub("", name_or_path.rsplit("/", 1)[-1])
    if plain(short) not in known:
        raise ValueError(
            f"unknown model {name_or_path!r}; {did_you_mean(short, MODELS)} "
            "(the path of a config.json also works)"
        )
    return MODELS[known[plain(short)]]


def model_table() -> str:
    """The catalogue as Markdown; GB are 1e9 bytes in the precision of the checkpoint
    (bf16, or experts in MXFP4), GFLOPs 1e9 per token forward.

    *Per sequence* are full windows and states.
    """
    lines = [
        "| model | parameters | active | layers | hidden | heads / KV | head width "
        "| GFLOPs per token | and per 1,000 of context | weights, GB "
        "| read per step, GB | cache per token, bytes | per sequence, MB | source |",
        "| --- | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: | --- |",
    ]
    for shape in MODELS.values():
        sizes = (
            *(f"{shape.parameters / 1e9:.3f} B", f"{shape.active_parameters / 1e9:.3f} B"),
            *(shape.layers, shape.hidden, f"{shape.heads} / {shape.kv_heads}", shape.head_dim),
            f"{shape.linear_flops_per_token() / 1e9:.3g}",
            f"{shape.attention_flops(1000) / 1e9:.3g}",
            f"{shape.checkpoint_bytes() / 1e9:.2f}",
            f"{shape.decode_checkpoint_bytes() / 1e9:.2f}",
            f"{shape.cache_bytes_per_token():,.0f}",
            f"{(shape.window_bytes() + shape.state_bytes()) / 1e6:.3g}",
        )
        lines.append(f"| {shape.name} | {' | '.join(map(str, sizes))} | {shape.source} |")
    return "\n".join(lines) + "\n"
