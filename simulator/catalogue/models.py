"""Models by name: those shipped with the simulator, and any Hugging Face `config.json`."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import MappingProxyType
from typing import Any

from areal_lab.config.suggest import did_you_mean, plain
from simulator.catalogue.huggingface_config import from_config, read_config
from simulator.catalogue.hybrid_models import HYBRIDS
from simulator.catalogue.transformer import LatentAttention, ModelShape

__all__ = [
    "LatentAttention",
    "MODELS",
    "ModelShape",
    "find_model",
    "from_config",
    "model_table",
    "read_config",
]

_LITGPT = "config.json on Hugging Face as in LitGPT litgpt/config.py (2025)"
_AICONFIGURATOR = "config.json on Hugging Face as in AIConfigurator 0.12.0 (NVIDIA, 2026-09)"


_Row = tuple[str, int, int, int, int, int, int, int, bool, str]
_ROWS: tuple[_Row, ...] = (
    # name, layers, hidden, heads, key-value heads, head width, MLP width, vocabulary, tied, source
    ("Qwen2.5-0.5B", 24, 896, 14, 2, 64, 4864, 151936, True, _LITGPT),
    ("Qwen2.5-1.5B", 28, 1536, 12, 2, 128, 8960, 151936, True, _LITGPT),
    ("Qwen2.5-3B", 36, 2048, 16, 2, 128, 11008, 151936, True, _LITGPT),
    ("Qwen2.5-7B", 28, 3584, 28, 4, 128, 18944, 152064, False, _LITGPT),
    ("Qwen2.5-14B", 48, 5120, 40, 8, 128, 13824, 152064, False, _LITGPT),
    ("Qwen2.5-32B", 64, 5120, 40, 8, 128, 27648, 152064, False, _LITGPT),
    ("Qwen2.5-72B", 80, 8192, 64, 8, 128, 29568, 152064, False, _LITGPT),
    ("Qwen3-0.6B", 28, 1024, 16, 8, 128, 3072, 151936, True, _AICONFIGURATOR),
    ("Qwen3-1.7B", 28, 2048, 16, 8, 128, 6144, 151936, True, _AICONFIGURATOR),
    ("Qwen3-4B", 36, 2560, 32, 8, 128, 9728, 151936, True, _LITGPT),
    ("Qwen3-8B", 36, 4096, 32, 8, 128, 12288, 151936, False, _AICONFIGURATOR),
    ("Qwen3-14B", 40, 5120, 40, 8, 128, 17408, 151936, False, _LITGPT),
    ("Qwen3-32B", 64, 5120, 64, 8, 128, 25600, 151936, False, _AICONFIGURATOR),
    ("Qwen3-30B-A3B", 48, 2048, 32, 4, 128, 6144, 151936, False, _AICONFIGURATOR),
    ("Qwen3-235B-A22B", 94, 4096, 64, 4, 128, 12288, 151936, False, _AICONFIGURATOR),
    ("Llama-3.2-1B", 16, 2048, 32, 8, 64, 8192, 128256, True, _LITGPT),
    ("Llama-3.2-3B", 28, 3072, 24, 8, 128, 8192, 128256, True, _LITGPT),
    ("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256, False, _AICONFIGURATOR),
    ("Llama-3.1-70B", 80, 8192, 64, 8, 128, 28672, 128256, False, _AICONFIGURATOR),
    ("Llama-3.1-405B", 126, 16384, 128, 8, 128, 53248, 128256, False, _AICONFIGURATOR),
    ("SmolLM2-135M", 30, 576, 9, 3, 64, 1536, 49152, True, _LITGPT),
    ("Mixtral-8x7B", 32, 4096, 32, 8, 128, 14336, 32000, False, _AICONFIGURATOR),
    ("DeepSeek-V3", 61, 7168, 128, 128, 128, 18432, 129280, False, _AICONFIGURATOR),
)
_MIXTURES: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": {"experts": 128, "active_experts": 8, "moe_intermediate": 768},
    "Qwen3-235B-A22B": {"experts": 128, "active_experts": 8, "moe_intermediate": 1536},
    "Mixtral-8x7B": {"experts": 8, "active_experts": 2, "moe_intermediate": 14336},
    # Without the module that predicts a second token, which ordinary generation does not use.
    "DeepSeek-V3": {
        "experts": 256,
        "active_experts": 8,
        "moe_intermediate": 2048,
        "shared_intermediate": 2048,
        "first_dense_layers": 3,
        "latent": LatentAttention(
            cached_rank=512, rope_head_dim=64, value_head_dim=128, query_rank=1536
        ),
    },
}


def _shape(row: _Row) -> ModelShape:
    name, layers, hidden, heads, kv_heads, head_dim, intermediate, vocabulary, tied, source = row
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        vocabulary=vocabulary,
        tied_embeddings=tied,
        source=source,
        **_MIXTURES.get(name, {}),
    )


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


_BASES = {row[0]: _shape(row) for row in _ROWS}
_DISTILLED = tuple(
    _distilled(_BASES[name])
    for name in (
        *("Qwen2.5-1.5B", "Qwen2.5-7B", "Qwen2.5-14B", "Qwen2.5-32B"),
        *("Llama-3.1-8B", "Llama-3.1-70B"),
    )
)

MODELS = MappingProxyType(
    {shape.name: shape for shape in (*_DISTILLED, *_BASES.values(), *HYBRIDS)}
)
"""Shapes by name."""

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


def find_model(name_or_path: str) -> ModelShape:
    """A model of the catalogue, or of a Hugging Face folder or `config.json`.

    Args:
        name_or_path: a name of the catalogue or of Hugging Face, with any case, organization and
            tuning (`Qwen/Qwen2.5-7B-Instruct`); or a path, which has precedence.

    Raises:
        ValueError: one line: an unknown name (with the nearest ones), or a broken file.
    """
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
