"""Failures of nodes and slow engines."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from simulator.config.schema import FaultsConfig
from simulator.workload.faults import NodeFailures, engine_slowdowns, failures_from


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
