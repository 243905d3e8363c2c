"""Simulate the trials that are shipped with a plan file: `python -m tools.trials`, about a minute.

Every candidate of `plan_small` is simulated as in the screening and with all seeds, and the answers
to it, also without staleness and with one type of GPU, as `find_plan` asks. So the notebook
05_buy_a_cluster answers at once whatever prices, deadline and budget are set.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from simulator.plan.schema import PlanConfig, load_plan
from simulator.plan.search import evaluation_jobs, find_plan, screening_job
from simulator.plan.space import expand
from simulator.plan.trial import TrialCache

PLAN: Final = "plan_small"
FILE: Final = Path(__file__).parents[1] / "simulator" / "plan" / "data" / f"{PLAN}.json"


def questions() -> Iterator[PlanConfig]:
    """The plan, and the same with one restriction."""
    plan = load_plan(PLAN)
    yield plan
    yield plan.with_settings({"limits.eta": 0})
    for gpu in plan.candidates.gpu:
        yield plan.with_settings({"candidates.gpu": [gpu]})


def simulate() -> TrialCache:
    """All trials."""
    cache = TrialCache()
    plan = load_plan(PLAN)
    for candidate in expand(plan).possible:
        for job in (screening_job(plan, candidate), *evaluation_jobs(plan, candidate)):
            list(cache([job]))
    for question in questions():
        find_plan(question, cache)
    return cache


if __name__ == "__main__":
    trials = simulate()
    trials.save(FILE, made_by="python -m tools.trials")
    print(f"{len(trials)} trials in {FILE.name}, {FILE.stat().st_size / 1000:.0f} kB")
