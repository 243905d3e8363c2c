"""A plan on a terminal: its lines, the front, what the answer depends on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulator.plan.result import End, Plan
from simulator.plan.sensitivity import at_end, measure
from simulator.plan.summary import (
    answer_lines,
    interval,
    no_comparison,
    plan_warnings,
    question_lines,
    verdict,
)
from simulator.stats.format import quantity

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def show_plan(console: Console, plan: Plan) -> None:
    """Print it."""
    console.print(f"[bold]{plan.config.name}[/]")
    for line in question_lines(plan):
        console.print(line, highlight=False)
    if plan.front:
        console.print()
        console.print(_front_table(plan))
    console.print()
    for line in answer_lines(plan):
        console.print(line, highlight=False)
    for one in plan.comparisons:
        console.print(verdict(one), highlight=False)
    if plan.space.possible and not plan.comparisons:
        console.print(no_comparison(plan), highlight=False)
    if plan.sensitivity is not None:
        console.print()
        console.print(_sensitivity_table(plan))
    for line in plan_warnings(plan):
        console.print(f"note: {line}", style="yellow", highlight=False, markup=False)


def _front_table(plan: Plan) -> Table:
    from rich.table import Table

    table = Table(
        title="front: nothing else is better in time, money and GPUs  (* the answer, ! over a "
        "limit)",
        title_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
    )
    table.add_column("")
    table.add_column("GPUs")
    table.add_column("generate + train", no_wrap=True)
    table.add_column("schedule", no_wrap=True)
    for name in ("hours", "dollars", "engines", "trainer"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("limit", no_wrap=True)
    for one in plan.front:
        mark = "*" if one is plan.best else "" if one.meets(plan.config.limits) else "!"
        candidate = one.candidate
        table.add_row(
            mark,
            candidate.hardware,
            candidate.split,
            candidate.schedule.replace("asynchronous, ", ""),
            quantity(interval(one.hours)),
            "unknown" if one.dollars is None else quantity(interval(one.dollars)),
            f"{one.engine_share:.0%}",
            f"{one.trainer_share:.0%}",
            one.limit,
        )
    return table


def _sensitivity_table(plan: Plan) -> Table:
    from rich.table import Table

    assert plan.sensitivity is not None
    name = measure(plan.config.objective)
    table = Table(
        title=f"sensitivity: the answer's {name} if one input is at either end of its error",
        title_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
    )
    table.add_column("input", no_wrap=True)
    table.add_column("from .. to", no_wrap=True)
    table.add_column(f"{name}, change", justify="right", no_wrap=True)
    table.add_column("the best then")
    table.add_column("source of the range")
    for one in plan.sensitivity.inputs:
        changes = [_change(plan, end) for end in (one.low, one.high)]
        best = {end.value: _best_then(plan, end) for end in (one.low, one.high)}
        told = (
            "stays"
            if set(best.values()) == {"stays"}
            else "; ".join(f"{value}: {text}" for value, text in best.items() if text != "stays")
        )
        ends = f"{one.low.value} .. {one.high.value}"
        table.add_row(one.name, ends, " .. ".join(changes), told, one.source)
    return table


def _change(plan: Plan, end: End) -> str:
    assert plan.sensitivity is not None
    own, name = plan.sensitivity.base, measure(plan.config.objective)
    there = at_end(end, own)
    return "impossible" if there is None else f"{there.value(name) / own.value(name) - 1:+.1%}"


def _best_then(plan: Plan, end: End) -> str:
    assert plan.sensitivity is not None
    if end.best is None:
        return "none keeps to the limits"
    if end.best.candidate is plan.sensitivity.base.candidate:
        return "stays"
    candidate = end.best.candidate
    return f"{candidate.hardware} ({candidate.split}; {candidate.schedule})"
