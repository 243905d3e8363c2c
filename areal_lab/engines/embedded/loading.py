"""Weights of the batcher's model: load a folder, copy new ones in, release and regain memory.

Give the memory of weights back to the device, and take it again.

    weights  held --release--> gone --take--> there, but empty --new weights--> of a version

What is released is lost: the engine generates again once it got new weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from areal_lab.engines.embedded.attention import IMPLEMENTATION
from areal_lab.engines.weights.folder import (
    CorruptWeights,
    read_manifest,
    read_weights,
    stored_names,
    stored_state,
)
from areal_lab.host.memory import return_freed_memory
from areal_lab.models.copies import copy_into, to_device
from areal_lab.models.load import load_pretrained

_CHANGING_ROPE = {"dynamic", "longrope"}


def load_model(folder: Path, dtype: torch.dtype, device: str = "cpu") -> PreTrainedModel:
    """Load the model of a Hugging Face folder, checked, with our attention."""
    if read_manifest(folder) is not None:
        read_weights(folder)
    model = load_pretrained(folder, dtype=dtype, attention=IMPLEMENTATION)
    refuse_unsupported(model)
    place(model, torch.device(device))
    model.eval()
    model.requires_grad_(False)
    return model


def place(model: PreTrainedModel, device: torch.device) -> None:
    """Move a loaded model to `device`, or into private memory on a CPU.

    Loaded parameters are views of the file, which would stay in shared memory for the life of the
    engine, even after later weights replaced all of them.
    """
    if device.type == "cpu":
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    else:
        model._apply(lambda tensor: to_device(tensor, device))
    return_freed_memory()  # loading took more than the model has


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Refuse models whose attention is not plain causal over the whole context."""
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
    """Copy tensors into the model, after checking all of them: a CorruptWeights error changes
    nothing.
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


RELEASED: Final = "released"
"""Version that an engine reports from the release of its weights until it gets new ones."""


class WeightMemory:
    """Memory of a model's parameters; its buffers, which no update includes, stay."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._shapes: list[torch.Size] | None = None

    @property
    def there(self) -> bool:
        """True if parameters have memory."""
        return self._shapes is None

    def release(self) -> None:
        """Free the parameters; tied ones stay tied."""
        if self._shapes is not None:
            return
        parameters = list(self._model.parameters())
        self._shapes = [parameter.shape for parameter in parameters]
        for parameter in parameters:
            parameter.data = parameter.data.new_empty(0)
        give_back(parameters[0].device)

    def take(self) -> None:
        """Allocate the parameters again, uninitialized."""
        if self._shapes is None:
            return
        for parameter, shape in zip(self._model.parameters(), self._shapes, strict=True):
            parameter.data = parameter.data.new_empty(shape)
        self._shapes = None


def give_back(device: torch.device) -> None:
    """Return freed memory to the system, which allocators keep otherwise."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return_freed_memory()
