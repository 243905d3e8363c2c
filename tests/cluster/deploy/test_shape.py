"""Machines of a deployment: they hold the run, and there is none too many."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.cluster.deploy.shape import GIB, Needs, Shape, groups, machine_of, shape_for

NEEDS = st.builds(
    Needs,
    servers=st.integers(0, 4),
    tensor_parallel=st.sampled_from([1, 2, 3, 4]),
    trainer_ranks=st.integers(1, 6),
    shared=st.booleans(),
    gpu=st.just(True),
)


def holds(needs: Needs, nodes: int, gpus: int) -> bool:
    """Whether the run fits, told GPU by GPU: machines train or generate, a single one does both."""
    every = [node for node in range(nodes) for _ in range(gpus)]
    if len(every) < needs.trainer_ranks:
        return False
    left = every
    if not needs.shared:
        left = every[: len(every) - needs.trainer_ranks]
        training = set(every[len(every) - needs.trainer_ranks :])
        if len(training) < nodes:
            left = [node for node in left if node not in training]
    return sum(left.count(node) // needs.tensor_parallel for node in range(nodes)) >= needs.servers


@given(NEEDS, st.integers(1, 5))
def test_the_fewest_machines_that_hold_the_run(needs: Needs, gpus: int) -> None:
    if needs.servers and gpus < needs.tensor_parallel:
        with pytest.raises(ValueError, match=f"give --gpus-per-node {needs.tensor_parallel}"):
            shape_for(needs, nodes=None, gpus_per_node=gpus)
        return
    shape = shape_for(needs, nodes=None, gpus_per_node=gpus)
    assert holds(needs, shape.n_nodes, gpus)
    for fewer in range(1, shape.n_nodes):
        assert not holds(needs, fewer, gpus)
        with pytest.raises(ValueError, match=f"--nodes is {fewer}, with {gpus} GPU"):
            shape_for(needs, nodes=fewer, gpus_per_node=gpus)


@given(NEEDS, st.integers(0, 2))
def test_groups_have_every_machine_once_and_room_for_every_process(needs: Needs, more: int) -> None:
    fewest = shape_for(needs, nodes=None, gpus_per_node=None)
    shape = Shape(n_nodes=fewest.n_nodes + more, n_gpus_per_node=fewest.n_gpus_per_node)
    found = groups(needs, shape)
    assert sum(group.nodes for group in found) == shape.n_nodes
    assert sum(group.nodes * group.servers for group in found) >= needs.servers
    assert sum(group.nodes * group.ranks for group in found) >= needs.trainer_ranks
    for group in found:
        used = group.servers * needs.tensor_parallel
        assert max(used, group.ranks) <= shape.n_gpus_per_node


def test_four_machines_of_four_gpus_of_which_three_generate() -> None:
    needs = Needs(backend="sglang", servers=6, tensor_parallel=2, trainer_ranks=4, gpu=True)
    shape = shape_for(needs, nodes=None, gpus_per_node=4)
    assert shape.n_nodes == 4
    assert [(one.name, one.nodes, one.servers, one.ranks) for one in groups(needs, shape)] == [
        ("engines", 3, 2, 0),
        ("trainer", 1, 0, 4),
    ]


def test_a_cpu_run_fits_on_one_machine_and_takes_more_if_asked() -> None:
    needs = Needs(servers=3)
    assert shape_for(needs, nodes=None, gpus_per_node=None) == Shape()
    shape = shape_for(needs, nodes=3, gpus_per_node=None)
    assert [(one.name, one.nodes, one.servers) for one in groups(needs, shape)] == [
        ("engines", 2, 2),
        ("trainer", 1, 0),
    ]


@given(NEEDS, st.integers(0, 40), st.integers(0, 40))
def test_memory_has_room_for_the_parts_and_shared_memory(
    needs: Needs, server_gib: int, version_gib: int
) -> None:
    sized = Needs(
        servers=needs.servers,
        tensor_parallel=needs.tensor_parallel,
        trainer_ranks=needs.trainer_ranks,
        gpu=True,
        server_bytes=server_gib * GIB,
        version_bytes=version_gib * GIB,
    )
    for group in groups(sized, shape_for(sized, nodes=None, gpus_per_node=None)):
        machine = machine_of(sized, group)
        assert machine.shared_gib >= 2.5 * version_gib
        assert (
            machine.memory_gib
            >= machine.shared_gib + group.servers * server_gib + group.ranks / (sized.trainer_ranks)
        )
        more = machine_of(sized, group, memory_gib=machine.memory_gib + 5, cpus=3)
        assert (more.memory_gib, more.cpus) == (machine.memory_gib + 5, 3)
        with pytest.raises(ValueError, match=f"give --memory {machine.memory_gib}"):
            machine_of(sized, group, memory_gib=machine.shared_gib)


@pytest.mark.parametrize("wrong", [{"n_nodes": 0}, {"n_gpus_per_node": -1}, {"port": 0}])
def test_a_shape_without_machines_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="need n_nodes >= 1"):
        Shape(**wrong)


def test_gpus_are_needed_where_the_run_computes_on_them() -> None:
    with pytest.raises(ValueError, match="--gpus-per-node is 0, but"):
        shape_for(Needs(gpu=True, servers=0), nodes=None, gpus_per_node=0)
