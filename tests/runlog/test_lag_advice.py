"""What a log says about its lag: the rule, its error as published, and nothing without numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.control.drift import advise_on_lag
from areal_lab.control.schedule import SAFE_DRIFT
from areal_lab.foreign.record import Attempt, ImportedRun, Step
from areal_lab.runlog.lag_advice import ERROR, lag_lines, logged_drift

README = Path(__file__).parents[2] / "reproductions" / "README.md"


def run_of(
    *pairs: tuple[float | None, float | None],
    mode: str | None = "asynchronous",
    rate: float | None = None,
) -> ImportedRun:
    """A run with these lags and drifts, a step each."""
    steps = [
        Step(step=step, values={"lag_mean": lag, "drift_logp_abs_mean": drift})
        for step, (lag, drift) in enumerate(pairs, 1)
    ]
    for one in steps:
        one.values["learning_rate"] = rate
    return ImportedRun(framework="skyrl", mode=mode, attempts=[Attempt(steps=steps)])


def test_the_rule_gets_medians_without_the_gap_of_steps_without_lag() -> None:
    run = run_of((0, 0.01), (0, 0.03), (0, 0.02), (2, 0.10), (6, 0.17), (9, 5.0), rate=1e-6)
    found = logged_drift(run)
    assert found is not None
    assert (found.steps, found.lag, found.gap) == (3, 6, 0.02)
    assert found.drift == pytest.approx(0.15)
    for objective, bound in SAFE_DRIFT.items():
        assert found.advice[objective] == advise_on_lag(found.drift, 6, max_drift=bound)
    text, error = found.lines()
    assert error == ERROR
    factor = found.advice["decoupled"].rate_factor
    assert "0.15 nats at a mean lag of 6 versions (medians of 3 steps, without the gap" in text
    assert f"learning rate to {factor * 1e-6:.2g} ({factor:.2f} times); with PPO around" in text


def test_within_the_bound_the_permitted_lag_is_that_of_the_rule_up_to_its_range() -> None:
    found = logged_drift(run_of((4, 0.04), (4, 0.04)))
    assert found is not None
    assert found.gap is None
    assert found.advice["decoupled"].permitted_lag == pytest.approx(4 * 2**2.5)
    assert "with the gap between engine and trainer" in (text := next(found.lines()))
    assert "decoupled PPO (bound 0.08 nats) it permits a lag of 23;" in text
    assert "permits a lag of more than 40" in next(iter(lag_lines(run_of((4, 0.001)))))


def test_records_of_two_processes_are_one_step() -> None:
    run = run_of((None, 0.2), (None, 0.2))
    run.steps.extend(Step(step=one, role="trainer", values={"lag_mean": 3.0}) for one in (1, 2))
    found = logged_drift(run)
    assert found is not None
    assert (found.steps, found.lag, found.drift) == (2, 3, 0.2)


@pytest.mark.parametrize(
    ("run", "lines"),
    [
        (
            run_of((None, None)),
            ["no advice on lag: the log has no drift_logp_abs_mean and no lag_mean"],
        ),
        (run_of((None, 0.1)), ["no advice on lag: the log has no lag_mean"]),
        (run_of((3, None)), ["no advice on lag: the log has no drift_logp_abs_mean"]),
        (run_of((None, 0.01), mode="synchronous"), []),
        (run_of((0, 0.01), (0, 0.02)), []),
        (run_of(), []),
    ],
)
def test_what_is_missing_is_said_once(run: ImportedRun, lines: list[str]) -> None:
    assert logged_drift(run) is None
    assert lag_lines(run) == lines


NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.none()


@given(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=5), NUMBERS)
def test_any_numbers_of_a_log_give_finite_advice(
    pairs: list[tuple[float | None, float | None]], rate: float | None
) -> None:
    run = run_of(*pairs, rate=rate)
    assert len(lag_lines(run)) <= 2
    found = logged_drift(run)
    if found is not None:
        json.dumps(found.as_json(), allow_nan=False)
        for one in found.advice.values():
            assert one.hurts == (one.permitted_lag < found.lag)


def test_the_error_is_that_of_the_committed_result() -> None:
    rows = re.findall(
        r"finds (\d+) of (\d+) that lose, with (\d+) false alarms among (\d+) that do not",
        README.read_text(encoding="utf-8"),
    )
    found, losing, alarms, others = (sum(map(int, one)) for one in zip(*rows, strict=True))
    assert len(rows) == len(SAFE_DRIFT)
    assert f"finds {found} of {losing} pairs that lose reward" in ERROR
    assert f"with {alarms} false alarms among {others} (" in ERROR
