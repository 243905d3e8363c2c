"""The benchmark of the sandbox measures programs that ran."""

from __future__ import annotations

from functools import partial

import pytest

from areal_lab.rewards.sandbox.run import Sandbox
from benchmarks import sandbox
from tests.rewards.sandbox.test_attacks import LEVELS


def test_rates_and_cpu_time_are_of_programs_that_ran() -> None:
    level = Sandbox(LEVELS[0])
    for what in (
        sandbox.run_plainly,
        *(partial(one, level) for one in (sandbox.run_in, sandbox.judge_in)),
    ):
        found = sandbox.measure(what, count=3, at_once=2, repeats=2)
        assert 0 < found["min"] <= found["per_s"] <= found["max"]
        assert found["cpu_ms"] > 1


def test_a_program_that_fails_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "PROGRAM", "1 / 0")
    with pytest.raises(RuntimeError, match="the program failed"):
        sandbox.run_in(Sandbox(LEVELS[0]))
    monkeypatch.setattr(sandbox, "TESTS", "assert add(1, 1) == 3")
    with pytest.raises(RuntimeError, match="the verdict is"):
        sandbox.judge_in(Sandbox(LEVELS[0]))
