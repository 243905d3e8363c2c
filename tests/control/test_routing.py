"""Each policy's rule, whatever engines came and went."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lab.control.routing import ROUTINGS, LeastLoaded, Sticky, routing_named

STEPS = st.lists(
    st.tuples(st.sampled_from("aaaarrrr+-f"), st.integers(0, 4), st.integers(0, 6)), max_size=300
)


@pytest.mark.parametrize("policy", sorted(ROUTINGS))
@given(STEPS)
@settings(max_examples=60)
def test_work_goes_where_the_policy_says(policy: str, steps: list[tuple[str, int, int]]) -> None:
    router = routing_named(policy).make_router()
    loads: dict[int, int] = {}
    homes: dict[int, int] = {}
    last = -1
    for what, engine, key in steps:
        if what == "+" and engine not in loads:
            router.add(engine)
            loads[engine] = 0
        elif what == "-" and engine in loads:
            router.remove(engine)
            del loads[engine]
            homes = {key: home for key, home in homes.items() if home != engine}
        elif what == "a" and loads:
            expected = min(loads, key=lambda each: (loads[each], each))
            if policy == "round_robin":
                expected = min(loads, key=lambda each: (each <= last, each))
            if policy == "sticky":
                expected = homes.get(key, expected)
            assert router.acquire(key) == expected
            last = homes[key] = expected
            loads[expected] += 1
        elif what == "r" and loads.get(engine):
            router.release(engine)
            loads[engine] -= 1
        elif what == "f":
            router.forget(key)
            homes.pop(key, None)
        assert router.loads() == loads
        assert len(router) == len(loads)
        assert (engine in router) == (engine in loads)


def test_round_robin_spreads_evenly_and_least_loaded_fills_up() -> None:
    in_turn, by_load = (
        routing_named(name).make_router() for name in ("round_robin", "least_loaded")
    )
    for router in (in_turn, by_load):
        router.add(0)
        router.add(1)
        assert [router.acquire(n) for n in range(4)] == [0, 1, 0, 1]
        router.release(1)
        router.release(1)
    assert in_turn.acquire(4) == 0
    assert by_load.acquire(4) == 1


def test_a_conversation_stays_where_its_prefix_is_until_that_engine_is_lost() -> None:
    router = Sticky()
    for engine in (0, 1, 2):
        router.add(engine)
    turns = [router.acquire(key) for key in ("ann", "bob", "ann", "ann", "cem", "bob")]
    assert turns == [0, 1, 0, 0, 2, 1]
    router.remove(0)
    assert router.acquire("ann") == 2  # one turn runs there, two on engine 1
    router.forget("ann")
    assert router.acquire("ann") == 1


def test_a_conversation_does_not_return_to_an_engine_that_came_back_without_its_cache() -> None:
    router = Sticky()
    router.add(0)
    router.add(1)
    assert [router.acquire(key) for key in ("ann", "bob", "cem")] == [0, 1, 0]
    router.remove(0)
    router.add(0)
    assert router.acquire("bob") == 1
    router.release(1)
    router.release(1)
    router.acquire("dora")  # on engine 0, which now runs more
    assert router.acquire("ann") == 1


@pytest.mark.parametrize("policy", sorted(ROUTINGS))
def test_memory_does_not_grow_with_the_number_of_groups(policy: str) -> None:
    router = routing_named(policy).make_router()
    router.add(0)
    for group in range(10_000):
        router.release(router.acquire(group))
        router.forget(group)
    if isinstance(router, LeastLoaded):
        assert len(router._heap) < 100
    if isinstance(router, Sticky):
        assert not router._home


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="least_loaded, round_robin, sticky"):
        routing_named("random")
