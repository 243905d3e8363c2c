"""The paper's run, or a plan, in CPU seconds of this process and thread: for two trees in turns.

`benchmarks.simulator --against` runs this file with the packages of each tree, so it uses only what
`simulator` exports in all of them. Prints a JSON object: `cpu_s`, and `answer`, a digest of all
results, which tells whether two trees simulate the same to the last bit.

    PYTHONPATH=TREE python -P benchmarks/one_simulation.py run table_1_1.5b_asynchronous [KEY=VALUE]
    PYTHONPATH=TREE python -P benchmarks/one_simulation.py plan configs/plan_example.yaml ...
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from simulator import build, find_plan, load_plan, load_simulation, run_system
from simulator.run.result import SimulationResult


def digest(result: SimulationResult) -> str:
    """A digest of everything that a simulation returns."""
    columns = {name: column.tolist() for name, column in sorted(result.columns.items())}
    fields = sorted(set(result.__slots__) - {"columns"})
    return _hash([columns, [(name, getattr(result, name)) for name in fields]])


def simulate(name: str, overrides: Sequence[str]) -> str:
    """Simulate a preset; returns the digest of its result."""
    config = load_simulation(name, overrides)
    return digest(run_system(build(config), config.seed, name=config.name))


def plan(path: str, overrides: Sequence[str]) -> str:
    """Search a plan in this process; returns the digest of its trials."""
    found = find_plan(load_plan(Path(path), overrides))
    outcomes = (*found.screened, *found.outcomes)
    trials = [(one.candidate.number, one.trials) for one in outcomes]
    return _hash([trials, [one.candidate.number for one in found.front], found.sensitivity])


def _hash(results: object) -> str:
    return hashlib.sha256(repr(results).encode()).hexdigest()


def main(what: str, name: str, *overrides: str) -> None:
    """Measure and print."""
    begin_s = time.process_time()
    answer = {"run": simulate, "plan": plan}[what](name, overrides)
    print(json.dumps({"cpu_s": time.process_time() - begin_s, "answer": answer}))


if __name__ == "__main__":
    main(*sys.argv[1:])
