"""Compile what decoder layers compute besides attention: the norms and the feed-forward part.

    input norm --> attention --> norm --> feed-forward       compiled: both norms, feed-forward
                   (kernels)

A whole layer is not compiled: the layout of the trees differs from batch to batch, so the layer
breaks into two graphs at the attention, which checkpointing does not allow; it then falls back to
what is not compiled. The parts have one graph each for the first number of tokens and one for all
others, with gradients and without (`tests/training/test_compiling.py` counts them). They are called
by the layer as before, so checkpointing and sharding, which are of layers, do not notice.
"""

from __future__ import annotations

from typing import Final

from torch import nn
from transformers import PreTrainedModel

BACKEND: Final = "inductor"
"""torch's compiler for CPUs and GPUs."""


def compile_layers(model: PreTrainedModel, *, backend: str = BACKEND) -> None:
    """Compile the parts of each decoder layer, in place and at their first call; names of
    parameters and modules stay. After adapters were added, before sharding.

    Args:
        model: of transformers.
        backend: of `torch.compile`.
    """
    for layer in decoder_layers(model):
        for part in layer.children():
            if not hasattr(part, "layer_idx"):  # attention has one
                # torch's limit of 8 is for one model, and there may be four.
                part.compile(backend=backend, recompile_limit=32)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that transformers names as not to be split."""
    names = model._no_split_modules or ()
    return [module for module in model.modules() if type(module).__name__ in names]
