"""What a plan says: one JSON object, and the same as tables for a terminal.

Numbers are `{mean, low, high}` with the bounds of a 95 % interval over the seeds, null where there
is one seed. Money is null where no price is known.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from areal_lab.control.eventlog import finite_json
from simulator.hardware import find_gpu
from simulator.plan_limit import STALENESS_BOUND
from simulator.plan_result import Comparison, End, Outcome, Plan
from simulator.plan_space import Refusal
from simulator.quantities import number, quantity
from simulator.sensitivity import at_end, measure
from simulator.sources import warnings
from simulator.statistics import Estimate

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_SUMS: Final = {"gpus": "fewest GPUs", "dollars": "least money", "hours": "shortest time"}


def plan_report(plan: Plan) -> dict[str, Any]:
    """The object that `areal-lab plan --json` prints."""
    return {
        "name": plan.config.name,
        "objective": plan.config.objective,
        "steps": plan.config.steps,
        "limits": finite_json(dataclasses.asdict(plan.config.limits)),
        "candidates": {
            "combinations": plan.space.combinations,
            "merged": plan.space.merged,
            "impossible": _counted(plan.space.impossible),
            "over_limits": _counted(plan.space.over_limits),
            "left_out_by_bound": plan.bounded,
            "first_look": len(plan.screened),
            "second_look": len(plan.outcomes),
            "simulations": plan.simulations,
        },
        "front": [_told(one, plan) for one in plan.front],
        "best": None if plan.best is None else _told(plan.best, plan),
        "answer": "\n".join(answer_lines(plan)),
        "asynchrony": [
            {
                **{"hardware": one.synchronous.candidate.hardware, "pays": one.pays},
                "ratio": _interval(one.ratio),
                "synchronous": _told(one.synchronous, plan),
                "asynchronous": _told(one.asynchronous, plan),
                "says": verdict(one),
            }
            for one in plan.comparisons
        ],
        "sensitivity": _sensitivity(plan),
        "warnings": plan_warnings(plan),
    }


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
    if not plan.comparisons:
        console.print(_no_comparison(plan), highlight=False)
    if plan.sensitivity is not None:
        console.print()
        console.print(_sensitivity_table(plan))
    for line in plan_warnings(plan):
        console.print(f"note: {line}", style="yellow", highlight=False, markup=False)


def question_lines(plan: Plan) -> Iterator[str]:
    """What was asked, and what became of the candidates."""
    limits = plan.config.limits
    bounds = [
        text
        for value, text in (
            (limits.eta, f"eta <= {limits.eta:g}"),
            (limits.deadline_h, f"at most {limits.deadline_h:g} h"),
            (limits.budget_dollars, f"at most {limits.budget_dollars:,.0f} $"),
            (limits.gpus, f"at most {limits.gpus:g} GPUs"),
        )
        if math.isfinite(value)
    ]
    within = f" with {', '.join(bounds)}" if bounds else ""
    yield (
        f"{_SUMS[plan.config.objective]} for {plan.config.steps:,} steps of "
        f"{plan.config.base.model}{within}"
    )
    space = plan.space
    yield (
        f"{space.combinations:,} combinations: {space.merged:,} the same as another, "
        f"{len(space.over_limits):,} over the limits, {len(space.impossible):,} impossible, "
        f"{len(space.possible):,} possible"
    )
    for title, refusals in (("impossible", space.impossible), ("over", space.over_limits)):
        for row in _counted(refusals):
            yield f"  {row['count']:,} {title}, {row['kind']}; as: {row['example']}"
    yield (
        f"{plan.bounded:,} cannot win by a closed form; {len(plan.screened):,} simulated once, "
        f"{len(plan.outcomes):,} of them with {plan.config.search.seeds} seeds"
    )


def answer_lines(plan: Plan) -> Iterator[str]:
    """The answer in words; if there is none, what would be needed for one."""
    best, limits = plan.best, plan.config.limits
    name = _SUMS[plan.config.objective]
    if best is not None:
        candidate = best.candidate
        yield (
            f"{name}: {candidate.hardware} ({candidate.split}; {candidate.schedule}; micro-batches "
            f"of {candidate.config.trainer.micro_batch_tokens:,} tokens), {_hours(best)}, "
            f"{_money(best)}; {best.limit}"
        )
        if best.hours.high > limits.deadline_h and math.isfinite(best.hours.high):
            yield f"its interval reaches beyond the deadline of {limits.deadline_h:g} h"
        dollars = best.dollars
        if dollars and dollars.high > limits.budget_dollars and math.isfinite(dollars.high):
            yield f"its interval reaches beyond the budget of {limits.budget_dollars:,.0f} $"
        gentler = plan.gentler
        if gentler is not None:
            yield (
                f"with less staleness as good within 2 %: {gentler.candidate.split}; "
                f"{gentler.candidate.schedule}; {_hours(gentler)}"
            )
        return
    if not plan.space.possible:
        yield "no candidate is possible; the reasons are above"
        return
    fastest = min(plan.outcomes, key=lambda one: one.hours.mean)
    yield (
        f"no candidate keeps to the limits; the fastest is {fastest.candidate.hardware} "
        f"({fastest.candidate.split}; {fastest.candidate.schedule}) with {_hours(fastest)}"
    )
    priced = [one for one in plan.outcomes if one.dollars is not None]
    if priced and math.isfinite(limits.budget_dollars):
        cheapest = min(priced, key=lambda one: one.value("dollars"))
        yield (
            f"the cheapest is {cheapest.candidate.hardware} ({cheapest.candidate.split}; "
            f"{cheapest.candidate.schedule}) with {_money(cheapest)}, {_hours(cheapest)}"
        )
    yield "raise deadline, budget or limits.gpus, or add candidates"


def verdict(one: Comparison) -> str:
    """Whether asynchrony pays on these GPUs, plainly."""
    slow, fast, ratio = one.synchronous, one.asynchronous, one.ratio
    interval = ""
    if math.isfinite(ratio.low):
        interval = f" [{ratio.low:.3g}, {ratio.high:.3g}]"
    pair = (
        f"x{ratio.mean:.3g}{interval}: {_hours(slow)} synchronous ({slow.candidate.split}), "
        f"{_hours(fast)} {fast.candidate.schedule} ({fast.candidate.split})"
    )
    where = f"on {slow.candidate.hardware}"
    if one.pays:
        return f"asynchrony pays {where}, {pair}"
    why = "" if slow.limit == STALENESS_BOUND else f"; the synchronous run is {slow.limit}"
    return f"asynchrony does not help {where}, {pair}{why}"


def plan_warnings(plan: Plan) -> list[str]:
    """What a reader has to know."""
    found: list[str] = []
    types = sorted({one.config.cluster.gpu for one in plan.space.possible})
    for name in types:
        some = next(one for one in plan.space.possible if one.config.cluster.gpu == name)
        config = dataclasses.replace(some.config, seeds=plan.config.search.seeds)
        own = {find_gpu(entry.gpu).name for entry in plan.config.prices}
        for line in warnings(config):
            about_price = "price" in line
            if about_price and (name in own or config.cluster.price_per_gpu_h is not None):
                continue
            if about_price and find_gpu(name).price.typical is None:
                line = (  # noqa: PLW2901 - the same, with this file's way to mend it
                    f"{name}: nobody publishes a price, so money is unknown; give one as prices: "
                    f"[{{gpu: {name}, typical: 2.0}}] (dollars per GPU-hour)"
                )
            if line not in found:
                found.append(line)
    return found


def _no_comparison(plan: Plan) -> str:
    kinds = {one.stale for one in plan.space.possible}
    if kinds == {True}:
        return "no synchronous candidate to compare with: add 0 to candidates.eta"
    if kinds == {False}:
        return "no asynchronous candidate to compare with: add candidates.eta above 0"
    return "no cluster has both a synchronous and an asynchronous candidate to compare"


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
            quantity(_interval(one.hours)),
            "unknown" if one.dollars is None else quantity(_interval(one.dollars)),
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
    for one in plan.sensitivity.inputs:
        changes = [_change(plan, end) for end in (one.low, one.high)]
        best = {end.value: _best_then(plan, end) for end in (one.low, one.high)}
        told = (
            "stays"
            if set(best.values()) == {"stays"}
            else "; ".join(f"{value}: {text}" for value, text in best.items() if text != "stays")
        )
        table.add_row(one.name, f"{one.low.value} .. {one.high.value}", " .. ".join(changes), told)
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


def _told(one: Outcome, plan: Plan) -> dict[str, Any]:
    cheap, dear = one.hourly.low, one.hourly.high
    return {
        **_candidate(one),
        "hours": _interval(one.hours),
        "dollars": None if one.dollars is None else _interval(one.dollars),
        "dollars_at_low_price": None if cheap is None else cheap * one.hours.mean,
        "dollars_at_high_price": None if dear is None else dear * one.hours.mean,
        "gpu_hours": _interval(one.gpu_hours),
        "limit": one.limit,
        "engine_share": one.engine_share,
        "trainer_share": one.trainer_share,
        "within_limits": one.meets(plan.config.limits),
    }


def _candidate(one: Outcome) -> dict[str, Any]:
    """The settings that were varied, by their names in `areal-lab simulate`."""
    config = one.candidate.config
    told = {
        "cluster.gpu": config.cluster.gpu,
        "cluster.gpus": config.cluster.gpus,
        "cluster.placement": config.cluster.placement,
        "cluster.rollout_gpus": config.cluster.rollout_gpus,
        "cluster.rollout_gpu": config.cluster.rollout_gpu,
        "schedule.name": config.schedule.name,
        "schedule.eta": config.schedule.eta,
        "rollout.tensor_parallel": config.rollout.tensor_parallel,
        "trainer.tensor_parallel": config.trainer.tensor_parallel,
        "trainer.pipeline_parallel": config.trainer.pipeline_parallel,
        "trainer.micro_batch_tokens": config.trainer.micro_batch_tokens,
    }
    return {"settings": finite_json(told), "hardware": one.candidate.hardware}


def _counted(refusals: Sequence[Refusal]) -> list[dict[str, Any]]:
    """How often each kind, with its most frequent line."""
    kinds = Counter(one.kind for one in refusals)
    return [
        {
            "kind": kind,
            "count": count,
            "example": Counter(one.why for one in refusals if one.kind == kind).most_common(1)[0][
                0
            ],
        }
        for kind, count in kinds.most_common()
    ]


def _hours(one: Outcome) -> str:
    return quantity(_interval(one.hours), "h")


def _money(one: Outcome) -> str:
    if one.dollars is None:
        return f"money unknown ({quantity(_interval(one.gpu_hours))} GPU-hours)"
    text = quantity(_interval(one.dollars), "$")
    low, high = one.hourly.low, one.hourly.high
    if low is not None and high is not None and low < high:
        hours = one.hours.mean
        text += f" (at low and high prices {number(low * hours)} to {number(high * hours)})"
    return text


def _interval(value: Estimate) -> dict[str, float | None]:
    if not math.isfinite(value.low):
        return {"mean": value.mean, "low": None, "high": None}
    return {"mean": value.mean, "low": value.low, "high": value.high}
