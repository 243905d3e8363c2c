"""Load a policy from a model folder: a causal language model, or one with images in its prompts.

`python -m areal_lab.models.load FILE.gguf FOLDER` converts a GGUF file to a float32 folder.

`python -m areal_lab.models.load FILE.gguf FOLDER`: an ordinary float32 folder from a GGUF.

It runs in a separate process, because reading a GGUF takes more than a gigabyte.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from areal_lab.host.durable import mode_by_umask
from areal_lab.models.complete import QUANTIZATION, quantization, refuse_tensors
from areal_lab.models.vision import is_vision_model

_IN_A_LAYER: Final = re.compile(r"^(.*?\.)\d+\.")


def load_pretrained(path: Path, *, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """Load the model of a folder with one of our attentions; a vision tower keeps torch's."""
    kind: Any = AutoModelForCausalLM
    chosen: str | dict[str, str] = attention
    if is_vision_model(path):
        from transformers import AutoModelForImageTextToText

        kind = AutoModelForImageTextToText
        chosen = {"text_config": attention, "vision_config": "sdpa"}
    return load_complete(kind, path, dtype=dtype, attn_implementation=chosen).model


class Loaded(NamedTuple):
    """A model, and its new weights."""

    model: PreTrainedModel
    new: frozenset[str]
    """Names of weights that are missing from the folder; they are random."""


def load_complete(kind: Any, path: Path, *, may_lack: str = "", **arguments: Any) -> Loaded:
    """Load a model with transformers, if its folder has every weight."""
    quantized = quantization(path)
    if quantized is not None and quantized.file == QUANTIZATION:
        raise ValueError(
            f"{path} is quantized ({quantized.method} in {QUANTIZATION}), which transformers does "
            "not read: it would take the numbers without their scales; use the release in bf16"
        )
    level = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # its report of missing weights becomes an error below
    try:
        model, found = kind.from_pretrained(
            path,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            local_files_only=True,
            trust_remote_code=False,
            **arguments,
        )
    # Any exception of the library is about a folder from outside.
    except Exception as error:
        raise ValueError(" ".join(f"{type(error).__name__}: {error}".split())[:1500]) from error
    finally:
        logging.set_verbosity(level)
    state = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    ours = {match[1] for name in state if (match := _IN_A_LAYER.match(name))}
    mismatched = {name: list(is_) for name, is_, _ in found["mismatched_keys"]}
    missing = frozenset(found["missing_keys"])
    new = frozenset(name for name in missing if may_lack and name.startswith(may_lack))
    refuse_tensors(
        path,
        type(model).__name__,
        expected={name: [] for name in sorted(missing - new)}
        | {name: shape for name, shape in state.items() if name not in new},
        stored={
            name: mismatched.get(name, shape)
            for name, shape in state.items()
            if name not in missing
        },
        extra=sorted(
            name
            for name in found["unexpected_keys"]
            if name.endswith(".weight") and (match := _IN_A_LAYER.match(name)) and match[1] in ours
        ),
    )
    return Loaded(model, new)


def convert(gguf: Path, folder: Path) -> None:
    """Write weights, configuration and tokenizer of `gguf` to `folder`."""
    source, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    quantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
    config = quantized.config
    # A model marked as quantized cannot be saved, although its weights are float32 here.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.tie_weights()
    model.save_pretrained(folder)
    for file in folder.glob("*.safetensors"):
        mode_by_umask(file)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
