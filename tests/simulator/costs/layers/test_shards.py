"""Collectives of parameters and gradients, by hand."""

from __future__ import annotations

import pytest

from simulator.catalogue.find_gpu import find_gpu
from simulator.catalogue.models import find_model
from simulator.config.schema import TrainerConfig
from simulator.costs.communication import all_gather_s, all_reduce_s
from simulator.costs.layers.groups import Groups, groups_of
from simulator.costs.layers.shards import gathered_s, gradients_s

H100 = find_gpu("H100")
DENSE, MIXTURE = find_model("Qwen3-32B"), find_model("Qwen3-30B-A3B")
EXPERTS = MIXTURE.moe_layers * MIXTURE.experts * MIXTURE.expert_parameters


def groups(model=DENSE, gpus: int = 64, **layout: int) -> Groups:
    return groups_of(TrainerConfig(**layout), model, gpus)


def test_one_copy_has_nothing_to_reduce() -> None:
    for sharded in (False, True):
        at = groups(gpus=8, tensor_parallel=8)
        assert gradients_s(at, DENSE, H100, 4, fully_sharded=sharded) == 0


def test_a_distributed_optimizer_scatters_gradients_and_gathers_parameters() -> None:
    at = groups(tensor_parallel=4, pipeline_parallel=2)
    held = DENSE.parameters / 8
    by_hand = sum(all_gather_s(size * held, 8, H100, gpus_per_node=2) for size in (4, 2))
    assert gradients_s(at, DENSE, H100, 4, fully_sharded=False) == pytest.approx(by_hand)


def test_experts_are_reduced_among_their_own_copies() -> None:
    """64 GPUs hold 64 copies of the dense part, and 8 of every eighth of the experts."""
    at = groups(MIXTURE, expert_parallel=8)
    by_hand = all_gather_s(
        2 * (MIXTURE.parameters - EXPERTS), 64, H100, gpus_per_node=8
    ) + all_gather_s(2 * EXPERTS / 8, 8, H100, gpus_per_node=1)
    assert gathered_s(at, MIXTURE, H100) == pytest.approx(by_hand)


def test_a_shard_group_gathers_inside_and_reduces_what_a_gpu_holds_outside() -> None:
    at = groups(shard_group=8)
    inside = all_gather_s(2 * DENSE.parameters, 8, H100)
    assert gathered_s(at, DENSE, H100) == pytest.approx(inside)
    scattered = all_gather_s(4 * DENSE.parameters, 8, H100)
    copies = all_reduce_s(4 * DENSE.parameters / 8, 8, H100, gpus_per_node=1)
    found = gradients_s(at, DENSE, H100, 4, fully_sharded=True)
    assert found == pytest.approx(scattered + copies)


def test_a_shard_group_of_expert_ranks_leaves_experts_where_they_are() -> None:
    at = groups(MIXTURE, gpus=8, expert_parallel=8)
    dense = all_gather_s(2 * (MIXTURE.parameters - EXPERTS), 8, H100)
    assert gathered_s(at, MIXTURE, H100) == pytest.approx(dense)


def test_a_shard_group_of_two_expert_groups_shards_their_experts_in_two() -> None:
    at = groups(MIXTURE, expert_parallel=8, shard_group=16)
    dense = all_gather_s(2 * (MIXTURE.parameters - EXPERTS), 16, H100, gpus_per_node=8)
    experts = all_gather_s(2 * EXPERTS / 8, 2, H100, gpus_per_node=1)
    assert gathered_s(at, MIXTURE, H100) == pytest.approx(dense + experts)


def test_copies_of_shards_reduce_an_equal_part_of_all_parameters() -> None:
    at = groups(MIXTURE, expert_parallel=8, shard_group=16)
    whole = gradients_s(at, MIXTURE, H100, 4, fully_sharded=True)
    scattered = 2 * gathered_s(at, MIXTURE, H100)
    copies = all_reduce_s(4 * MIXTURE.parameters / 16, 4, H100, gpus_per_node=1)
    assert whole - copies == pytest.approx(scattered, rel=0.02)
