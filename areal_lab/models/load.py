"""Load a policy of a model folder: a causal language model, or one with images in its prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from areal_lab.models.vision import is_vision_model


def load_pretrained(path: Path, *, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """The model of a folder, with one of our attentions; that of a vision tower is torch's.

    Raises:
        OSError, ValueError, SafetensorError: transformers cannot load it.
    """
    logging.disable_progress_bar()
    kind: Any = AutoModelForCausalLM
    chosen: str | dict[str, str] = attention
    if is_vision_model(path):
        from transformers import AutoModelForImageTextToText

        kind = AutoModelForImageTextToText
        chosen = {"text_config": attention, "vision_config": "sdpa"}
    model: PreTrainedModel = kind.from_pretrained(
        path,
        dtype=dtype,
        attn_implementation=chosen,
        local_files_only=True,
        trust_remote_code=False,
    )
    return model
