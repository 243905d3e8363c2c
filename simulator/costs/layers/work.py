"""Work of one GPU for a micro-batch: products, attention, memory traffic, launches, experts.

seconds of a forward pass through a stage = (products + attention + traffic) / GPUs that share
                                            them + launches of the stage's layers

experts, `layer`     part of the above; the time of a layer's experts is divided by their shards
experts, `grouped`   a smooth maximum of computing and of reading all experts held here: with
                     few tokens per expert, products are bound by memory
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.catalogue.gpu import GPU
from simulator.catalogue.transformer import ModelShape
from simulator.costs.attention.hybrid import pair_flops
from simulator.costs.layers.groups import Groups
from simulator.costs.training_speed import BYTES_PER_NUMBER, TrainerSpeed, pass_s
from simulator.costs.typical_coefficients import kernel_coefficients

GROUPED_SHARPNESS: Final = 1.34
"""Sharpness of the knee between reading and computing in grouped products, and..."""
GROUPED_SHARE: Final = 0.927
"""...their rate with many tokens, relative to large products. Fitted to 53 published times on H20
and H800 (`data/grouped_products.csv`: 32 to 32,768 tokens per expert), mean error 4 %; a test
repeats the fit."""

Values = NDArray[np.float64]
Flags = NDArray[np.bool_]


class Work(NamedTuple):
    """Seconds of each micro-batch on one GPU of a stage, [R, M]."""

    seconds: Values
    """All of it."""
    attention_s: Values
    """The part of attention."""
    gradients_s: Values
    """What a backward pass takes for the gradients of the matrices: their products, and reading
    their inputs and the gradients of their outputs."""


def forward_work(
    tokens: Values,
    pairs: Values,
    present: Flags,
    *,
    model: ModelShape,
    gpu: GPU,
    speed: TrainerSpeed,
    groups: Groups,
    fp8: bool = False,
    imbalance: float = 1.0,
    adapter_bytes: float = 0.0,
) -> Work:
    """Work of a forward pass, without exchanges.

    Args:
        tokens: of each micro-batch, before it is shared, [R, M].
        pairs: (token, attended token) pairs of each micro-batch, [R, M].
        present: which micro-batches exist.
        fp8: whether the products of the layers are in fp8.
        imbalance: tokens of the busiest GPU's experts, relative to the mean.
        adapter_bytes: that low-rank adapters move per token.
    """
    shared_s, launches_s = pass_s(tokens, pairs, model, gpu, speed)
    if adapter_bytes:
        shared_s = shared_s + speed.slowdown * adapter_bytes * tokens / gpu.memory_bytes_per_s
    attended = pair_flops(model, tokens, pairs)
    attention_s = attended / (speed.attention_efficiency * gpu.flops_per_s)
    attention_s = speed.slowdown * attention_s / groups.cuts
    products_s = speed.slowdown / (speed.matrix_efficiency * gpu.flops_per_s) * tokens
    expert_flops = 2.0 * model.moe_layers * model.active_experts * model.expert_parameters
    if fp8:
        head_flops = 2.0 * model.embedding_parameters
        layer_flops = model.linear_flops_per_token() - head_flops
        shared_s = shared_s - (1 - 1 / speed.fp8_speedup) * layer_flops * products_s
        expert_flops /= speed.fp8_speedup
    seconds = shared_s / groups.cuts + present * (launches_s / groups.pipeline)
    if not speed.head_is_shared:
        # The last stage has the head as well, and the others wait for it.
        head_s = 2.0 * model.embedding_parameters * products_s
        seconds = seconds + (groups.pipeline - 1) / groups.cuts * head_s
    linear_flops = model.linear_flops_per_token()
    if fp8:
        head_flops = 2.0 * model.embedding_parameters
        linear_flops = (linear_flops - head_flops) / speed.fp8_speedup + head_flops
    traffic = model.layers * speed.hidden_traffic
    traffic += model.moe_layers * model.active_experts * speed.expert_traffic
    moved_s = traffic * model.hidden * BYTES_PER_NUMBER * tokens / gpu.memory_bytes_per_s
    gradients_s = (linear_flops * products_s + speed.slowdown * moved_s) / groups.cuts
    if not model.experts:
        return Work(np.asarray(seconds), np.asarray(attention_s), np.asarray(gradients_s))
    own_s = expert_flops * products_s / groups.cuts
    if speed.experts == "layer":
        cut = 1 - 1 / groups.expert_shards
        fixed_s = speed.slowdown * model.moe_layers * speed.expert_layer_s * cut
        seconds = seconds - present * (fixed_s / groups.pipeline)
        seconds = seconds + (imbalance - 1) * own_s
        return Work(np.asarray(seconds), np.asarray(attention_s), np.asarray(gradients_s))
    at = kernel_coefficients(gpu)
    held = groups.held_parameters(model)[1]
    size = BYTES_PER_NUMBER / (2 if fp8 else 1)
    reading_s = held * size * at.weight_reading / gpu.memory_bytes_per_s
    read_s = np.where(present, reading_s, 0.0)
    together_s = grouped_s(np.asarray(imbalance * own_s), read_s)
    seconds = seconds - own_s + together_s
    return Work(np.asarray(seconds), np.asarray(attention_s), np.asarray(gradients_s))


def grouped_s(computing_s: Values, reading_s: Values) -> Values:
    """Seconds of the products of several experts, one after the other in one kernel.

    A smooth maximum, softer than that of one large product, because each expert has its own ragged
    end. See `data/grouped_products.csv`.

    Args:
        computing_s: at the efficiency of large products.
        reading_s: of all experts' weights, as a decode step would read them.
    """
    first = computing_s / GROUPED_SHARE
    both = first**GROUPED_SHARPNESS + reading_s**GROUPED_SHARPNESS
    return np.asarray(both ** (1 / GROUPED_SHARPNESS))
