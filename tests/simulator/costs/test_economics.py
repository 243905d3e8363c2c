"""Cost and energy: by hand, and as the sum of their parts."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.catalogue.gpu import find_gpu
from simulator.costs.economics import (
    OVERHEAD,
    Cost,
    PoolUse,
    interruption_factor,
    run_cost,
    run_energy,
)

H100, H800, A100 = find_gpu("H100"), find_gpu("H800"), find_gpu("A100-80")


def pools(utilization: float = 0.5) -> list[PoolUse]:
    return [
        PoolUse(name="rollout", gpu=H100, gpus=96, seconds=7200, utilization=0.8),
        PoolUse(name="training", gpu=A100, gpus=32, seconds=7200, utilization=utilization),
    ]


def test_all_gpus_are_paid_for_busy_or_not() -> None:
    cost = run_cost(pools())
    assert cost.gpu_hours == 2 * 128
    assert cost.dollars == pytest.approx(2 * (96 * 2.95 + 32 * 1.39))
    assert cost.low == pytest.approx(2 * (96 * 2.50 + 32 * 1.10))
    assert cost.high == pytest.approx(2 * (96 * 5.00 + 32 * 3.00))
    assert run_cost(pools(0.0)).dollars == cost.dollars
    assert set(cost.sources) == {"H100", "A100-80"}


def test_parts_sum_to_the_total() -> None:
    for cost in (run_cost(pools()), run_cost(pools(), overhead=0.4)):
        assert cost.dollars == sum(cost.parts.values())
        shared = cost.divided(7)
        assert shared.dollars == sum(shared.parts.values())
    energy = run_energy(pools())
    assert energy.kwh == sum(energy.parts.values())


def test_a_given_price_replaces_the_catalogue() -> None:
    cost = run_cost(pools(), price_per_gpu_h=2.0)
    assert cost.dollars == cost.low == cost.high == 512
    assert set(cost.sources.values()) == {"cluster.price_per_gpu_h"}


def test_overhead_is_a_fraction_of_the_rent() -> None:
    cost = run_cost(pools(), price_per_gpu_h=2.0, overhead=0.25)
    assert cost.dollars == 640
    assert cost.parts[OVERHEAD] == 128


def test_without_a_price_there_are_hours_but_no_cost() -> None:
    cost = run_cost([PoolUse(name="all", gpu=H800, gpus=8, seconds=3600, utilization=1)])
    assert (cost.dollars, cost.low, cost.high) == (None, None, None)
    assert cost.gpu_hours == 8
    assert cost.divided(2).dollars is None
    assert not cost.parts


def test_costs_are_divided_among_steps_and_tokens() -> None:
    cost = run_cost(pools(), price_per_gpu_h=2.0)
    assert cost.divided(10).dollars == pytest.approx(51.2)
    assert cost.per_million_tokens(128e6).dollars == pytest.approx(4)
    assert cost.per_million_tokens(128e6).gpu_hours == pytest.approx(2)
    with pytest.raises(ValueError, match="use a number > 0"):
        cost.per_million_tokens(0)


def test_energy_follows_the_utilization() -> None:
    energy = run_energy(pools(utilization=0.5))
    assert energy.parts["rollout, busy"] == pytest.approx(96 * 2 * 0.8 * 0.7)
    assert energy.parts["rollout, idle"] == pytest.approx(96 * 2 * 0.2 * 0.14)
    assert energy.parts["training, busy"] == pytest.approx(32 * 2 * 0.5 * 0.4)
    assert run_energy(pools(1.0)).kwh > energy.kwh > run_energy(pools(0.0)).kwh


def test_a_sum_of_shares_may_exceed_one_in_the_last_digit() -> None:
    pool = PoolUse(name="all", gpu=H100, gpus=1, seconds=3600, utilization=1 + 1e-12)
    assert run_energy([pool]).kwh == pytest.approx(0.7)
    assert run_energy([pool]).parts["all, idle"] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpus": -1}, "-1 GPUs"),
        ({"seconds": float("nan")}, "nan s"),
        ({"utilization": 1.1}, "utilization of pool all is 1.1"),
        ({"utilization": float("nan")}, "utilization"),
    ],
)
def test_impossible_pools_are_refused(change: dict, message: str) -> None:
    fields = {"name": "all", "gpu": H100, "gpus": 1, "seconds": 1.0, "utilization": 0.5}
    with pytest.raises(ValueError, match=message):
        PoolUse(**(fields | change))


def test_impossible_prices_are_refused() -> None:
    with pytest.raises(ValueError, match="price_per_gpu_h is -1"):
        run_cost(pools(), price_per_gpu_h=-1.0)
    with pytest.raises(ValueError, match="overhead is nan"):
        run_cost(pools(), overhead=float("nan"))


def test_no_gpus_cost_nothing() -> None:
    assert run_cost([]) == Cost(dollars=0, low=0, high=0, gpu_hours=0, parts={}, sources={})
    assert run_energy([]).kwh == 0


# --- interruptions ------------------------------------------------------------------------------

HOURS = st.floats(0, 10)


@given(HOURS, HOURS)
def test_without_interruptions_nothing_takes_longer(checkpoint_h: float, restart_h: float) -> None:
    assert interruption_factor(per_h=0, checkpoint_h=checkpoint_h, restart_h=restart_h) == 1


@given(st.floats(1e-3, 1), st.floats(1e-3, 1))
def test_rare_interruptions_lose_half_an_interval_and_a_restart(
    checkpoint_h: float, restart_h: float
) -> None:
    per_h = 1e-5
    lost = interruption_factor(per_h=per_h, checkpoint_h=checkpoint_h, restart_h=restart_h) - 1
    assert lost == pytest.approx(per_h * (checkpoint_h / 2 + restart_h), rel=1e-3)


@given(st.floats(0, 3), HOURS, HOURS, st.floats(1e-3, 1e3))
def test_the_factor_has_no_unit_and_grows_with_each_argument(
    per_h: float, checkpoint_h: float, restart_h: float, unit: float
) -> None:
    found = interruption_factor(per_h=per_h, checkpoint_h=checkpoint_h, restart_h=restart_h)
    scaled = interruption_factor(
        per_h=per_h / unit, checkpoint_h=checkpoint_h * unit, restart_h=restart_h * unit
    )
    assert scaled == pytest.approx(found)
    for more in ((2, 1, 1), (1, 2, 1), (1, 1, 2)):
        larger = interruption_factor(
            per_h=per_h * more[0],
            checkpoint_h=checkpoint_h * more[1],
            restart_h=restart_h * more[2],
        )
        assert larger >= found * (1 - 1e-12) >= 1 - 1e-12


def test_the_factor_is_that_of_runs_that_are_interrupted_at_random() -> None:
    """Intervals of work, each repeated after a restart until no interruption comes."""
    random, per_h, checkpoint_h, restart_h = np.random.default_rng(5), 0.8, 0.7, 0.3
    took_h, intervals = 0.0, 20_000
    for _ in range(intervals):
        needed_h = checkpoint_h
        while (gap_h := random.exponential(1 / per_h)) < needed_h:
            took_h += gap_h
            needed_h = restart_h + checkpoint_h
        took_h += needed_h
    found = interruption_factor(per_h=per_h, checkpoint_h=checkpoint_h, restart_h=restart_h)
    assert took_h / (intervals * checkpoint_h) == pytest.approx(found, rel=0.03)


def test_a_run_that_never_gets_to_a_checkpoint_takes_forever() -> None:
    assert interruption_factor(per_h=1e3, checkpoint_h=1, restart_h=0) == math.inf
    with pytest.raises(ValueError, match="restart_h is -1"):
        interruption_factor(per_h=1, checkpoint_h=1, restart_h=-1)
