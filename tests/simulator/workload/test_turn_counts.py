"""Numbers of turns: the mean that was asked for, and the spike at the cap."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.workload.turn_counts import TurnCounts


@given(st.integers(1, 60), st.floats(0, 1))
def test_the_mean_is_the_given_one(most: int, share: float) -> None:
    counts = TurnCounts(1 + share * (most - 1), most)
    chances = (1 - counts.ending) ** np.arange(most)  # of at least 1, 2, ... turns
    assert chances.sum() == pytest.approx(counts.mean, rel=1e-9)
    assert counts.capped == pytest.approx(chances[-1])


@pytest.mark.parametrize("mean", [6.3, 10.9])  # BFCL and SWE-Bench (arXiv:2511.02230)
def test_draws_have_the_published_mean_and_reach_the_cap(mean: float) -> None:
    counts = TurnCounts(mean, 30)
    drawn = counts.draw(np.random.default_rng(1), 200_000)
    assert drawn.mean() == pytest.approx(mean, rel=0.01)
    assert (drawn.min(), drawn.max()) == (1, 30)
    assert (drawn == 30).mean() == pytest.approx(counts.capped, abs=0.001)


def test_the_ends_are_constant() -> None:
    generator = np.random.default_rng(1)
    assert set(TurnCounts(1, 9).draw(generator, 100)) == {1}
    assert set(TurnCounts(9, 9).draw(generator, 100)) == {9}


@pytest.mark.parametrize(("mean", "most"), [(0.5, 3), (4, 3)])
def test_an_impossible_mean_is_refused(mean: float, most: int) -> None:
    with pytest.raises(ValueError, match=r"mean number of turns is .* from 1 to the largest"):
        TurnCounts(mean, most)
