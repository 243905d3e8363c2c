"""Contexts that stay in an engine's cache between the turns of a sample."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.costs.prefill import causal_pairs
from simulator.engine.replica import Replica
from simulator.engine.sequences import KeptContexts
from simulator.run.conversations import Conversations
from tests.simulator.engine.test_replica import Costs, replica

READING = Costs(read_token_s=0.01, read_pair_s=1e-4)


# --- what is kept --------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.sampled_from(["keep", "find", "forget"]), st.integers(0, 4), st.integers(0, 9))
    ),
    st.integers(0, 12),
)
def test_contexts_used_last_are_kept_and_older_ones_lose_their_ends(
    uses: list[tuple[str, int, int]], room: int
) -> None:
    """Against blocks of one token, of which the oldest context's last one goes first."""
    kept, blocks = KeptContexts(), []
    for use, key, tokens in uses:
        mine = [block for block in blocks if block[0] == key]
        if use == "find":
            assert kept.find(key, room) == len(mine)
            continue
        blocks = [block for block in blocks if block[0] != key]
        if use == "forget":
            kept.forget(key)
            continue
        blocks += [(key, number) for number in range(tokens)]
        kept.keep(key, tokens, room)
        while len(blocks) > room:
            oldest = [block for block in blocks if block[0] == blocks[0][0]]
            blocks.remove(max(oldest))
        assert kept.tokens == len(blocks)
    kept.clear()
    assert kept.find(0, room) == kept.tokens == 0


# --- what is read --------------------------------------------------------------------------------


def reads_s(engine: Replica) -> float:
    return engine.activity_s["prefill"]


def run(engine: Replica | Conversations, until_s: float = math.inf) -> float:
    """Until there is nothing to do; returns the time."""
    now_s = 0.0
    while (next_s := engine.next_s()) <= until_s and math.isfinite(next_s):
        now_s = next_s
        engine.advance(now_s)
    return now_s


def test_a_prompt_that_begins_with_a_kept_context_reads_only_the_rest() -> None:
    engine = replica(READING)
    engine.keep("before", 300)
    engine.submit(0.0, 1, 400, [5], 0)
    engine.begin_with(1, "before")
    run(engine)
    assert reads_s(engine) == pytest.approx(READING.seconds(100, causal_pairs(100, 300)))
    # A running sequence has taken it.
    engine.submit(100.0, 2, 400, [5], 0)
    engine.begin_with(2, "before")
    run(engine)
    more_s = READING.seconds(400, causal_pairs(400))
    assert reads_s(engine) == pytest.approx(READING.seconds(100, causal_pairs(100, 300)) + more_s)


@pytest.mark.parametrize(("others", "left"), [(500, 300), (790, 200), (990, 0)])
def test_others_take_the_room_of_kept_contexts_while_a_prompt_waits(others: int, left: int) -> None:
    engine = replica(READING, cache_tokens=1_000, max_running=1)
    engine.keep("before", 300)
    engine.submit(0.0, 0, others, [10], 0)
    engine.submit(0.0, 1, 400, [5], 0)
    engine.begin_with(1, "before")
    run(engine)
    first_s = READING.seconds(others, causal_pairs(others))
    rest_s = READING.seconds(400 - left, causal_pairs(400 - left, left))
    assert reads_s(engine) == pytest.approx(first_s + rest_s, rel=0.02)


def test_new_weights_and_failures_empty_the_cache() -> None:
    for lost in ("weights", "failure"):
        engine = replica(READING)
        engine.keep("before", 300)
        if lost == "weights":
            engine.pause(0.0)
            engine.resume(0.0, 1)
        else:
            engine.fail(0.0)
        engine.submit(1.0, 1, 400, [5], 1)
        engine.begin_with(1, "before")
        run(engine)
        assert reads_s(engine) == pytest.approx(READING.seconds(400, causal_pairs(400)))


def test_only_a_new_group_with_one_response_begins_with_a_context() -> None:
    engine = replica(READING)
    engine.submit(0.0, 1, 10, [5, 5], 0)
    with pytest.raises(ValueError, match="group 1 must be new and have one response"):
        engine.begin_with(1, "before")


# --- turns ---------------------------------------------------------------------------------------


def conversations(engine: Replica, turns: int, tool_s: float = 1.0, **rules: Any) -> Conversations:
    return Conversations(
        engine, turns, lambda _: [[tool_s] * (turns - 1)] * 4, prefix_cache=True, **rules
    )


def test_with_room_every_token_of_a_group_is_read_once() -> None:
    """A prompt of 200 for four samples of five turns; tools add 30 tokens to each context."""
    costs = Costs(read_token_s=0.01)
    engine = replica(costs)
    begun = conversations(engine, 5, tool_tokens=30)
    begun.submit(0.0, 7, 200, [50] * 4, 0)
    run(begun)
    assert reads_s(engine) == pytest.approx(costs.seconds(200 + 4 * 4 * 30, 0))
    plain = replica(costs)
    begun = Conversations(plain, 5, lambda _: [[1.0] * 4] * 4, tool_tokens=30)
    begun.submit(0.0, 7, 200, [50] * 4, 0)
    run(begun)
    # 200, 240, 280, 320 and 360 tokens of context.
    assert reads_s(plain) == pytest.approx(costs.seconds(4 * (200 + 240 + 280 + 320 + 360), 0))


def test_agents_without_others_find_nearly_all_of_their_context() -> None:
    """As on vLLM: 493 of 495 requests of 100 sessions of five turns on two prefixes (vllm-vcr)."""
    costs = Costs(read_token_s=1e-6)
    engine = replica(costs, cache_tokens=10**7, max_running=100)
    begun = Conversations(engine, 5, lambda _: [[1.0] * 4] * 50, tool_tokens=100, prefix_cache=True)
    for group in range(2):
        begun.submit(0.0, group, 10_000, [500] * 50, 0)
    run(begun)
    contexts = 100 * sum(10_000 + 200 * turn for turn in range(5))
    assert 1 - reads_s(engine) / costs.seconds(contexts, 0) == pytest.approx(493 / 495, abs=0.01)


def test_agents_lose_their_context_on_a_full_engine() -> None:
    """Requests that wait take its room (arXiv:2511.02230): here during tools of 50 s."""
    costs = Costs(read_token_s=1e-6)
    engine = replica(costs, cache_tokens=3_000, max_running=4)
    begun = conversations(engine, 2, tool_s=50.0)
    for group in range(20):
        begun.submit(0.0, group, 500, [100] * 4, 0)
    run(begun)
    read = reads_s(engine) / costs.read_token_s
    assert read > 0.8 * (20 * 500 + 80 * 550)


def test_a_limit_of_samples_counts_those_at_their_tools() -> None:
    """Four samples of two turns of 5 s around a tool of 30 s, two at a time."""
    done_s = {
        most: run_until_done(conversations(replica(), 2, 30.0, most_samples=most))
        for most in (1, 2, 4)
    }
    assert done_s == {1: 4 * 40.0, 2: 2 * 40.0, 4: 40.0}


def run_until_done(begun: Conversations) -> float:
    begun.submit(0.0, 1, 10, [10] * 4, 0)
    return run(begun)


def test_a_dropped_group_frees_its_places() -> None:
    begun = conversations(replica(), 2, 30.0, most_samples=2)
    begun.submit(0.0, 1, 10, [10] * 4, 0)
    begun.submit(0.0, 2, 10, [10] * 2, 0)
    assert begun.advance(7.0) == []  # two samples at their tools, two that have not begun
    begun.drop(7.0, 1)
    assert run(begun) == pytest.approx(7.0 + 40.0)
