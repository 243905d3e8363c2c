"""Counts of turns, latencies and failures of a workload."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.config.schema import FaultsConfig, LatencyConfig
from simulator.workload.randomness import (
    Latency,
    NodeFailures,
    TurnCounts,
    engine_slowdowns,
    failures_from,
)


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


def test_every_kind_has_the_wanted_mean() -> None:
    for kind in ("constant", "exponential", "lognormal"):
        latency = Latency(LatencyConfig(kind=kind, mean_s=3.0, sigma=0.8))
        drawn = latency.draw(np.random.default_rng(1), 400_000)
        assert drawn.mean() == pytest.approx(3.0, rel=0.01)
        assert (drawn > 0).all()


def test_every_kind_has_its_spread() -> None:
    draws = {
        kind: Latency(LatencyConfig(kind=kind, mean_s=2.0, sigma=0.5)).draw(
            np.random.default_rng(1), 400_000
        )
        for kind in ("constant", "exponential", "lognormal")
    }
    assert draws["constant"].std() == 0
    assert draws["exponential"].std() == pytest.approx(2.0, rel=0.02)
    assert np.log(draws["lognormal"]).std() == pytest.approx(0.5, rel=0.01)


def test_draws_have_the_wanted_shape() -> None:
    for kind in ("constant", "exponential", "lognormal"):
        latency = Latency(LatencyConfig(kind=kind, mean_s=1.0))
        assert latency.draw(np.random.default_rng(1), (3, 4)).shape == (3, 4)


def test_a_mean_of_0_gives_0() -> None:
    for kind in ("constant", "exponential", "lognormal"):
        assert (
            not Latency(LatencyConfig(kind=kind, mean_s=0.0))
            .draw(np.random.default_rng(1), 5)
            .any()
        )


def faults(**changes: Any) -> FaultsConfig:
    return FaultsConfig(**changes)


def test_uptimes_are_exponential_with_the_mean_of_the_node() -> None:
    failures = failures_from(faults(node_mtbf_h=100.0))
    assert failures is not None
    generator = np.random.default_rng(1)
    drawn = np.array([failures.uptime_s(generator) for _ in range(40_000)])
    assert drawn.mean() == pytest.approx(360_000, rel=0.02)
    assert (drawn > 360_000).mean() == pytest.approx(math.exp(-1), abs=0.01)


def test_nodes_that_never_fail_need_no_failures() -> None:
    assert failures_from(faults()) is None
    for_ever = NodeFailures(mtbf_s=math.inf, detection_s=1, restart_s=1)
    assert for_ever.uptime_s(np.random.default_rng(1)) == math.inf


def test_the_share_of_stragglers_is_exact_and_their_choice_random() -> None:
    config = faults(straggler_share=0.25, straggler_slowdown=2.0)
    chosen = [engine_slowdowns(config, 96, np.random.default_rng(seed)) for seed in range(20)]
    assert all((slow == 2.0).sum() == 24 and (slow == 1.0).sum() == 72 for slow in chosen)
    assert len({slow.tobytes() for slow in chosen}) == 20


def test_a_fraction_of_a_straggler_is_rounded_at_random() -> None:
    config = faults(straggler_share=0.1)
    counts = [
        (engine_slowdowns(config, 4, np.random.default_rng(seed)) > 1).sum() for seed in range(4000)
    ]
    assert set(counts) == {0, 1}
    assert np.mean(counts) == pytest.approx(0.4, abs=0.03)


def test_a_share_of_0_has_no_straggler_and_1_has_only_stragglers() -> None:
    generator = np.random.default_rng(1)
    assert (engine_slowdowns(faults(), 8, generator) == 1).all()
    assert (engine_slowdowns(faults(straggler_share=1.0), 8, generator) == 1.5).all()
