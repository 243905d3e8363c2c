"""How many programs a second a sandbox runs, by level and by how many run at once.

`programs_per_s`: `print(45)`, start to end, with an interpreter of its own. `verdicts_per_s`: a
solution and its tests, two processes that talk (`areal_lab.rewards.verdicts`); three calls. Both
are wall rates at the best concurrency of `level`, the first level that works here. `cpu_ms` is the
CPU time of all processes for one, the keeper's and its parent's included. Baseline `subprocess`:
the same interpreter and options, and nothing around it.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from areal_lab.rewards.sandbox.levels import CONTAINED, choose, refusal
from areal_lab.rewards.sandbox.run import Sandbox
from areal_lab.rewards.verdicts.judge import judge
from benchmarks.harness import parse, repeat, report, spread

PROGRAM = "print(45)"
SOLUTION = "def add(a, b):\n    return a + b\n"
TESTS = "assert add(1, 2) == 3\nassert add([1], [2]) == [1, 2]\nassert add('a', 'b') == 'ab'\n"


def run_plainly() -> None:
    """The program without a sandbox."""
    command = [os.path.realpath(sys.executable), "-I", "-S", "-B", "-c", PROGRAM]
    ended = subprocess.run(command, capture_output=True, check=True, stdin=subprocess.DEVNULL)
    if ended.stdout != b"45\n":
        raise RuntimeError(f"the program wrote {ended.stdout!r}")


def run_in(sandbox: Sandbox) -> None:
    """The program in a sandbox."""
    found = sandbox.run(PROGRAM)
    if found.stdout != "45\n":
        raise RuntimeError(f"the program failed: {found}")


def judge_in(sandbox: Sandbox) -> None:
    """One verdict."""
    found = judge(sandbox, SOLUTION, TESTS, under_test=["add"])
    if found.status != "passed":
        raise RuntimeError(f"the verdict is {found}")


def measure(what: Callable[[], None], *, count: int, at_once: int, repeats: int) -> dict[str, Any]:
    """Runs per second of wall time, and CPU milliseconds of one."""
    cpu_ms: list[float] = []

    def per_s() -> float:
        begin_s, begin_cpu_s = time.perf_counter(), _cpu_s()
        with ThreadPoolExecutor(at_once) as threads:
            list(threads.map(lambda _: what(), range(count)))
        cpu_ms.append(1e3 * (_cpu_s() - begin_cpu_s) / count)
        return count / (time.perf_counter() - begin_s)

    rates = spread(repeat(per_s, repeats))
    return {
        "per_s": rates["median"],
        "min": rates["min"],
        "max": rates["max"],
        "cpu_ms": spread(cpu_ms[1:])["median"],
    }


def _cpu_s() -> float:
    """CPU seconds of this process and of all children that have ended."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in both)


def main() -> None:
    """Measure and report."""
    arguments = parse(__doc__, repeats=3, quick_repeats=1)
    count = 8 if arguments.quick else 40
    cores = len(os.sched_getaffinity(0))
    cases: list[tuple[str, str, Callable[[], None]]] = [("subprocess", "program", run_plainly)]
    for level in (*(one for one in CONTAINED if not refusal(one)), "unsafe"):
        sandbox = Sandbox(level)
        cases.append((level, "program", partial(run_in, sandbox)))
        cases.append((level, "verdict", partial(judge_in, sandbox)))
    rows = [
        {"level": level, "what": what, "at_once": at_once}
        | measure(function, count=count, at_once=at_once, repeats=arguments.repeats)
        for level, what, function in cases
        for at_once in (1, cores, 4 * cores)
    ]
    chosen = choose("auto").level

    def best(what: str) -> dict[str, Any]:
        of_level = [row for row in rows if (row["level"], row["what"]) == (chosen, what)]
        return max(of_level, key=lambda row: row["per_s"])

    figures = {"programs_per_s": best("program"), "verdicts_per_s": best("verdict")}
    report(
        {
            "level": chosen,
            **{name: row["per_s"] for name, row in figures.items()},
            "rows": rows,
            "spread": {
                name: {key: row[key] for key in ("min", "max")} for name, row in figures.items()
            },
        },
        arguments,
    )


if __name__ == "__main__":
    main()
