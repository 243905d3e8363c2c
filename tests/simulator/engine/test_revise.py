"""Lengths that change while an engine is paused: as if they had been the same from the start."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.engine.replica import GroupDone, Replica
from tests.simulator.engine.test_replica import Costs, replica

LENGTHS = st.lists(st.lists(st.integers(1, 40), min_size=2, max_size=4), min_size=1, max_size=4)


def until(engine: Replica, end_s: float) -> list[GroupDone]:
    done: list[GroupDone] = []
    while (next_s := engine.next_s()) <= end_s and not math.isinf(next_s):
        done += engine.advance(next_s)
        engine.check()
    return done


def told(done: list[GroupDone]) -> list[Any]:
    return [(one.group, pytest.approx(one.time_s), one.segments) for one in done]


@given(LENGTHS, st.integers(1, 60), st.sampled_from([2, 3, 100]), st.booleans(), st.data())
def test_a_revised_engine_equals_one_with_these_lengths_from_the_start(
    lengths: list[list[int]], pause_s: int, slots: int, sharing: bool, data: st.DataObject
) -> None:
    sizes = {"max_running": slots, "cache_tokens": 400, "prefix_sharing": sharing}
    costs = Costs(sequence_s=0.01, context_token_s=1e-4, read_token_s=1e-3)
    first = replica(costs, **sizes)
    for group, of_group in enumerate(lengths):
        first.submit(0.0, group, 7, of_group, 0)
    early = until(first, pause_s)
    first.pause(pause_s)
    early += until(first, pause_s + 5)  # the step that was running ends
    left = sorted({*range(len(lengths))} - {one.group for one in early})
    revised = {}
    for group in left:
        so_far = first.tokens_of(group)
        assert [min(n, k) for n, k in zip(lengths[group], so_far, strict=True)] == so_far
        revised[group] = [
            tokens if tokens == before else data.draw(st.integers(tokens + 1, tokens + 50))
            for tokens, before in zip(so_far, lengths[group], strict=True)
        ]
        first.revise(group, revised[group])
        first.check()
        assert first.tokens_of(group) == so_far
    second = replica(costs, **sizes)
    for group, of_group in enumerate(lengths):
        second.submit(0.0, group, 7, revised.get(group, of_group), 0)
    late = until(second, pause_s)
    second.pause(pause_s)
    late += until(second, pause_s + 5)
    assert told(late) == [(d.group, d.time_s, d.segments) for d in early]
    for engine in (first, second):
        engine.resume(pause_s + 5, 1)
    early += until(first, math.inf)
    late += until(second, math.inf)
    assert told(late) == [(d.group, d.time_s, d.segments) for d in early]
    assert len(late) == len(lengths)


def paused(*lengths: int, at_s: float) -> Replica:
    """One group that generates one token a second; the running step ends after a pause."""
    engine = replica()
    engine.submit(0.0, 5, 3, lengths, 0)
    engine.advance(at_s)
    engine.pause(at_s)
    return engine


def test_tokens_are_told_of_running_waiting_and_ended_responses() -> None:
    engine = replica(max_running=2)
    engine.submit(0.0, 1, 3, (4, 20, 30), 0)
    engine.advance(6.0)
    engine.pause(6.0)
    assert engine.tokens_of(1) == [4, 6, 2]
    engine.resume(6.0, 1)
    with pytest.raises(ValueError, match="is not paused; call pause first"):
        engine.tokens_of(1)


def test_what_cannot_be_revised_is_refused() -> None:
    engine = paused(4, 20, at_s=6.0)
    with pytest.raises(ValueError, match="response 0 of group 5 has 4 of 4 tokens"):
        engine.revise(5, (5, 20))
    with pytest.raises(ValueError, match="response 1 of group 5 has 6 of 20 tokens"):
        engine.revise(5, (4, 6))
    with pytest.raises(ValueError, match="the cache holds"):
        engine.revise(5, (4, 10**9))
    with pytest.raises(ValueError, match="group 9 is not on this engine"):
        engine.revise(9, (1,))
    engine.revise(5, (4, 7))
    engine.resume(6.0, 0)
    assert [done.segments for done in until(engine, math.inf)] == [(((0, 4),), ((0, 7),))]


def test_a_group_that_ended_with_the_last_step_stays_as_it_is() -> None:
    engine = paused(4, 6, at_s=5.5)
    assert engine.tokens_of(5) == [4, 6]
    engine.revise(5, (4, 6))
    with pytest.raises(ValueError, match="response 1 of group 5 has 6 of 6 tokens"):
        engine.revise(5, (4, 9))
