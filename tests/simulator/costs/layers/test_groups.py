"""Groups of a training layout: what divides what, and that nothing is lost or held twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.catalogue.models import find_model
from simulator.config.schema import TrainerConfig
from simulator.costs.layers.groups import groups_of

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
