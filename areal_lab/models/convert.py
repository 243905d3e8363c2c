"""`python -m areal_lab.models.convert FILE.gguf FOLDER`: an ordinary float32 folder from a GGUF.

A process of its own: reading a GGUF takes more than a gigabyte that its caller need not keep.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def convert(gguf: Path, folder: Path) -> None:
    """Write weights, configuration and tokenizer of `gguf` to `folder`."""
    source, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    quantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
    config = quantized.config
    # A model that says it was quantized refuses to be saved, though its weights are float32 here.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
