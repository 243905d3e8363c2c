"""Tables of a plan for a terminal: its summary, the front and the sensitivity."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulator.plan.result import End, Plan
from simulator.plan.sensitivity import at_end, measure
from simulator.plan.summary import (
    model_error_lines,
    no_comparison,
    plan_warnings,
    question_lines,
    ranked_by,
    recommendation_lines,
    verdict,
)
from simulator.report.error_lines import PERCENT
from simulator.stats.format import number, span
from simulator.stats.model_error import Prediction

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_SAME = "unchanged"
"""Shown as the new best if the recommendation stays."""


def show_plan(console: Console, plan: Plan) -> None:
    """Print a plan."""
    console.print(f"[bold]{plan.config.name}[/]")
    for line in question_lines(plan):
        console.print(line, highlight=False)
    if plan.front:
        console.print()
        console.print(_front_table(plan))
    console.print()
    for line in recommendation_lines(plan):
        console.print(line, highlight=False)
    for one in plan.comparisons:
        console.print(verdict(one), highlight=False)
    if plan.space.possible and not plan.comparisons:
        console.print(no_comparison(plan), highlight=False)
    for line in model_error_lines(plan):
        console.print(line, highlight=False)
    if plan.sensitivity is not None:
        console.print()
        console.print(_sensitivity_table(plan))
    for line in plan_warnings(plan):
        console.print(f"note: {line}", style="yellow", highlight=False, markup=False)


def _front_table(plan: Plan) -> Table:
    from rich.table import Table

    table = Table(
        title=(
            "Pareto front of time, cost and GPUs  (* recommendation, ! over a limit; busy: "
            f"engines, trainer){ranked_by(plan)}"
        ),
        title_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
    )
    table.add_column("")
    table.add_column("GPUs", no_wrap=True)
    table.add_column("generate + train", min_width=16)
    table.add_column("schedule", no_wrap=True)
    for name in ("hours", PERCENT, "dollars", PERCENT, "busy"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bottleneck", no_wrap=True)
    for one in plan.front:
        mark = "*" if one is plan.best else "" if one.meets(plan.config.limits) else "!"
        candidate = one.candidate
        table.add_row(
            mark,
            candidate.hardware,
            candidate.split,
            candidate.schedule.replace("asynchronous, ", ""),
            *_cells(one.predicted_hours),
            *_cells(one.predicted_dollars),
            f"{one.engine_share:.0%}, {one.trainer_share:.0%}",
            one.limit,
        )
    return table


def _cells(value: Prediction | None) -> tuple[str, str]:
    """A number and its interval."""
    if value is None:
        return "unknown", ""
    return number(value.value), span({"low": value.low, "high": value.high})


def _sensitivity_table(plan: Plan) -> Table:
    from rich.table import Table

    assert plan.sensitivity is not None
    name = measure(plan.config.objective)
    table = Table(
        title=f"sensitivity: {name} of the recommendation, each input at both ends of its range",
        title_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
    )
    table.add_column("input", no_wrap=True)
    table.add_column("range", no_wrap=True)
    table.add_column(f"change of {name}", justify="right", no_wrap=True)
    table.add_column("new best")
    table.add_column("source of the range")
    for one in plan.sensitivity.inputs:
        changes = [_change(plan, end) for end in (one.low, one.high)]
        best = {end.value: _best_then(plan, end) for end in (one.low, one.high)}
        change = (
            _SAME
            if set(best.values()) == {_SAME}
            else "; ".join(f"{value}: {text}" for value, text in best.items() if text != _SAME)
        )
        ends = f"{one.low.value} .. {one.high.value}"
        table.add_row(one.name, ends, " .. ".join(changes), change, one.source)
    return table


def _change(plan: Plan, end: End) -> str:
    assert plan.sensitivity is not None
    own, name = plan.sensitivity.base, measure(plan.config.objective)
    there = at_end(end, own)
    return "impossible" if there is None else f"{there.value(name) / own.value(name) - 1:+.1%}"


def _best_then(plan: Plan, end: End) -> str:
    assert plan.sensitivity is not None
    if end.best is None:
        return "none within the limits"
    if end.best.candidate is plan.sensitivity.base.candidate:
        return _SAME
    candidate = end.best.candidate
    return f"{candidate.hardware} ({candidate.split}; {candidate.schedule})"
