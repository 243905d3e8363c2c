"""Load a policy for training: float32 master weights, attention over prefix trees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from areal_lab.data.prefix_tree import ForwardCost
from areal_lab.models.locate import ModelNotFound, resolve_model_path
from areal_lab.training.attention import TREE_ATTENTION

__all__ = [
    "ModelNotFound",
    "forward_cost",
    "load_policy",
    "resolve_model_path",
]


def load_policy(
    path: Path, *, device: str = "cpu", gradient_checkpointing: bool = False
) -> PreTrainedModel:
    """Load a model folder in float32, with the attention that `areal_lab.training.forward` needs.

    Dropout is off: the proximal policy must be the one that was sampled from.

    Raises:
        ModelNotFound: if transformers cannot load a causal language model from the folder.
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
