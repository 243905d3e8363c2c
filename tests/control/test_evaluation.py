"""Which versions are measured, and which checkpoint is the best."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from areal_lab.control.evaluation import (
    Score,
    best_checkpoint,
    is_due,
    missed,
    to_measure_again,
)

VERSIONS = st.lists(st.integers(1, 60), max_size=30, unique=True).map(sorted)
"""Versions that the engines hold, one after the other; they may skip some."""
SCORES = st.dictionaries(
    st.integers(0, 30), st.builds(Score, st.sampled_from([0.0, 0.5, 0.75, 1.0]), st.booleans())
)
SAVED = st.sets(st.integers(0, 30))


@given(VERSIONS, st.integers(1, 12), st.integers(1, 60))
def test_each_multiple_is_measured_once_by_the_first_version_at_or_after_it(
    held: list[int], every: int, last: int
) -> None:
    due = [
        version
        for before, version in pairwise([0, *held])
        if is_due(version, before, every=every, last=last)
    ]
    for step in range(every, last, every):
        reached = [version for version in held if version >= step]
        in_time = reached and reached[0] < min(last, step + every)
        assert [v for v in due if step <= v < step + every] == (reached[:1] if in_time else [])
    assert all(every <= version < last for version in due)
    # What was neither measured nor covered by a later version is missed, and nothing else is.
    gaps = missed(due, every=every, until=last)
    assert set(gaps) == {
        step
        for step in range(every, last, every)
        if not any(step <= version < step + every for version in due)
    }


@given(VERSIONS, st.integers(1, 60))
def test_without_an_interval_nothing_is_due_and_nothing_missed(held: list[int], last: int) -> None:
    assert not any(is_due(b, a, every=0, last=last) for a, b in pairwise([0, *held]))
    assert missed([], every=0, until=last) == ()


@given(SCORES, SAVED, st.booleans())
def test_the_best_is_saved_and_no_saved_one_is_better(
    scores: dict[int, Score], saved: set[int], exact: bool
) -> None:
    best = best_checkpoint(scores, saved, exact=exact)
    known = [v for v in saved if v in scores and (scores[v].exact or not exact)]
    assert (best is None) == (not known)
    if best is not None:
        assert best in known
        assert all(scores[v].reward <= scores[best].reward for v in known)
        assert all(v >= best for v in known if scores[v].reward == scores[best].reward)


@given(SCORES, SAVED, st.dictionaries(st.integers(0, 30), st.sampled_from([0.0, 0.5, 1.0])))
def test_measuring_again_ends_with_an_exact_score_that_none_exceeds(
    scores: dict[int, Score], saved: set[int], true: dict[int, float]
) -> None:
    mixed = {version for version in saved & scores.keys() if not scores[version].exact}
    again = []
    while (version := to_measure_again(scores, saved)) is not None:
        again.append(version)
        scores = {**scores, version: Score(true.get(version, 0.25))}
    assert len(again) == len(set(again))
    assert set(again) <= mixed
    best = best_checkpoint(scores, saved)
    assert best is None or scores[best].exact
    assert best == best_checkpoint(scores, saved, exact=True) or best is None
