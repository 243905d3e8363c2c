"""The candidates of a plan as a table: rows of plain values, a pandas frame, or CSV.

Names of columns end in their units: `_h` hours, `_dollars`, `_s` seconds, `_kwh`, `_share` from 0
to 1. Times, money and energy are of the whole run, but `step_s` and `tokens_per_s`. `_low` and
`_high` in a name are the ends of a 90 % interval with the model's error on measured runs,
`_seeds_low` and `_seeds_high` those of the 95 % interval over the seeds, None with a single seed.
"""

from __future__ import annotations

import csv
import math
from io import StringIO
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from areal_lab.extras import require
from simulator.plan.result import Outcome, Plan, hourly_cost
from simulator.plan.space import Candidate
from simulator.report.error_lines import record_of
from simulator.stats.statistics import estimate

if TYPE_CHECKING:
    import pandas as pd

Row: TypeAlias = dict[str, Any]

_ORDER: Final = {
    "gpus": ("gpus", "duration_h", "least_duration_h"),
    "dollars": ("cost_dollars", "duration_h", "least_duration_h"),
    "hours": ("duration_h", "least_duration_h"),
}
"""Columns by which rows are sorted, by objective."""
_HIGH_ENDS: Final = {"duration_h": "duration_high_h", "cost_dollars": "cost_high_dollars"}
"""Columns in place of others if the pessimistic end ranks."""


def plan_rows(plan: Plan) -> list[Row]:
    """A row for each possible candidate: simulated ones first, the best by the objective on top.

    `seeds` is 0 for candidates that were not simulated; `status` says why.
    """
    known = {one.candidate.number: one for one in (*plan.screened, *plan.outcomes)}
    front = {one.candidate.number for one in plan.front}
    rows = [
        _row(one, known.get(one.number), plan, on_front=one.number in front)
        for one in plan.space.possible
    ]
    order: tuple[str, ...] = _ORDER[plan.config.objective]
    if plan.config.rank_by == "pessimistic":
        order = tuple(_HIGH_ENDS.get(name, name) for name in order)
    return sorted(rows, key=lambda row: (not row["seeds"], *(_number(row[name]) for name in order)))


def plan_frame(plan: Plan) -> pd.DataFrame:
    """The rows as a frame, indexed by the number of the candidate.

    Raises:
        MissingExtra: pandas is not installed.
    """
    require("plan_frame", "notebooks", "pandas")
    import pandas as pd

    return pd.DataFrame(plan_rows(plan)).set_index("candidate")


def plan_csv(plan: Plan) -> str:
    """The rows as CSV with a header; an empty field is unknown. Needs no pandas."""
    text = StringIO()
    if rows := plan_rows(plan):
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()


def _row(candidate: Candidate, known: Outcome | None, plan: Plan, *, on_front: bool) -> Row:
    config, best = candidate.config, plan.best
    return {
        "candidate": candidate.number,
        "status": _status(candidate, known, plan),
        "recommended": best is not None and candidate.number == best.candidate.number,
        "on_front": on_front,
        "within_limits": None if known is None else known.meets(plan.config.limits),
        "hardware": candidate.hardware,
        "gpus": candidate.gpus,
        "gpu": config.cluster.gpu,
        "rollout_gpu": config.cluster.generating_gpu,
        "placement": config.cluster.placement,
        "generating_gpus": config.cluster.generating_gpus,
        "training_gpus": config.cluster.training_gpus,
        "schedule": config.schedule.name,
        "eta_versions": candidate.eta,
        "rollout_tensor_parallel": config.rollout.tensor_parallel,
        "trainer_tensor_parallel": config.trainer.tensor_parallel,
        "trainer_pipeline_parallel": config.trainer.pipeline_parallel,
        "micro_batch_tokens": config.trainer.micro_batch_tokens,
        "cluster_dollars_per_h": hourly_cost(candidate, plan.config.prices).dollars,
        **_results(known),
        "least_duration_h": plan.least_hours.get(candidate.number),
    }


def _status(candidate: Candidate, known: Outcome | None, plan: Plan) -> str:
    if known is not None:
        return "simulated once" if len(known.trials) == 1 else "simulated with all seeds"
    if candidate.number in plan.waiting:
        return "not reached"
    return "excluded by its lower bound"


def _results(known: Outcome | None) -> Row:
    """Columns of what was simulated; None without a simulation."""
    columns = (
        *("seeds", "duration_h", "duration_low_h", "duration_high_h"),
        *("duration_seeds_low_h", "duration_seeds_high_h"),
        *("cost_dollars", "cost_low_dollars", "cost_high_dollars"),
        *("cost_seeds_low_dollars", "cost_seeds_high_dollars"),
        *("cost_at_low_price_dollars", "cost_at_high_price_dollars", "gpu_hours"),
        *("energy_kwh", "step_s", "tokens_per_s", "engines_busy_share", "trainer_busy_share"),
        "bottleneck",
    )
    if known is None:
        return {name: 0 if name == "seeds" else None for name in columns}
    hours, hourly, trials = known.hours, known.hourly, known.trials
    values = (
        len(trials),
        *record_of(known.predicted_hours, hours).values(),
        *(
            (None,) * 5
            if known.predicted_dollars is None or known.dollars is None
            else record_of(known.predicted_dollars, known.dollars).values()
        ),
        *(None if price is None else price * hours.mean for price in (hourly.low, hourly.high)),
        known.gpu_hours.mean,
        estimate([trial.kwh for trial in trials]).mean * known.steps,
        estimate([trial.step_s for trial in trials]).mean,
        estimate([trial.tokens_per_s for trial in trials]).mean,
        known.engine_share,
        known.trainer_share,
        known.limit,
    )
    return dict(zip(columns, values, strict=True))


def _number(value: float | None) -> float:
    """For sorting: what is unknown comes last."""
    return math.inf if value is None else value
