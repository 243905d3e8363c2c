"""A model folder that is complete in form: configuration, tokenizer, a few weights. No torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.data.byte_tokenizer import save_byte_tokenizer


def save_model_folder(folder: Path, *, context: int | None = 128, parameters: int = 1000) -> Path:
    """Tokens are bytes; the weights are one vector."""
    save_byte_tokenizer(folder)
    config = {"model_type": "llama", "max_position_embeddings": context}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"weight": np.zeros(parameters, np.float16)}, folder / "model.safetensors")
    return folder
