"""Tables of a plan for a terminal: its summary, the front and the sensitivity.

Report a plan as one JSON object.

Hours, dollars, GPU-hours and the ratio are `{mean, low, high, seeds_low, seeds_high}`: a 90 %
interval that contains the model's error on measured runs, and the 95 % interval over the seeds
alone, null for a single seed. Money is null if no price is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from areal_lab.runlog.records import finite_json
from simulator.plan.result import End, Option, Outcome, Plan, memory_of, other_prices
from simulator.plan.sensitivity import at_end, measure
from simulator.plan.summary import (
    against,
    counted,
    model_error_lines,
    no_comparison,
    plan_warnings,
    question_lines,
    ranked_by,
    recommendation_lines,
    verdict,
    workload_line,
)
from simulator.report.measured_errors import PERCENT, change_record, gpus_of, record_of, step_record
from simulator.stats.format import number

_OPTIONS_SHOWN = 12
"""Rows of clusters and of staleness bounds."""
_SAME = "unchanged"
"""Shown as the new best if the recommendation stays."""


def show_plan(console: Console, plan: Plan) -> None:
    """Print a plan."""
    console.print(plan.config.name, style="bold", markup=False)
    for line in question_lines(plan):
        console.print(line, highlight=False)
    if plan.front:
        console.print()
        console.print(_front_table(plan))
    console.print()
    for line in recommendation_lines(plan):
        console.print(line, highlight=False)
    for title, options in (
        ("every cluster that was asked about, at its best", plan.clusters),
        ("every staleness bound on the recommended cluster, at its best", plan.etas),
        ("shared and separate GPUs on the recommended cluster, each at its best", plan.kinds),
    ):
        if {one.outcome for one in options} - set(plan.front) and len(options) > 1:
            console.print()
            console.print(_options_table(plan, title, options))
    console.print()
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
            "Pareto front of time, cost and GPUs  (* recommendation, ! over a limit; "
            f"{PERCENT}: factor of both, either way; busy: engines, trainer){ranked_by(plan)}"
        ),
        title_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
    )
    table.add_column("")
    table.add_column("GPUs", no_wrap=True)
    table.add_column("generate + train", min_width=16)
    table.add_column("schedule", no_wrap=True)
    for name in ("hours", "dollars", PERCENT, "busy"):
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
            *_cells(one),
            f"{one.engine_share:.0%}, {one.trainer_share:.0%}",
            one.limit,
        )
    return table


def _options_table(plan: Plan, title: str, options: Sequence[Option]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("layout and schedule", min_width=16)
    for name in ("hours", "dollars", PERCENT):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("against the recommendation")
    for option in options[:_OPTIONS_SHOWN]:
        one = option.outcome
        if one is None:
            cells = ("", f"> {number(option.least_hours)}", "", "")
        else:
            candidate = one.candidate
            rough = "" if option.seeds == plan.config.search.seeds else "~"
            duration, dollars, factor = _cells(one)
            cells = (
                f"{candidate.split}; {candidate.schedule.replace('asynchronous, ', '')}",
                f"{rough}{duration}",
                f"{rough}{dollars}",
                factor,
            )
        table.add_row(option.name, *cells, against(plan, option))
    if len(options) > _OPTIONS_SHOWN:
        table.add_row(f"and {len(options) - _OPTIONS_SHOWN} more", "", "", "", "", "--json has all")
    if any(one.outcome and one.seeds < plan.config.search.seeds for one in options):
        table.caption = (
            "~: simulated once, with few steps, because others dominate it; compared with the "
            "recommendation in as few steps"
        )
        table.caption_justify = "left"
    return table


def _cells(one: Outcome) -> tuple[str, str, str]:
    """Hours, dollars, and the factor of both to either end of their interval."""
    dollars = one.predicted_dollars
    return (
        number(one.hours.mean),
        "unknown" if dollars is None else number(dollars.value),
        f"x/÷ {one.predicted_hours.factor:.2f}",
    )


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


def plan_report(plan: Plan) -> dict[str, Any]:
    """The object that `areal-lab plan --json` prints."""
    return {
        "name": plan.config.name,
        "objective": plan.config.objective,
        "rank_by": plan.config.rank_by,
        "steps": plan.config.steps,
        "limits": finite_json(plan.config.limits.model_dump()),
        "candidates": {
            "combinations": plan.space.combinations,
            "merged": plan.space.merged,
            "impossible": counted(plan.space.impossible),
            "over_limits": counted(plan.space.over_limits),
            "left_out_by_bound": plan.bounded,
            "first_look": len(plan.screened),
            "second_look": len(plan.outcomes),
            "simulations": plan.simulations,
            **({"waiting": len(plan.waiting)} if plan.stopped_in else {}),
        },
        **({"stopped_in": plan.stopped_in} if plan.stopped_in else {}),
        "front": [_outcome(one, plan) for one in plan.front],
        "best": None if plan.best is None else _outcome(plan.best, plan),
        "memory": []
        if plan.best is None
        else [
            {**one._asdict(), "parts": dict(one.parts), "free": one.free}
            for one in memory_of(plan.best.candidate)
        ],
        "answer": "\n".join(recommendation_lines(plan)),
        "clusters": [_option(one, plan) for one in plan.clusters],
        "etas": [_option(one, plan) for one in plan.etas],
        "kinds": [_option(one, plan) for one in plan.kinds],
        "workload": workload_line(plan.config),
        "asynchrony": [
            {
                **{"hardware": one.synchronous.candidate.hardware, "pays": one.pays},
                "undecided": one.pays is None,
                "ratio": record_of(one.predicted_ratio, one.ratio),
                "model_error": change_record("gain", one.asynchronous.known.gain),
                "synchronous": _outcome(one.synchronous, plan),
                "asynchronous": _outcome(one.asynchronous, plan),
                "says": verdict(one),
            }
            for one in plan.comparisons
        ],
        "model_error": {"says": list(model_error_lines(plan))},
        "sensitivity": _sensitivity(plan),
        "warnings": plan_warnings(plan),
    }


def _sensitivity(plan: Plan) -> dict[str, Any] | None:
    if plan.sensitivity is None:
        return None
    own, name = plan.sensitivity.base, measure(plan.config.objective)
    rows = []
    for one in plan.sensitivity.inputs:
        ends = {}
        for side, end in (("low", one.low), ("high", one.high)):
            there = at_end(end, own)
            ends[side] = {
                "input": end.value,
                name: None if there is None else there.value(name),
                "best": None if end.best is None else _candidate(end.best),
                "best_changes": end.best is None or end.best.candidate is not own.candidate,
            }
        rows.append({"input": one.name, "value": one.value, "source": one.source, **ends})
    return {
        "of": name,
        "value": own.value(name),
        "finalists": plan.sensitivity.finalists,
        "inputs": rows,
    }


def _option(one: Option, plan: Plan) -> dict[str, Any]:
    return {
        "name": one.name,
        "outcome": None if one.outcome is None else _outcome(one.outcome, plan),
        "seeds": one.seeds,
        "least_hours": one.least_hours,
        "says": against(plan, one),
    }


def _outcome(one: Outcome, plan: Plan) -> dict[str, Any]:
    cheap, dear = one.hourly.low, one.hourly.high
    return {
        **_candidate(one),
        "hours": record_of(one.predicted_hours, one.hours),
        "dollars": _dollars(one),
        "dollars_at_low_price": None if cheap is None else cheap * one.hours.mean,
        "dollars_at_high_price": None if dear is None else dear * one.hours.mean,
        "other_prices": [
            finite_json(price._asdict()) for price in other_prices(one, plan.config.prices)
        ],
        "gpu_hours": record_of(one.predicted_gpu_hours, one.gpu_hours),
        "limit": one.limit,
        "engine_share": one.engine_share,
        "trainer_share": one.trainer_share,
        "staleness": one.staleness,
        "lag": {name: record_of(*lag) for name, lag in (one.lags or {}).items()} or None,
        "within_limits": one.meets(plan.config.limits),
        "model_error": step_record(one.known.step.kind, gpus_of(one.candidate.config), plan.errors),
    }


def _dollars(one: Outcome) -> dict[str, float | None] | None:
    if one.predicted_dollars is None or one.dollars is None:
        return None
    return record_of(one.predicted_dollars, one.dollars)


def _candidate(one: Outcome) -> dict[str, Any]:
    """The varied settings, by their names in `areal-lab simulate`."""
    config = one.candidate.config
    told = {
        "cluster.gpu": config.cluster.gpu,
        "cluster.gpus": config.cluster.gpus,
        "cluster.placement": config.cluster.placement,
        "cluster.rollout_gpus": config.cluster.rollout_gpus,
        "cluster.rollout_gpu": config.cluster.rollout_gpu,
        "cluster.hybrid_gpus": config.cluster.hybrid_gpus,
        "schedule.name": config.schedule.name,
        "schedule.eta": config.schedule.eta,
        "schedule.require_batches": config.schedule.require_batches,
        "rollout.tensor_parallel": config.rollout.tensor_parallel,
        "trainer.tensor_parallel": config.trainer.tensor_parallel,
        "trainer.pipeline_parallel": config.trainer.pipeline_parallel,
        "trainer.expert_parallel": config.trainer.expert_parallel,
        "trainer.context_parallel": config.trainer.context_parallel,
        "trainer.sequence_parallel": config.trainer.sequence_parallel,
        "trainer.micro_batch_tokens": config.trainer.micro_batch_tokens,
    }
    return {"settings": finite_json(told), "hardware": one.candidate.hardware}
