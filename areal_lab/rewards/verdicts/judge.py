"""The verdict about a solution: it and its tests run in two cells of a sandbox, linked by pipes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, cast

from areal_lab.rewards.sandbox.run import DEFAULT_LIMITS, Finished, Job, Limits, Sandbox
from areal_lab.rewards.verdicts import tests as tests_side

Status: TypeAlias = Literal["passed", "failed", "unsupported"]
"""`unsupported`: the tests need something that cannot be sent between processes, such as a
comparison of the solution's own objects; says nothing about the solution."""

_HERE: Final = "areal_lab.rewards.verdicts."
_MODULES: Final = (f"{_HERE}literals", f"{_HERE}solution", f"{_HERE}tests")
_STATUSES: Final = (tests_side.PASSED, tests_side.FAILED, tests_side.UNSUPPORTED)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of the tests, with the reason."""

    status: Status
    reason: str
    """Error and line of the tests, or how the solution ended."""
    solution: Finished


def judge(
    sandbox: Sandbox,
    solution: str,
    tests: str,
    *,
    under_test: Sequence[str] | None = None,
    prelude: str = "",
    limits: Limits = DEFAULT_LIMITS,
) -> Verdict:
    """Run Python tests on a solution.

    `under_test` are the tested functions and classes of the solution; they replace anything else
    with their name, such as builtins. None takes the names that the solution defines and the tests
    use, so it can define names that the tests forgot to.
    """
    both = sandbox.run_linked(
        Job(module=f"{_HERE}solution", argument={"code": solution}),
        Job(
            module=f"{_HERE}tests",
            argument={
                "tests": tests,
                "prelude": prelude,
                "under_test": None if under_test is None else list(under_test),
                "solution": solution,
            },
        ),
        _MODULES,
        limits=limits,
    )
    return verdict_of(*both)


def verdict_of(solution: Finished, tests: Finished) -> Verdict:
    """Verdict of two programs that have ended."""
    status, _, reason = tests.stdout.partition("\n")
    if tests.end != "exited" or tests.code or status not in _STATUSES:
        status, reason = tests_side.FAILED, f"the tests ended without a verdict: {tests.end}"
    if status != tests_side.PASSED and solution.end not in ("exited", "stopped"):
        reason = f"the solution's process: {solution.end}; {reason}"
    return Verdict(cast("Status", status), reason, solution)
