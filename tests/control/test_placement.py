"""Placement of engines and trainer processes on hosts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.control.placement import (
    Demand,
    HostSlots,
    Placement,
    Unplaceable,
    place,
    seat_of_another,
)


def hosts(*gpus: int) -> list[HostSlots]:
    return [HostSlots(name=f"h{number}", gpus=count) for number, count in enumerate(gpus, 1)]


def test_three_hosts_generate_and_one_trains() -> None:
    """The example of `allocation_mode=sglang:d12+fsdp:d4` on 4 hosts of 4 GPUs."""
    demand = Demand(engines=12, gpus_per_engine=1, trainer_ranks=4, gpus_per_rank=1)
    placed = place(hosts(4, 4, 4, 4), demand)
    assert Counter(placed.engines) == {"h1": 4, "h2": 4, "h3": 4}
    assert placed.trainer == ("h4",) * 4
    fewer = place(hosts(4, 4, 4, 4), replace(demand, engines=4))
    assert fewer.engines == ("h1", "h2", "h3", "h1")


def test_on_cpus_engines_take_turns_and_the_last_host_trains() -> None:
    placed = place(hosts(0, 0, 0, 0), Demand(engines=5, spare_hosts=1))
    assert placed == Placement(
        engines=("h1", "h2", "h1", "h2", "h1"), trainer=("h3",), spares=("h4",)
    )


def test_without_a_trainer_all_hosts_generate() -> None:
    for gpus in (0, 2):
        demand = Demand(engines=3, gpus_per_engine=gpus // 2, trainer_ranks=0)
        placed = place(hosts(gpus, gpus, gpus), demand)
        assert placed == Placement(engines=("h1", "h2", "h3"), trainer=())


def test_one_host_does_everything() -> None:
    assert place(hosts(0), Demand(engines=2)) == Placement(engines=("h1", "h1"), trainer=("h1",))


def test_engines_take_what_a_training_host_has_left_only_if_it_is_alone() -> None:
    demand = Demand(engines=3, gpus_per_engine=1, trainer_ranks=1, gpus_per_rank=1)
    assert place(hosts(4), demand).engines == ("h1", "h1", "h1")
    with pytest.raises(Unplaceable, match=r"3 engines of 1 GPU each .* room for 2"):
        place(hosts(2, 4), demand)


@pytest.mark.parametrize(
    ("gpus", "demand", "said"),
    [
        ((4,), Demand(engines=1, trainer_ranks=8, gpus_per_rank=1), "needs 8 GPUs, .*h1: 4"),
        ((4, 4), Demand(engines=2, gpus_per_engine=8), "2 engines of 8 GPUs .*room for 0"),
        ((0, 0), Demand(engines=1, trainer_hosts=3), "trainer_nodes is 3, but 2 hosts"),
        ((0, 0), Demand(engines=1, trainer_ranks=3, trainer_hosts=2), "must divide .* 3 proc"),
        ((0,), Demand(engines=1, spare_hosts=1), "spare_nodes is 1, but 1 host joined"),
        (
            (4, 1, 4),
            Demand(engines=1, trainer_ranks=4, gpus_per_rank=1, trainer_hosts=2),
            "needs 2 GPUs on each of 2 hosts, but the hosts have h2: 1",
        ),
    ],
)
def test_what_cannot_be_placed_is_told_in_one_sentence(
    gpus: tuple[int, ...], demand: Demand, said: str
) -> None:
    with pytest.raises(Unplaceable, match=said) as error:
        place(hosts(*gpus), demand)
    assert "\n" not in str(error.value)


@given(
    st.lists(st.integers(0, 8), min_size=1, max_size=6),
    st.builds(
        Demand,
        engines=st.integers(0, 12),
        gpus_per_engine=st.sampled_from([0, 1, 2, 4]),
        trainer_ranks=st.integers(1, 8),
        gpus_per_rank=st.sampled_from([0, 1]),
        trainer_hosts=st.integers(0, 3),
        spare_hosts=st.integers(0, 2),
    ),
)
def test_no_device_is_used_twice_and_everything_is_placed(gpus: list[int], demand: Demand) -> None:
    try:
        placed = place(hosts(*gpus), demand)
    except Unplaceable:
        return
    assert (len(placed.engines), len(placed.trainer)) == (demand.engines, demand.trainer_ranks)
    used = Counter[str]()
    for name in placed.engines:
        used[name] += demand.gpus_per_engine
    for name in placed.trainer:
        used[name] += demand.gpus_per_rank
    has = {host.name: host.gpus for host in hosts(*gpus)}
    assert all(count <= has[name] for name, count in used.items())
    assert not set(placed.spares) & {*placed.engines, *placed.trainer}
    # The ranks of a host are neighbors: tensor parallel ones must be.
    changes = sum(a != b for a, b in zip(placed.trainer, placed.trainer[1:], strict=False))
    assert changes == len(set(placed.trainer)) - 1


def test_an_engine_that_joins_later_goes_where_there_is_room() -> None:
    demand = Demand(engines=2, gpus_per_engine=1, trainer_ranks=2, gpus_per_rank=1)
    placed = place([HostSlots(name=name, gpus=3) for name in ("a", "b", "c")], demand)
    assert placed == Placement(engines=("a", "b"), trainer=("c", "c"))
    gpus = {"a": 3, "b": 3, "c": 3}
    assert seat_of_another(placed, {"a": 2}, gpus, demand) == "b"
    assert seat_of_another(placed, {"a": 2, "b": 2}, gpus, demand) == "c"
    assert seat_of_another(placed, {"a": 2, "b": 2, "c": 1}, gpus, demand) == "a"
    with pytest.raises(Unplaceable, match="another engine needs 1 GPU, but no host has as many"):
        seat_of_another(placed, {"a": 3, "b": 3, "c": 1}, gpus, demand)
    assert seat_of_another(placed, {"a": 3}, {"a": 3, "c": 3}, demand) == "c", "b is lost"


def test_on_cpus_it_goes_to_the_host_with_the_fewest_engines_that_does_not_train() -> None:
    demand = Demand(engines=3)
    placed = place([HostSlots(name=name) for name in ("a", "b", "c")], demand)
    gpus = dict.fromkeys("abc", 0)
    assert placed.trainer == ("c",)
    assert seat_of_another(placed, {"a": 2, "b": 1}, gpus, demand) == "b"
    alone = place([HostSlots(name="a")], demand)
    assert seat_of_another(alone, {"a": 3}, {"a": 0}, demand) == "a"


def test_hosts_for_which_there_is_no_work_are_spares() -> None:
    placed = place(hosts(0, 0, 0, 0, 0), Demand(engines=2, spare_hosts=1))
    assert (placed.engines, placed.trainer) == (("h1", "h2"), ("h4",))
    assert placed.spares == ("h3", "h5")
