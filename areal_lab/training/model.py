"""Load a model for training: float32 master weights, attention over prefix trees.

load_policy        a causal language model
load_value_model   its body with one output per token: a critic, or a reward model
add_value_output   such an output in addition to a policy's: a critic that shares the body
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from areal_lab.data.prefix_tree import ForwardCost
from areal_lab.models.image_features import sees
from areal_lab.models.load import load_complete, load_pretrained
from areal_lab.models.locate import ModelNotFound, resolve_model_path
from areal_lab.training.attention import TREE_ATTENTION
from areal_lab.training.decoder_layers import Checkpointing, enable_checkpointing

__all__ = [
    "VALUE_HEAD",
    "ModelNotFound",
    "add_value_output",
    "check_same_vocabulary",
    "decoder_weights",
    "forward_cost",
    "load_policy",
    "load_value_model",
    "resolve_model_path",
]

VALUE_HEAD: Final = "score"
"""Name of the output layer of a value model, as in transformers."""


def load_policy(
    path: Path, *, device: str = "cpu", gradient_checkpointing: Checkpointing = False
) -> PreTrainedModel:
    """Load a model folder in float32, with the attention that `areal_lab.training.forward` needs.

    Dropout is off: the proximal policy must be the one that was sampled from.

    Raises:
        ModelNotFound: if transformers cannot load a causal language model from the folder.
    """
    try:
        model = load_pretrained(path, dtype=torch.float32, attention=TREE_ATTENTION)
    except ValueError as error:
        raise ModelNotFound(f"cannot load a causal language model from {path}: {error}") from error
    return _prepared(model, device=device, gradient_checkpointing=gradient_checkpointing)


def load_value_model(
    path: Path, *, device: str = "cpu", gradient_checkpointing: Checkpointing = False
) -> PreTrainedModel:
    """Load a model with one number per token as its output, in float32: transformers'
    `AutoModelForSequenceClassification` with one label.

    A folder of a causal language model lacks that output; its weights start at zero then, so that
    every value is 0.

    Raises:
        ModelNotFound: if transformers cannot load one from the folder, or it has more labels.
    """
    try:
        model, new = load_complete(
            AutoModelForSequenceClassification,
            path,
            may_lack=f"{VALUE_HEAD}.",
            num_labels=1,
            dtype=torch.float32,
            attn_implementation=TREE_ATTENTION,
        )
    except ValueError as error:
        raise ModelNotFound(
            f"cannot load a model with one output per token from {path}: {error}"
        ) from error
    head = getattr(model, VALUE_HEAD, None)
    if not isinstance(head, nn.Linear):
        raise ModelNotFound(
            f"{type(model).__name__} of {path} has no linear output named {VALUE_HEAD!r}; Llama, "
            "Qwen2, Qwen3 and Mistral have one"
        )
    if new:
        nn.init.zeros_(head.weight)
    return _prepared(model, device=device, gradient_checkpointing=gradient_checkpointing)


def add_value_output(model: PreTrainedModel) -> None:
    """Give a policy an output for values, in place; its weights start at zero, as all values do.

    Engines and model folders do not get it.
    """
    size, device = model.config.get_text_config().hidden_size, model.device
    head = nn.Linear(size, 1, bias=False, device=device, dtype=torch.float32)
    nn.init.zeros_(head.weight)
    model.add_module(VALUE_HEAD, head)


def _prepared(model: Any, *, device: str, gradient_checkpointing: Checkpointing) -> PreTrainedModel:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    enable_checkpointing(model, gradient_checkpointing)
    # transformers checkpoints activations in training mode only.
    model.train(bool(gradient_checkpointing))
    prepared: PreTrainedModel = model.to(device)
    return prepared


def check_same_vocabulary(setting: str, path: str, vocabulary: int, of_policy: int) -> None:
    """Refuse a model that cannot read the policy's tokens.

    Raises:
        ModelNotFound: with both sizes.
    """
    if vocabulary != of_policy:
        raise ModelNotFound(
            f"{setting} {path} has a vocabulary of {vocabulary} tokens, but the model of "
            f"actor.path has {of_policy}; choose one with the same tokenizer"
        )


def decoder_weights(model: PreTrainedModel) -> list[nn.Parameter]:
    """The weights that every token is multiplied with: without embedding and output layer."""
    embedding = model.get_input_embeddings().weight
    body: Any = model.get_submodule(model.base_model_prefix)
    # The vision tower computes an image once, whatever the tree.
    layers = body.language_model if sees(model) else body
    return [weight for weight in layers.parameters() if weight is not embedding]


def forward_cost(model: PreTrainedModel) -> ForwardCost:
    """Work per token and per attended pair, from the model's shape."""
    config = model.config.get_text_config()
    weights = sum(weight.numel() for weight in decoder_weights(model))
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return ForwardCost(
        linear_flops_per_token=2 * weights,
        attention_flops_per_pair=4 * config.num_hidden_layers * heads * head_size,
    )
