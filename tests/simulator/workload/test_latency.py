"""Times outside the GPUs."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.config.schema import LatencyConfig
from simulator.workload.latency import Latency, latency_from


def test_every_kind_has_the_wanted_mean() -> None:
    for kind in ("constant", "exponential", "lognormal"):
        latency = latency_from(LatencyConfig(kind=kind, mean_s=3.0, sigma=0.8))
        drawn = latency.draw(np.random.default_rng(1), 400_000)
        assert drawn.mean() == pytest.approx(3.0, rel=0.01)
        assert (drawn > 0).all()


def test_every_kind_has_its_spread() -> None:
    draws = {
        kind: Latency(kind=kind, mean_s=2.0, sigma=0.5).draw(np.random.default_rng(1), 400_000)
        for kind in ("constant", "exponential", "lognormal")
    }
    assert draws["constant"].std() == 0
    assert draws["exponential"].std() == pytest.approx(2.0, rel=0.02)
    assert np.log(draws["lognormal"]).std() == pytest.approx(0.5, rel=0.01)


def test_draws_have_the_wanted_shape() -> None:
    for kind in ("constant", "exponential", "lognormal"):
        latency = Latency(kind=kind, mean_s=1.0)
        assert latency.draw(np.random.default_rng(1), (3, 4)).shape == (3, 4)


def test_a_mean_of_0_gives_0() -> None:
    for kind in ("constant", "exponential", "lognormal"):
        assert not Latency(kind=kind, mean_s=0.0).draw(np.random.default_rng(1), 5).any()
