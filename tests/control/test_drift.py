"""Eta by measured drift: step responses, limits, and the same values after a recovery."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import count, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.capacity import admissible
from areal_lab.control.coordinator import Coordinator
from areal_lab.control.drift import DriftBound, DriftLaw, Measured, advise_on_lag, next_eta
from areal_lab.control.events import (
    EtaRequested,
    GroupFinished,
    PushWeights,
    RunStarted,
    StartGroup,
    Train,
    TrainStepDone,
    WeightsPushed,
)
from areal_lab.control.limits import Limits
from areal_lab.control.schedule import SCHEDULES, bounded_drift, schedule_named

BATCH = 8
BOUND = DriftBound(max_drift=0.1, max_eta=64)


def settled(
    bound: DriftBound, drift: Callable[[int, float], float], steps: int = 300
) -> list[float]:
    """Eta of each step of eq. 3 with engines that start whatever it admits, in start order.

    Args:
        bound: the bounds.
        drift: of a batch, by step and mean lag.
        steps: their number.
    """
    eta, waiting, started = bound.min_eta, deque[int](), 0
    etas = []
    for version in range(steps):
        now = int(admissible(version, batch_size=BATCH, eta=eta))
        waiting.extend([version] * max(0, now - started))
        started = max(started, now)
        lag = sum(version - waiting.popleft() for _ in range(BATCH)) / BATCH
        eta = next_eta(bound, eta, lag, Measured(drift(version, lag)))
        etas.append(eta)
    return etas


def power(at_one: float, exponent: float) -> Callable[[int, float], float]:
    """A law that does not change."""
    return lambda _, lag: at_one * (lag + 0.4) ** exponent


@pytest.mark.parametrize("exponent", [0.5, 0.64, 1.0, 1.5])
@pytest.mark.parametrize("at_one", [0.005, 0.02, 0.05])
def test_eta_settles_just_within_the_bound_without_oscillation(
    at_one: float, exponent: float
) -> None:
    etas = settled(BOUND, law := power(at_one, exponent), steps=800)
    last = etas[-200:]
    highest = min((0.1 / at_one) ** (1 / exponent) - 0.4, 64)
    assert max(last) - min(last) <= max(1.0, 0.1 * highest)
    assert 0.7 * highest - 1 <= last[-1] <= highest + 1
    assert law(0, last[-1] - 1) <= 0.1
    # Nor on the way: it turns back once at most, if the drift of the first batches misled it.
    falls = sum(later < earlier - 0.5 for earlier, later in pairwise(etas))
    assert falls <= 3


def test_a_policy_that_moves_faster_closes_the_gate_at_once_and_a_slower_one_opens_it_slowly() -> (
    None
):
    def law(step: int, lag: float) -> float:
        return (0.04 if 200 <= step < 400 else 0.01) * (lag + 0.4)

    etas = settled(BOUND, law, steps=600)
    assert etas[199] == pytest.approx(9.4, abs=0.7)
    # Batches that were admitted before are trained on first; eta is low from the first of them on.
    assert all(eta < 3.5 for eta in etas[201:400])
    assert etas[399] == pytest.approx(2, abs=0.7)
    rises = [later - earlier for earlier, later in pairwise(etas[399:])]
    assert 0 < max(rises) < 1.5
    assert etas[-1] == pytest.approx(9.4, abs=0.7)


def test_without_drift_eta_reaches_its_largest_value() -> None:
    assert settled(BOUND, lambda *_: 0.0)[-1] == 64
    assert settled(replace(BOUND, max_eta=3), lambda *_: 0.0)[-1] == 3


@pytest.mark.parametrize("broken", [math.nan, math.inf, 50.0])
def test_a_broken_policy_closes_the_gate(broken: float) -> None:
    assert next_eta(BOUND, 12.0, 12.0, Measured(broken)) == 0
    assert next_eta(replace(BOUND, min_eta=2), 12.0, 12.0, Measured(broken)) == 2


def test_a_dead_measurement_leaves_the_gate_where_it_is() -> None:
    dead = settled(BOUND, lambda step, lag: 0.01 * lag if step < 50 else -1.0)
    assert set(dead[49:]) == {dead[49]}


def test_the_tightest_bound_decides() -> None:
    bound = replace(BOUND, max_weight_deviation=0.05, min_effective_share=0.8)
    assert bound.pressure(Measured(0.05, 0.01, 0.95)) == pytest.approx(0.5)
    assert bound.pressure(Measured(0.05, 0.10, 0.95)) == pytest.approx(2.0)
    assert bound.pressure(Measured(0.05, 0.01, 0.50)) == pytest.approx(2.5)
    assert bound.pressure(Measured(weight_deviation=0.05)) == pytest.approx(1.0)
    assert bound.pressure(Measured()) is None
    assert BOUND.pressure(Measured(0.05, 0.9, 0.1)) == pytest.approx(0.5), "others have no bound"


@given(
    eta=st.floats(0, 64),
    lag=st.floats(0, 200),
    measured=st.tuples(*[st.floats(0, 1e3) | st.sampled_from([math.nan, math.inf, -1.0])] * 3),
    min_eta=st.floats(0, 8),
)
def test_eta_stays_within_its_bounds(
    eta: float, lag: float, measured: tuple[float, float, float], min_eta: float
) -> None:
    bound = DriftBound(max_drift=0.1, max_weight_deviation=0.1, min_eta=min_eta, max_eta=64)
    eta = max(eta, min_eta)
    after = next_eta(bound, eta, lag, Measured(*measured))
    assert min_eta <= after <= 64
    pressure = bound.pressure(Measured(*measured))
    if pressure is not None and pressure >= 1:
        assert after <= max(min_eta, lag)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_drift": 0.0}, "max_drift is 0.0, but must be > 0"),
        ({"max_drift": math.nan}, "max_drift is nan"),
        ({"max_weight_deviation": -1.0}, "max_weight_deviation is -1.0"),
        ({"min_effective_share": 1.0}, r"must be in \[0, 1\)"),
        ({"min_eta": 65.0}, r"min_eta is 65, but must be finite, and from 0 to eta \(64\)"),
    ],
)
def test_wrong_bounds_are_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(BOUND, **wrong)


def test_the_fitted_law() -> None:
    law = DriftLaw()
    assert law.at(1) == pytest.approx(0.0078)
    assert law.at(0) == 0, "one minibatch has moved nothing before its step"
    assert DriftLaw(minibatches=4).at(0) > 0
    assert DriftLaw(learning_rate=2e-4).at(3) / law.at(3) == pytest.approx(2**0.92)


# --- in the coordinator ---


def limits(**changes: float) -> Limits:
    bound = replace(BOUND, max_eta=16, **changes)
    return Limits(batch_groups=2, max_in_flight=64, train_steps=40, schedule=bounded_drift(bound))


def trained(coordinator: Coordinator, first: RunStarted, law: DriftLaw, steps: int) -> list[float]:
    """Eta after each step of a run whose groups end at once."""
    etas: list[float] = []
    due: deque[object] = deque(coordinator.handle(first))
    versions: dict[int, int] = dict.fromkeys(first.open_groups, first.version)
    while due and len(etas) < steps:
        match due.popleft():
            case StartGroup(group, _, version):
                versions[group] = version
                due.extend(coordinator.handle(GroupFinished(group, version, version)))
            case PushWeights(version):
                due.extend(coordinator.handle(WeightsPushed(version)))
            case Train(version, groups):
                lag = sum(version - versions[one] for one in groups) / len(groups)
                done = TrainStepDone(version + 1, law.at(lag))
                # The push first: groups of the next step start under the new version.
                due.extendleft(reversed(coordinator.handle(done)))
                etas.append(coordinator.limits.schedule.eta)
            case _:
                pass
    return etas


def test_a_run_starts_at_the_smallest_eta_and_stays_within_the_bound() -> None:
    etas = trained(
        Coordinator(limits(min_eta=1.0)), RunStarted((0,)), DriftLaw(drift_at_one=0.03), 40
    )
    assert etas[0] <= 3
    assert 3 < etas[-1] < 7  # the law permits a lag of 6.5


def test_a_recovered_run_continues_with_its_eta() -> None:
    law = DriftLaw(drift_at_one=0.03)
    coordinator = Coordinator(replace(limits(), train_steps=20))
    trained(coordinator, RunStarted((0,)), law, 20)
    saved = coordinator.frontier().eta
    assert saved == coordinator.limits.schedule.eta > 2
    schedule = replace(coordinator.limits.schedule, eta=saved)
    again = Coordinator(replace(limits(), schedule=schedule))
    after = trained(again, RunStarted((0,), version=20, next_group=60), law, 10)
    assert abs(after[0] - saved) < 2


def test_a_person_cannot_set_what_the_bound_sets() -> None:
    coordinator = Coordinator(limits())
    coordinator.handle(RunStarted((0,)))
    refused = coordinator.refusal(EtaRequested(4))
    assert refused is not None
    assert "sets eta by the measured drift, at most 16" in refused


@pytest.mark.parametrize("wrong", [{"ranks": 2}, {"weights_offered": True}])
def test_programs_that_do_not_tell_what_they_measure_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="one controller that measures it"):
        replace(limits(), **wrong)


def test_other_schedules_ignore_what_was_measured() -> None:
    for name, step in zip(SCHEDULES, count(), strict=False):
        schedule = schedule_named(name, eta=2, bound=BOUND)
        assert (schedule.bound is None) == (name != "bounded_drift"), step


# --- advice from the log of another framework -----------------------------------------------------

POSITIVE = st.floats(1e-4, 5.0)


@given(drift=POSITIVE, lag=st.floats(0.1, 100), bound=POSITIVE, minibatches=st.integers(1, 32))
def test_the_permitted_lag_of_a_run_at_the_permitted_lag_is_itself(
    drift: float, lag: float, bound: float, minibatches: int
) -> None:
    advice = advise_on_lag(drift, lag, max_drift=bound, minibatches=minibatches)
    assert advice.hurts == (drift > bound)
    assert advice.permitted_lag == pytest.approx(lag) or (advice.permitted_lag < lag) == (
        drift > bound
    )
    assert (advice.rate_factor < 1) == (drift > bound) or drift == pytest.approx(bound)
    if 1e-3 < advice.permitted_lag < 1e6:
        again = advise_on_lag(bound, advice.permitted_lag, max_drift=bound, minibatches=minibatches)
        assert again.permitted_lag == pytest.approx(advice.permitted_lag, rel=1e-6)


def test_advice_by_hand() -> None:
    advice = advise_on_lag(0.2, 8, max_drift=0.1, age_exponent=0.5)
    assert advice.hurts
    assert advice.permitted_lag == pytest.approx(2)
    assert 0.2 * advice.rate_factor**0.92 == pytest.approx(0.1)
    # With 4 minibatches half of 3/4 of a version is within the step, at any lag.
    assert advise_on_lag(10.0, 1, max_drift=0.1, minibatches=4).permitted_lag == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drift": 0.0}, "drift is 0, but must be finite and > 0"),
        ({"drift": math.nan}, "drift is nan"),
        ({"lag": -1.0}, "lag is -1, but must be finite and >= 0"),
        ({"lag": math.inf}, "lag is inf"),
        ({"max_drift": 0.0}, "max_drift is 0"),
        ({"minibatches": 0}, "minibatches is 0"),
        ({"lag": 0.0}, "nothing is stale"),
    ],
)
def test_numbers_that_no_log_has_are_refused(change: dict[str, float], message: str) -> None:
    given_ = {"drift": 0.1, "lag": 4.0, "max_drift": 0.08, **change}
    with pytest.raises(ValueError, match=message):
        advise_on_lag(**given_)
