"""Groups of a training layout: what divides what, and that nothing is lost or held twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.catalogue.gpu import find_gpu
from simulator.catalogue.models import find_model
from simulator.config.schema import TrainerConfig
from simulator.costs import layer_work as work
from simulator.costs.coefficients import DATA, kernel_coefficients, read_table
from simulator.costs.communication import all_gather_s, all_reduce_s
from simulator.costs.layer_work import gathered_s, gradients_s, grouped_s
from simulator.costs.training_layout import Groups, groups_of
from simulator.stats.least_squares import fit_positive

DENSE, MIXTURE = find_model("Qwen3-32B"), find_model("Qwen3-30B-A3B")
POWERS = st.integers(0, 3).map(lambda one: 2**one)


@given(tensor=POWERS, pipeline=POWERS, context=POWERS, expert=POWERS, more=POWERS)
def test_all_gpus_together_hold_whole_copies(
    tensor: int, pipeline: int, context: int, expert: int, more: int
) -> None:
    gpus = 8 * tensor * pipeline * context * more
    config = TrainerConfig(
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        context_parallel=context,
        expert_parallel=expert,
    )
    groups = groups_of(config, MIXTURE, gpus)
    dense, experts = groups.held_parameters(MIXTURE)
    dense_copies, expert_copies = groups.copies()
    whole = MIXTURE.moe_layers * MIXTURE.experts * MIXTURE.expert_parameters
    assert dense * gpus / dense_copies == pytest.approx(MIXTURE.parameters - whole)
    assert experts * gpus / expert_copies == pytest.approx(whole)
    assert groups.data * groups.cuts == gpus


def test_experts_are_cut_by_tensor_parallelism_only_without_expert_parallelism() -> None:
    def shards(**layout: int) -> int:
        return groups_of(TrainerConfig(**layout), MIXTURE, 16).expert_shards

    assert shards(tensor_parallel=4) == 4
    assert shards(tensor_parallel=4, expert_parallel=8) == 8


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"context_parallel": 3}, "context_parallel 3.* use a multiple of 3"),
        ({"sequence_parallel": 16, "tensor_parallel": 8}, "use a multiple of 128"),
        ({"tensor_parallel": 2, "sequence_parallel": 5}, "multiple of 10"),
        ({"expert_parallel": 3}, "must divide the 128 experts"),
        ({"expert_parallel": 32}, "must divide the 16 training GPUs of a pipeline stage"),
        ({"shard_group": 5}, "must divide the 16 training GPUs that hold the same part"),
        ({"pipeline_parallel": 8, "pipeline_chunks": 8}, "only 48 layers for 8 chunks each"),
    ],
)
def test_layouts_that_do_not_divide_are_refused(layout: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        groups_of(TrainerConfig(**layout), MIXTURE, 16)


def test_a_dense_model_has_no_experts_to_share_and_heads_bound_ulysses() -> None:
    with pytest.raises(ValueError, match="Qwen3-32B has no experts; use 1"):
        groups_of(TrainerConfig(expert_parallel=2), DENSE, 16)
    with pytest.raises(ValueError, match=r"must divide the 28 heads .* use trainer.context_parall"):
        groups_of(TrainerConfig(sequence_parallel=8), find_model("Qwen2.5-7B"), 16)


def test_recipes_whose_chunks_count_the_embedding_and_the_head_as_layers_are_possible() -> None:
    """Megatron-MoE-ModelZoo trains 94 layers in 32 stages of 3 chunks (2025)."""
    model = find_model("Qwen3-235B-A22B")
    groups_of(TrainerConfig(pipeline_parallel=32, pipeline_chunks=3), model, 256)
    with pytest.raises(ValueError, match="only 94 layers"):
        groups_of(TrainerConfig(pipeline_parallel=32, pipeline_chunks=4), model, 256)


ROWS = read_table(DATA / "grouped_products.csv")
LARGE = {"H20": 0.91, "H800": 0.73}
"""Shares of the fp8 peak that large products reach in the same benchmark (InferSim, 2025)."""


def predicted_us(row: dict[str, str]) -> float:
    """In fp8: one byte per weight, twice the FLOP/s."""
    gpu = find_gpu(row["gpu"])
    experts, hidden, width, tokens = (
        int(row[name]) for name in ("experts", "hidden", "width", "tokens")
    )
    weights = experts * hidden * 2 * width
    computing = 2 * weights * tokens / (LARGE[gpu.name] * 2 * gpu.flops_per_s)
    at = kernel_coefficients(gpu)
    reading = weights * at.weight_reading / gpu.memory_bytes_per_s
    return 1e6 * float(grouped_s(np.array(computing), np.array(reading)))


def test_few_and_many_tokens_per_expert_take_as_long_as_published() -> None:
    errors = [predicted_us(row) / float(row["microseconds"]) - 1 for row in ROWS]
    assert len(errors) == 53
    assert np.abs(errors).mean() < 0.045
    assert np.abs(errors).max() < 0.15


def test_sharpness_and_share_are_a_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def predict(values) -> list[float]:
        monkeypatch.setattr(work, "GROUPED_SHARPNESS", values[0])
        monkeypatch.setattr(work, "GROUPED_SHARE", values[1])
        return [predicted_us(row) for row in ROWS]

    kept = work.GROUPED_SHARPNESS, work.GROUPED_SHARE
    found = fit_positive(predict, (1.5, 0.9), [float(row["microseconds"]) for row in ROWS])
    assert found.values == pytest.approx(kept, rel=0.02)


H100 = find_gpu("H100")
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
