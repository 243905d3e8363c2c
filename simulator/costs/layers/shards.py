"""Collectives of the GPUs that hold the same part of a model: gradients out, parameters in.

distributed optimizer   gradients are scattered, each GPU updates its share, bf16 gathered
fully sharded           every pass gathers, and gradients are scattered; groups of shards that
                        hold copies (HSDP) also reduce what a GPU holds
"""

from __future__ import annotations

from simulator.catalogue.gpu import GPU
from simulator.catalogue.transformer import ModelShape
from simulator.costs.communication import all_gather_s, all_reduce_s
from simulator.costs.layers.groups import Groups
from simulator.costs.training_speed import BYTES_PER_NUMBER


def gradients_s(
    groups: Groups,
    model: ModelShape,
    gpu: GPU,
    gradient_bytes: int,
    *,
    fully_sharded: bool,
    trained_share: float = 1.0,
) -> float:
    """Reduce-scatter of gradients, all-gather of bf16 parameters (distributed optimizer).

    If fully sharded, the next pass gathers instead.

    Args:
        trained_share: share of the parameters that has gradients.
    """
    trained_bytes = gradient_bytes * trained_share
    if not fully_sharded:
        scattered_s = over_copies_s(groups, model, gpu, trained_bytes)
        return scattered_s + over_copies_s(groups, model, gpu, BYTES_PER_NUMBER * trained_share)
    shards, copies = groups.shard_gpus, groups.copies()[0] // groups.shard_gpus
    scattered_s = over_copies_s(groups, model, gpu, trained_bytes, most=shards)
    if copies == 1:
        return scattered_s
    size = trained_bytes * model.parameters / (groups.tensor * groups.pipeline * shards)
    return scattered_s + all_reduce_s(size, copies, gpu, gpus_per_node=1)


def gathered_s(groups: Groups, model: ModelShape, gpu: GPU) -> float:
    """Seconds to gather the parameters of a stage for one pass, if fully sharded."""
    return over_copies_s(groups, model, gpu, BYTES_PER_NUMBER, most=groups.shard_gpus)


def over_copies_s(
    groups: Groups, model: ModelShape, gpu: GPU, parameter_bytes: float, *, most: int | None = None
) -> float:
    """One gather or scatter among the GPUs that hold the same parameters or gradients.

    Args:
        parameter_bytes: of each parameter.
        most: GPUs that share one copy; None takes all that hold the same part.
    """
    dense, experts = groups.held_parameters(model)
    if groups.expert == 1:
        dense, experts = dense + experts, 0.0
    dense_ranks, expert_ranks = groups.copies()
    if most is not None:
        dense_ranks = min(dense_ranks, most)
        expert_ranks = min(expert_ranks, max(1, most // groups.expert))
    near_dense = max(1, gpu.node_gpus // groups.tensor)
    near_experts = max(1, gpu.node_gpus // groups.expert)
    seconds = 0.0
    for held, ranks, near in (
        (dense, dense_ranks, near_dense),
        (experts, expert_ranks, near_experts),
    ):
        if ranks > 1 and held:
            size = parameter_bytes * held
            seconds += all_gather_s(size, ranks, gpu, gpus_per_node=min(ranks, near))
    return seconds
