"""What hosts ask of a scheduler, and what its nodes lack."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from areal_lab.control.placement import NodeResources, gpus_of_each, lacking


def nodes(*resources: dict[str, float]) -> list[NodeResources]:
    return [NodeResources(name=f"n{i}", resources=one) for i, one in enumerate(resources, 1)]


@given(st.lists(st.integers(0, 8), max_size=6), st.integers(1, 7))
def test_as_many_nodes_as_are_wanted_have_these_gpus_and_no_more(
    gpus: list[int], count: int
) -> None:
    found = gpus_of_each(nodes(*({"GPU": have} for have in gpus)), count)
    assert found == 0 or sum(have >= found for have in gpus) >= count
    assert sum(have >= found + 1 for have in gpus) < count


def test_what_is_asked_is_said_beside_what_there_is() -> None:
    said = lacking({"CPU": 1, "GPU": 4}, 2, nodes({"CPU": 8, "GPU": 4, "x": 1}, {"CPU": 8}, {}))
    assert said == (
        "asked for 2 x (1 CPU, 4 GPU), each on a node of its own; "
        "there are n1 (8 CPU, 4 GPU), n2 (8 CPU, 0 GPU)"
    )


def test_where_the_nodes_would_do_something_else_uses_them() -> None:
    said = lacking({"CPU": 1}, 2, nodes({"CPU": 1}, {"CPU": 2}))
    assert said.endswith("there are n1 (1 CPU), n2 (2 CPU), but something else uses part of that")


def test_no_node_and_many_nodes_are_short_sentences() -> None:
    assert lacking({"engine": 1}, 1, nodes({"CPU": 1})).endswith("; no node has any of that")
    assert lacking({"CPU": 2}, 1, nodes(*[{"CPU": 1.0}] * 10)).endswith("n8 (1 CPU) and 2 more")
