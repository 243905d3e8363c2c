"""Load a policy for training: float32 master weights, attention over prefix trees."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from areal_lab.data.prefix_tree import ForwardCost
from areal_lab.training.attention import TREE_ATTENTION
from areal_lab.training.model_path import ModelNotFound, resolve_model_path

__all__ = [
    "ModelNotFound",
    "compute_dtype",
    "forward_cost",
    "load_policy",
    "resolve_model_path",
]

_CPU_BF16_FLAGS: Final = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""x86 names of bfloat16 instructions, and the ARM one."""

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def compute_dtype(name: str = "auto", device: str = "cpu") -> torch.dtype:
    """Type that matrix products are computed in.

    `auto` is bfloat16 where the device has instructions for it and float32 elsewhere: on a CPU that
    only emulates bfloat16 it is three times slower than float32.

    Raises:
        ValueError: if the name is not `auto`, `float32` or `bfloat16`.
    """
    if name in _DTYPES:
        return _DTYPES[name]
    if name != "auto":
        raise ValueError(f"dtype is {name!r}, but must be auto, float32 or bfloat16")
    if torch.device(device).type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    return torch.bfloat16 if _CPU_BF16_FLAGS & cpu_flags() else torch.float32


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Instruction-set flags of the first CPU; empty where the system does not list them."""
    if platform.system() != "Linux":
        return frozenset()
    for line in cpuinfo.read_text().splitlines():
        key, _, flags = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(flags.split())
    return frozenset()


def load_policy(
    path: Path, *, device: str = "cpu", gradient_checkpointing: bool = False
) -> PreTrainedModel:
    """Read a model folder into float32 weights that `areal_lab.training.forward` can run.

    Dropout is off: the proximal policy has to be the one that was sampled from.

    Raises:
        ModelNotFound: if transformers cannot make a causal language model of the folder.
    """
    transformers_logging.disable_progress_bar()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation=TREE_ATTENTION, local_files_only=True
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelNotFound(f"cannot load a causal language model from {path}: {error}") from error
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    if gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    # transformers checkpoints activations in training mode only.
    model.train(gradient_checkpointing)
    policy: PreTrainedModel = model.to(device)
    return policy


def forward_cost(model: PreTrainedModel) -> ForwardCost:
    """Work per token and per attended pair, from the model's shape."""
    config = model.config.get_text_config()
    embedding = model.get_input_embeddings().weight
    body = model.get_submodule(model.base_model_prefix)
    weights = sum(p.numel() for p in body.parameters() if p is not embedding)
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return ForwardCost(
        linear_flops_per_token=2 * weights,
        attention_flops_per_pair=4 * config.num_hidden_layers * heads * head_size,
    )
