"""The candidates of a plan as a table (rows, a pandas frame, CSV) and as points of a chart.

Names of columns end in their units: `_h` hours, `_dollars`, `_s` seconds, `_kwh`, `_share` from 0
to 1. Times, money and energy are of the whole run, but `step_s` and `tokens_per_s`. `_low` and
`_high` in a name are the ends of a 90 % interval with the model's error on measured runs,
`_seeds_low` and `_seeds_high` those of the 95 % interval over the seeds, None with a single seed.

The candidates of a plan as points of a chart: money to the right, hours upwards.

    plan_points(plan, {"without staleness": outcome}) --> pareto_chart (areal_lab.widgets.pareto)

A point is where its candidate was simulated; one that was excluded is at its lower bound, and would
be above and to the right of it.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from io import StringIO
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from areal_lab.extras import require
from simulator.plan.result import Outcome, Plan, hourly_cost
from simulator.plan.space import Candidate
from simulator.plan.summary import hours, money, with_unit
from simulator.report.measured_errors import record_of
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
_STALENESS: Final = (
    *("head_mean", "head_p95", "before_queue_mean", "before_queue_p95"),
    *("in_queue_mean", "in_queue_p95", "thrown_away"),
)
"""Numbers of `SimulationResult.staleness` that are columns: the lag is that of first tokens."""
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
        "hybrid_gpus": config.cluster.hybrid_gpus,
        "require_batches": config.schedule.require_batches,
        "generating_gpus": config.cluster.generating_gpus,
        "training_gpus": config.cluster.training_gpus,
        "schedule": config.schedule.name,
        "eta_versions": candidate.eta,
        "rollout_tensor_parallel": config.rollout.tensor_parallel,
        "trainer_tensor_parallel": config.trainer.tensor_parallel,
        "trainer_pipeline_parallel": config.trainer.pipeline_parallel,
        "trainer_expert_parallel": config.trainer.expert_parallel,
        "trainer_context_parallel": config.trainer.context_parallel,
        "trainer_sequence_parallel": config.trainer.sequence_parallel,
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
    columns = (
        *("seeds", "duration_h", "duration_low_h", "duration_high_h"),
        *("duration_seeds_low_h", "duration_seeds_high_h"),
        *("cost_dollars", "cost_low_dollars", "cost_high_dollars"),
        *("cost_seeds_low_dollars", "cost_seeds_high_dollars"),
        *("cost_at_low_price_dollars", "cost_at_high_price_dollars", "gpu_hours"),
        *("energy_kwh", "step_s", "tokens_per_s", "engines_busy_share", "trainer_busy_share"),
        *("lag_mean_versions", "lag_p95_versions", "lag_before_queue_mean_versions"),
        *("lag_before_queue_p95_versions", "lag_in_queue_mean_versions"),
        *("lag_in_queue_p95_versions", "thrown_away_share", "bottleneck"),
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
        *(known.staleness.get(name) for name in _STALENESS),
        known.limit,
    )
    return dict(zip(columns, values, strict=True))


def _number(value: float | None) -> float:
    return math.inf if value is None else value


Points: TypeAlias = list[dict[str, Any]]

TOOLTIPS: Final = MappingProxyType(
    {
        "hardware": "GPUs",
        "split": "generate + train",
        "schedule": "schedule",
        "told_hours": "time",
        "told_money": "cost",
        "bottleneck": "bottleneck",
        "busy": "engines, trainer busy",
        "told_status": "examined",
    }
)
"""Keys of a point that are text, with their titles."""


def plan_points(plan: Plan, others: Mapping[str, Outcome] = MappingProxyType({})) -> Points:
    """A point for every possible candidate that was reached.

    Args:
        others: outcomes to be shown in any case, by their label, such as the recommendations of
            other plans with the same base.

    Returns:
        Mappings with `number` (of the candidate), `x` (dollars; GPU-hours if the front has a
        candidate without a price), `y` (hours), the `_low` and `_high` ends of their
        90 % intervals with the model's error, `level` (front,
        simulated or excluded), `group` (GPU), `kind` (asynchronous or synchronous), `label`,
        `named` (the place in `others` from 1, else 0), `best`, and the texts of `TOOLTIPS`.
    """
    priced = in_dollars(plan)
    known = {one.candidate.number: one for one in (*plan.screened, *plan.outcomes)}
    labels = {_number_of(one, plan): label for label, one in others.items()}
    known |= {_number_of(one, plan): one for one in others.values()}
    front = {one.candidate.number for one in plan.front}
    best = None if plan.best is None else plan.best.candidate.number
    points = []
    for candidate in plan.space.possible:
        number = candidate.number
        outcome = known.get(number)
        if outcome is None and (number in plan.waiting or number not in plan.least_hours):
            continue
        place = (
            _simulated(outcome, priced=priced)
            if outcome is not None
            else _excluded(candidate, plan, priced=priced)
        )
        if place["x"] is None:
            continue
        level = "front" if number in front else "excluded" if outcome is None else "simulated"
        points.append(
            {
                **{"number": number, "level": level, "best": number == best},
                **{"group": candidate.config.cluster.gpu, "gpus": candidate.gpus},
                "kind": "asynchronous" if candidate.stale else "synchronous",
                "label": labels.get(number, f"{candidate.gpus}" if number in front else ""),
                "named": 1 + list(labels).index(number) if number in labels else 0,
                **{"hardware": candidate.hardware, "split": candidate.split},
                "schedule": candidate.schedule,
                **place,
            }
        )
    return points


def in_dollars(plan: Plan) -> bool:
    """True if money is in dollars, false in GPU-hours: a candidate has no known price."""
    return all(one.dollars is not None for one in plan.front)


def outcome_at(plan: Plan, number: int, others: Sequence[Outcome] = ()) -> Outcome | None:
    """Outcome of a candidate of the plan; None if it was not simulated."""
    known = {one.candidate.number: one for one in (*plan.screened, *plan.outcomes)}
    known |= {_number_of(one, plan): one for one in others}
    return known.get(number)


def _number_of(one: Outcome, plan: Plan) -> int:
    """The number of a candidate with the same settings; -1 if the plan has none."""
    return next(
        (
            candidate.number
            for candidate in plan.space.possible
            if candidate.config == one.candidate.config
        ),
        -1,
    )


def _simulated(one: Outcome, *, priced: bool) -> dict[str, Any]:
    duration = one.predicted_hours
    cost = one.predicted_dollars if priced else one.predicted_gpu_hours
    x, x_low, x_high = (None,) * 3 if cost is None else (cost.value, cost.low, cost.high)
    seeds = len(one.trials)
    return {
        **{"x": x, "x_low": x_low, "x_high": x_high},
        **{"y": duration.value, "y_low": duration.low, "y_high": duration.high},
        **{"told_hours": hours(one), "told_money": money(one), "bottleneck": one.limit},
        "busy": f"{one.engine_share:.0%}, {one.trainer_share:.0%}",
        "told_status": f"simulated with {seeds} seeds" if seeds > 1 else "simulated with one seed",
    }


def _excluded(candidate: Candidate, plan: Plan, *, priced: bool) -> dict[str, Any]:
    least_h = plan.least_hours[candidate.number]
    per_h = hourly_cost(candidate, plan.config.prices).dollars if priced else candidate.gpus
    unit = "dollars" if priced else "GPU-hours"
    cost = None if per_h is None else least_h * per_h
    return {
        **{"x": cost, "x_low": None, "x_high": None, "y": least_h, "y_low": None, "y_high": None},
        "told_hours": f"at least {least_h:.3g} h",
        "told_money": "unknown" if cost is None else f"at least {with_unit(f'{cost:,.0f}', unit)}",
        **{"bottleneck": "", "busy": ""},
        "told_status": "excluded: another candidate beats even this bound",
    }
