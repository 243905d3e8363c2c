"""What the embedded engine says of itself: spans of neighbors, with what they did added up."""

from __future__ import annotations

from areal_lab.engines.embedded.batcher import Batcher
from areal_lab.engines.embedded.scheduler import ActivityLog
from tests.engines.tiny import request, tiny_model


def step(sequences: int, context_tokens: int = 10) -> dict[str, float]:
    return {"steps": 1, "sequences": sequences, "context_tokens": context_tokens}


def test_steps_of_similar_size_are_merged_into_a_span_with_summed_counts() -> None:
    log = ActivityLog()
    log.add("decode", 0.0, 1.0, step(7))
    log.add("decode", 1.0, 2.0, step(4, context_tokens=5))
    (span,) = log.since(0)
    assert (span.start_s, span.end_s) == (0.0, 2.0)
    assert span.counts == {"steps": 2, "sequences": 11, "context_tokens": 15}


def test_a_batch_of_half_the_size_begins_a_span() -> None:
    log = ActivityLog()
    for start, sequences in enumerate((8, 8, 7, 4, 3, 1)):
        log.add("decode", start, start + 1, step(sequences))
    assert [span.counts["sequences"] for span in log.since(0)] == [16, 11, 3, 1]


def test_a_span_that_was_read_does_not_grow_in_the_hands_of_its_reader() -> None:
    log = ActivityLog()
    log.add("decode", 0.0, 1.0, step(2))
    (before,) = log.since(0)
    log.add("decode", 1.0, 2.0, step(2))
    assert before.counts["steps"] == 1


def test_a_batcher_counts_contexts_and_pairs_of_attention() -> None:
    batcher = Batcher(tiny_model(), version="0")
    batcher.add(request("a", [5, 6, 7], max_new_tokens=3))
    batcher.step()
    # Three prompt tokens see 1, 2 and 3; the sequence then has a context of 3.
    assert (batcher.prompt_pairs, batcher.context_tokens) == (6, 3)
    batcher.step()
    assert (batcher.prompt_pairs, batcher.context_tokens) == (6, 3 + 4)
    # The same prompt again: two of its tokens are copied, the third sees all three.
    batcher.add(request("b", [5, 6, 7], max_new_tokens=3, seed=1))
    batcher.step()
    assert (batcher.prompt_tokens, batcher.prompt_pairs) == (3 + 1, 6 + 3)
    assert batcher.context_tokens == 3 + 4 + (5 + 3)
