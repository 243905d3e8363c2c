"""A model folder that is complete in form: configuration, tokenizer, a few weights. No torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from areal_lab.models.complete import expected_tensors, read_sizes
from tests.data.byte_tokenizer import save_byte_tokenizer


def save_model_folder(folder: Path, *, context: int | None = 128, parameters: int = 1000) -> Path:
    """Tokens are bytes; a Llama of one layer and width 1, whose vocabulary is what is left."""
    save_byte_tokenizer(folder)
    widths = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    vocab = parameters - 10
    config = {
        "model_type": "llama",
        "max_position_embeddings": context,
        "vocab_size": vocab,
        "tie_word_embeddings": True,
        **dict.fromkeys(widths, 1),
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_weights(folder)
    return folder


def save_weights(folder: Path) -> None:
    """The tensors that a `config.json` asks for, all zero; the head must be tied."""
    tensors = dict(expected_tensors(read_sizes(folder / "config.json")))
    save_file(
        {name: np.zeros(shape, np.float16) for name, shape in tensors.items()},
        folder / "model.safetensors",
    )
