"""The candidates of a plan as points of a chart: money to the right, hours upwards.

    plan_points(plan, {"without staleness": outcome}) --> pareto_chart (areal_lab.widgets.pareto)

A point is where its candidate was simulated; one that was excluded is at its lower bound, and would
be above and to the right of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from simulator.plan.result import Outcome, Plan, hourly_cost
from simulator.plan.space import Candidate
from simulator.plan.summary import hours, money

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
    """Whether money is dollars; else GPU-hours, since the price of some candidate is unknown."""
    return all(one.dollars is not None for one in plan.front)


def outcome_at(plan: Plan, number: int, others: Sequence[Outcome] = ()) -> Outcome | None:
    """What is known of a candidate of the plan; None if it was not simulated.

    Args:
        number: of the candidate.
        others: outcomes of other plans with the same base, which come first.
    """
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
    unit = "$" if priced else "GPU-hours"
    cost = None if per_h is None else least_h * per_h
    return {
        **{"x": cost, "x_low": None, "x_high": None, "y": least_h, "y_low": None, "y_high": None},
        "told_hours": f"at least {least_h:.3g} h",
        "told_money": "unknown" if cost is None else f"at least {cost:,.0f} {unit}",
        **{"bottleneck": "", "busy": ""},
        "told_status": "excluded: another candidate beats even this bound",
    }
