"""Work of attention by kind of layer: all pairs, the pairs of a window, or a state per token.

    full       (query, key) pairs: half of the square of a sequence
    window     at most `window.tokens` pairs per token
    linear     a state is read and changed once per token, whatever the context

The pairs of windows are an upper bound: tokens at the beginning of a sequence have fewer, a share
of window / (2 length).
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from simulator.catalogue.gpu import GPU
from simulator.catalogue.transformer import ModelShape
from simulator.costs.coefficients import KernelCoefficients
from simulator.costs.precision.numbers import EngineNumbers

Values = NDArray[np.float64]

STATE_EFFICIENCY: Final = 0.0296
"""Share of the bf16 peak that linear attention reaches over many tokens, in FLOPs token by token.

Least squares on 24 times of chunked kernels with their convolution, 8,192 to 32,768 tokens, 16 to
64 heads of 128 on an H100 (`data/linear_attention.csv`: AIConfigurator 0.12.0, SGLang 0.5.14), mean
error 16 %; a test repeats the fit. Assumed for training too.
"""


def plain(model: ModelShape) -> bool:
    """Whether a model has only layers of the kind whose kernels were summed for the fits."""
    others = (model.latent, model.window, model.linear)
    return model.experts == 0 and all(one is None for one in others)


def pair_flops(model: ModelShape, tokens: float | Values, pairs: float | Values) -> float | Values:
    """FLOPs of attention over keys in a forward pass, full and with windows.

    Args:
        tokens: queries.
        pairs: (query, key) pairs without a window.
    """
    flops = model.attention_flops(1) * pairs
    if model.window is not None:
        flops = flops + model.window_flops() * np.minimum(pairs, model.window.tokens * tokens)
    return flops


def attention_flops(
    model: ModelShape, tokens: float | Values, pairs: float | Values
) -> float | Values:
    """FLOPs of attention in a forward pass, with those of states."""
    flops = pair_flops(model, tokens, pairs)
    if model.linear is not None:
        flops = flops + model.linear.flops_per_token() * tokens
    return flops


def states_s(model: ModelShape, tokens: float | Values, peak_flops_per_s: float) -> float | Values:
    """Seconds of states in a forward pass over many tokens; 0 without them."""
    if model.linear is None:
        return 0.0 * tokens
    return model.linear.flops_per_token() * tokens / (STATE_EFFICIENCY * peak_flops_per_s)


def sequence_read_s(
    model: ModelShape,
    gpu: GPU,
    at: KernelCoefficients,
    numbers: EngineNumbers,
    tensor_parallel: int,
) -> float:
    """Seconds of a decode step for the windows and states of one sequence.

    Windows are read, states read and written, at the share of the bandwidth that reading keys and
    values reaches. The windows of a sequence that is shorter than them count as full.
    """
    windows = numbers.window_bytes(model) / model.cache_shards(tensor_parallel)
    states = 2 * model.state_bytes() / tensor_parallel
    return at.cache_reading * (windows + states) / gpu.memory_bytes_per_s


def sequence_bytes(model: ModelShape, numbers: EngineNumbers, tensor_parallel: int) -> float:
    """Memory of one sequence on one GPU that does not grow with its context."""
    windows = numbers.window_bytes(model) / model.cache_shards(tensor_parallel)
    return windows + model.state_bytes() / tensor_parallel
