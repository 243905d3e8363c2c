"""Load a model folder for the batcher, and copy new weights into the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from areal_lab.engines.embedded.attention import IMPLEMENTATION
from areal_lab.engines.weights.folder import (
    CorruptWeights,
    read_manifest,
    read_weights,
    stored_names,
    stored_state,
)
from areal_lab.models.copies import copy_into, to_device
from areal_lab.models.load import load_pretrained

_CHANGING_ROPE = {"dynamic", "longrope"}


def load_model(folder: Path, dtype: torch.dtype, device: str = "cpu") -> PreTrainedModel:
    """The model of a Hugging Face folder, checked, with our attention.

    Raises:
        ValueError: if the architecture is not supported.
        CorruptWeights: if the folder's manifest contradicts its tensors.
    """
    if read_manifest(folder) is not None:
        read_weights(folder)
    model = load_pretrained(folder, dtype=dtype, attention=IMPLEMENTATION)
    refuse_unsupported(model)
    place(model, torch.device(device))
    model.eval()
    model.requires_grad_(False)
    return model


def place(model: PreTrainedModel, device: torch.device) -> None:
    """Move a loaded model to `device`, or into memory of its own on a CPU.

    Loaded parameters are views of the file, which would stay in shared memory as long as the engine
    lives, even after later weights replaced all of them.
    """
    if device.type == "cpu":
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    else:
        model._apply(lambda tensor: to_device(tensor, device))


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Refuse models whose attention is not plain causal over the whole context.

    Raises:
        ValueError: naming what the embedded engine lacks.
    """
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    rope = getattr(config, "rope_parameters", None) or {}
    missing = None
    if not getattr(model, "_supports_attention_backend", False):
        missing = "an attention interface"
    elif window is not None and window < config.max_position_embeddings:
        missing = f"full attention (it has a sliding window of {window})"
    elif getattr(config, "attn_logit_softcapping", None):
        missing = "uncapped attention logits"
    elif isinstance(rope, dict) and rope.get("rope_type") in _CHANGING_ROPE:
        missing = f"fixed rotary embeddings (it has {rope['rope_type']})"
    if missing:
        raise ValueError(
            f"the embedded engine cannot run {config.model_type} models without {missing}; "
            "use the SGLang backend"
        )


def replace_parameters(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into the model, after all of them have been checked.

    Raises:
        CorruptWeights: if one is missing, unknown or of another shape; nothing is changed then.
    """
    targets = stored_state(model)
    known = set(stored_names(model, model.state_dict()).values())
    missing = sorted(targets.keys() - tensors.keys())
    unknown = sorted(tensors.keys() - known)
    if missing:
        raise CorruptWeights(f"{len(missing)} tensors are missing, such as {missing[0]}")
    if unknown:
        raise CorruptWeights(f"{len(unknown)} tensors are unknown, such as {unknown[0]}")
    for name, target in targets.items():
        if tensors[name].shape != target.shape:
            raise CorruptWeights(
                f"{name} has shape {tuple(tensors[name].shape)}, but must have "
                f"{tuple(target.shape)}"
            )
    with torch.inference_mode():
        for name, target in targets.items():
            copy_into(target, tensors[name])


def end_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """Tokens that end a response, from the generation config or else the model config."""
    for source in (model.generation_config, model.config):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            return frozenset(value if isinstance(value, list | tuple) else (value,))
    return frozenset()
