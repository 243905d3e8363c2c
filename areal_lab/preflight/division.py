"""Whether the models of a run can be divided among the trainer's processes, from their folders.

t divides heads, key-value heads, the width of the feed-forward network, the vocabulary
c divides heads
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from areal_lab.config.problem import Kind, Problem
from areal_lab.config.schema import TrainConfig
from areal_lab.models.folder import ModelShape, read_model_shape
from areal_lab.models.locate import is_here, resolve_model_path
from areal_lab.preflight.allocation import Sizes
from areal_lab.preflight.trainer import models_of, trainer_sizes

_DIVIDED: Final = ("llama", "qwen2", "qwen3")
"""Models whose layers `training.parallel.tensor` knows."""


def check_division(config: TrainConfig) -> Iterator[Problem]:
    """Check the models that are here; broken ones are told of elsewhere."""
    sizes = trainer_sizes(config)
    if sizes.tensor == sizes.context == 1:
        return
    for setting, path in models_of(config):
        try:
            if not path or not is_here(path):
                continue
            shape = read_model_shape(resolve_model_path(path))
        except ValueError:
            continue
        if why := _undivided(shape, sizes):
            message = (
                f"allocation_mode {config.allocation_mode} trains with {sizes}, but {why} "
                f"({setting} {path}); write fsdp:d{sizes.devices}"
            )
            yield Problem(Kind.DIVISIBILITY, "allocation_mode", message)


def _undivided(shape: ModelShape | None, sizes: Sizes) -> str:
    """What does not divide; nothing if all does."""
    if shape is None:
        return "the model's config.json does not tell its heads"
    if sizes.tensor > 1 and (shape.kind not in _DIVIDED or not shape.dense):
        return f"layers of {shape.kind} are not divided, only those of {', '.join(_DIVIDED)}"
    divided = {
        "heads": (shape.heads, sizes.tensor * sizes.context),
        "key-value heads": (shape.kv_heads, sizes.tensor),
        "numbers in its feed-forward network": (shape.intermediate, sizes.tensor),
        "tokens in its vocabulary": (shape.vocab, sizes.tensor),
    }
    for what, (number, degree) in divided.items():
        if number % degree:
            return f"{degree} does not divide the {number} {what}"
    return ""
