"""What a Hugging Face model folder says about itself, read without torch."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SMALLEST_BYTES_PER_PARAMETER = 2  # of a .bin file, whose header needs torch to be read


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Size and context of a model."""

    parameters: int
    """Stored numbers; tied weights count once. An upper bound if the weights are `.bin` files."""
    context_tokens: int | None
    """Longest sequence, prompt and answer together; None if the configuration does not say."""


def read_model_facts(folder: Path) -> ModelFacts:
    """Read `config.json` and the headers of the weights.

    Raises:
        ValueError: in one line, naming the file that is broken.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    context = config.get("max_position_embeddings", config.get("n_positions"))
    if context is None:  # models of several modalities keep the language model's settings apart
        context = config.get("text_config", {}).get("max_position_embeddings")
    safetensors = sorted(folder.glob("*.safetensors"))
    if safetensors:
        parameters = sum(_parameters(file) for file in safetensors)
    else:
        stored_bytes = sum(file.stat().st_size for file in folder.glob("*.bin"))
        parameters = stored_bytes // _SMALLEST_BYTES_PER_PARAMETER
    return ModelFacts(parameters, context)


def transfer_bytes(parameters: int, dtype: str) -> int:
    """Largest size of one set of weights on its way to the engines.

    Args:
        dtype: `rollout.dtype`; `auto` may turn out to be float32, whatever is stored.
    """
    return parameters * (2 if dtype == "bfloat16" else 4)


def _parameters(file: Path) -> int:
    """Numbers in a safetensors file: 8 bytes of header length, then the header as JSON."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 0 < length < file.stat().st_size:
                raise ValueError("it is cut off or of another kind")
            header: dict[str, Any] = json.loads(opened.read(length))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is not a safetensors file: {error}") from error
    return sum(math.prod(v["shape"]) for name, v in header.items() if name != "__metadata__")
