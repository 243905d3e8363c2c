"""The least loaded engine, whatever came and went."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lab.control.routing import Router


@given(st.lists(st.tuples(st.sampled_from("aaaarrrr+-"), st.integers(0, 4)), max_size=400))
@settings(max_examples=80)
def test_a_group_goes_to_the_least_loaded_engine_ties_to_the_lowest_id(
    steps: list[tuple[str, int]],
) -> None:
    router = Router()
    loads: dict[int, int] = {}
    for what, engine in steps:
        if what == "+" and engine not in loads:
            router.add(engine)
            loads[engine] = 0
        elif what == "-" and engine in loads:
            router.remove(engine)
            del loads[engine]
        elif what == "a" and loads:
            expected = min(loads, key=lambda each: (loads[each], each))
            assert router.acquire() == expected
            loads[expected] += 1
        elif what == "r" and loads.get(engine):
            router.release(engine)
            loads[engine] -= 1
        assert router.loads() == loads
        assert len(router) == len(loads)
        assert (engine in router) == (engine in loads)


def test_memory_does_not_grow_with_the_number_of_groups() -> None:
    router = Router()
    router.add(0)
    for _ in range(10_000):
        router.release(router.acquire())
    assert len(router._heap) < 100
