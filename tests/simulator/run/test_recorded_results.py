"""Simulations give what was recorded before their speed was worked on; other costs change it.

`python -m tests.simulator.run.test_recorded_results` records anew, after a change of the physics.
Integers are equal, seconds within 1e-9: the last digits differ between processors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from simulator.assembly.simulate import build
from simulator.config.load import load_simulation
from simulator.engine.replica import Replica
from simulator.run.one_seed import run_system

FILE: Final = Path(__file__).with_name("recorded_results.json")
SHORT: Final = ("workload.steps=6", "workload.warmup_steps=2")
PAPER: Final = "table_1_1.5b_asynchronous"
CASES: Final = (
    (PAPER,),
    ("table_1_1.5b_synchronous",),
    ("table_1_7b_asynchronous",),
    (PAPER, "schedule.slots=samples"),
    ("table_1_7b_asynchronous", "schedule.slots=samples"),
    (PAPER, "schedule.name=partial_rollout", "schedule.eta=1"),
    (PAPER, "schedule.name=one_step_overlap"),
    (PAPER, "schedule.name=bounded_drift"),
    (PAPER, "schedule.interruptible=false"),
    (PAPER, "schedule.batch_order=strict_start_order"),
    *(
        (name,)
        for name in (
            *("small", "areal_h800", "verl_fsdp2_h20", "nemo_rl_h100"),
            *("skyrl_h100", "miles_h100", "prime_rl_h200"),
        )
    ),
)


def found(case: tuple[str, ...]) -> dict[str, Any]:
    """Numbers that depend on the order and the times of all events."""
    name, *overrides = case
    config = load_simulation(name, [*SHORT, *overrides])
    result = run_system(build(config), config.seed)
    counts = result.counts
    lags = {which: result.lags(which) for which in ("token", "head", "tail", "in_queue")}
    return {
        "counts": [
            *(counts.started, counts.generated_tokens, counts.recomputed_tokens),
            *(counts.preemptions, counts.interruptions, result.ledger.generated),
        ],
        "lags": {which: [[*map(int, one)] for one in by.items()] for which, by in lags.items()},
        "seconds": {
            column: result.columns[column].tolist() for column in ("end_s", "wait_s", "generate_s")
        },
        "utilization": {name: pool.utilization for name, pool in result.pools.items()},
    }


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_results_are_as_recorded(case: tuple[str, ...]) -> None:
    recorded = json.loads(FILE.read_text())[" ".join(case)]
    ours = found(case)
    assert ours["counts"] == recorded["counts"]
    assert ours["lags"] == recorded["lags"]
    for column, seconds in recorded["seconds"].items():
        assert ours["seconds"][column] == pytest.approx(seconds, rel=1e-9, abs=1e-6)
    assert ours["utilization"] == pytest.approx(recorded["utilization"], rel=1e-9)


def test_counters_of_engines_are_computed_twice_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """They cost as much as many events: only the ends of warm-up and of the run need them."""
    config = load_simulation("small", [*SHORT, "schedule.slots=samples"])
    system = build(config)
    counted = Replica.generated_tokens
    calls = []

    def watched(engine: Replica) -> int:
        calls.append(engine)
        return counted.fget(engine)  # type: ignore[attr-defined, no-any-return]

    monkeypatch.setattr(Replica, "generated_tokens", property(watched))
    run_system(system, config.seed)
    checked = system.engines  # `isinstance` computes it, when an engine is made
    assert len(calls) <= 2 * system.engines + 2 * checked


if __name__ == "__main__":
    lines = [f"{json.dumps(' '.join(case))}: {json.dumps(found(case))}" for case in CASES]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
