r"""Low-rank adapters on frozen weights (LoRA, arXiv 2106.09685), through peft.

h = W x  -->  h = W x + (alpha / rank) B A x        A random, B zero: the output starts unchanged

A [rank, inputs], B [outputs, rank]   trained, float32
W [outputs, inputs]                   frozen

merged_tensors     W + (alpha / rank) B A, under the names of the original model
write_adapter      A and B alone, in peft's format: engines load them in addition to W

The trainer computes in the same order as its engines: (W + (alpha / rank) B A) x if they have
merged weights, and the sum of two products if they have adapters. In bfloat16 the results differ,
because a merged weight is rounded as a whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from areal_lab.control.events import Version
from areal_lab.engines.protocol import ALL_LINEAR, LoraShape, WeightsFolder
from areal_lab.engines.weights.folder import (
    deduplicated_state,
    stored_names,
    write_folder,
    write_tensors,
)
from areal_lab.models.image_features import sees
from areal_lab.training.model import VALUE_HEAD
from areal_lab.training.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from peft import LoraConfig

_ADAPTER: Final = "default"
_IN_TOWER: Final = re.compile(r"model\.visual\..*")
"""Modules of a vision tower, which stays frozen under adapters."""
_PREFIX: Final = "base_model.model."
"""Prefix of the names in a `PeftModel`."""


def target_modules(model: PreTrainedModel, names: Sequence[str]) -> tuple[str, ...]:
    """The linear layers that get an adapter, by the last parts of their names, in model order."""
    head = model.get_output_embeddings()
    there = dict.fromkeys(
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and not _IN_TOWER.match(name)
    )
    if list(names) == [ALL_LINEAR]:
        return tuple(there)
    unknown = [name for name in names if name not in there]
    if unknown or not names:
        wrong = f"{unknown[0]!r} is not a linear layer" if unknown else "names no linear layer"
        raise ValueError(
            f"actor.target_modules is {list(names)}, but {wrong} of this model that can have an "
            f"adapter; use some of {', '.join(there)}, or [{ALL_LINEAR}] for all of them"
        )
    return tuple(name for name in there if name in names)


def add_lora(
    model: PreTrainedModel,
    *,
    rank: int,
    alpha: int,
    targets: Sequence[str],
    merged: bool = False,
) -> PreTrainedModel:
    """Freeze a model and add adapters to these layers, in place; its output stays the same.

    There is no dropout: the trained policy must be the one that was sampled from.
    """
    from peft import LoraConfig, TaskType, inject_adapter_in_model  # most runs do not need it

    from areal_lab.training.merged_linear import MergedLinear

    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=list(targets),
        # Layers there may have the names of those of the language model.
        exclude_modules=_IN_TOWER.pattern if sees(model) else None,
        lora_dropout=0.0,
        bias="none",
        task_type=TaskType.CAUSAL_LM,
        base_model_name_or_path=model.config.name_or_path,
    )
    if merged:
        config._register_custom_module({nn.Linear: MergedLinear})
    # peft freezes everything except the adapters, and returns the model that it was given.
    inject_adapter_in_model(config, model, _ADAPTER)
    return model


def has_lora(model: nn.Module) -> bool:
    """Return whether `add_lora` was called."""
    return getattr(model, "peft_config", None) is not None


@torch.no_grad()
def merged_tensors(
    model: nn.Module,
    ranks: Ranks = ALONE,
    *,
    dtype: torch.dtype | None = None,
    rounded: torch.dtype | None = None,
    copy: bool = False,
) -> dict[str, Tensor]:
    """The model's state with its adapters merged into the weights, shared tensors once.

    Names, shapes and types are those of the model's folder; without adapters this equals
    `stored_state`. A policy's value output is left out: it is not part of the model.

    Args:
        dtype: of the tensors; unchanged by default. Merged weights are cast one by one: all of them
            in float32 are as large as the model.
        rounded: type to which weights are rounded first: that of working copies.
        copy: copy every tensor to the CPU, so that none is memory of the model.

    Returns:
        Everything on rank 0, nothing on the others.
    """
    merged: dict[str, Tensor] = {}
    policy = isinstance(model, PreTrainedModel) and model.get_output_embeddings() is not None

    def keep(name: str, tensor: Tensor) -> None:
        if ranks.first:
            device = "cpu" if copy or ranks.count > 1 else tensor.device
            value = tensor.detach().to(rounded or tensor.dtype)
            merged[name] = value.to(device, dtype or tensor.dtype, copy=copy)

    for name, part in deduplicated_state(model).items():
        if ".lora_A." in name or ".lora_B." in name:
            continue
        if policy and name.startswith(f"{VALUE_HEAD}."):
            continue
        tensor = ranks.whole(part)
        owner, _, rest = name.rpartition(".base_layer.")
        if not owner:
            keep(name, tensor)
        elif rest == "weight":
            from areal_lab.training.merged_linear import merge  # loads peft

            layer: Any = model.get_submodule(owner)
            a, b = (ranks.whole(m[_ADAPTER].weight) for m in (layer.lora_A, layer.lora_B))
            keep(f"{owner}.{rest}", merge(tensor, a, b, layer.scaling[_ADAPTER]))
        else:
            keep(f"{owner}.{rest}", tensor)
    names = stored_names(model, merged)
    return {names[name]: tensor for name, tensor in merged.items()}


@torch.no_grad()
def adapter_tensors(
    model: nn.Module, ranks: Ranks = ALONE, *, dtype: torch.dtype
) -> dict[str, Tensor]:
    """A and B of every layer, whole, by the names that peft uses in files."""
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(model, adapter_name=_ADAPTER)
    return {_PREFIX + name: ranks.whole(part).detach().to(dtype) for name, part in state.items()}


def write_adapter(model: nn.Module, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write an adapter in peft's format into an existing folder: weights and configuration."""
    write_tensors(tensors, folder / "adapter_model.safetensors")
    peft_config: Any = model.peft_config
    config: LoraConfig = peft_config[_ADAPTER]
    fields = config.to_dict() | {
        # peft keeps a set; sort it for a reproducible order.
        "target_modules": sorted(config.target_modules or ()),
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(fields, indent=1, default=str) + "\n")


def write_adapter_folder(
    model: nn.Module,
    root: Path,
    version: Version,
    *,
    dtype: torch.dtype,
    tensors: Mapping[str, Tensor] | None = None,
) -> WeightsFolder:
    """Write the adapter, cast to `dtype`, as folder `version` below `root`.

    Args:
        tensors: the model's own by default; those that were gathered from shards.
    """
    written = adapter_tensors(model, dtype=dtype) if tensors is None else tensors
    weights = write_folder(
        root,
        version,
        written,
        dtype=dtype,
        write=lambda folder: write_adapter(model, written, folder),
    )
    return replace(weights, adapter=lora_shape(model))


def lora_shape(model: nn.Module) -> LoraShape:
    """The shape that an engine needs before it can load the adapter."""
    peft_config: Any = model.peft_config
    config: LoraConfig = peft_config[_ADAPTER]
    return LoraShape(rank=config.r, target_modules=tuple(sorted(config.target_modules or ())))
