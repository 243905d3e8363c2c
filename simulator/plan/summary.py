"""Summary of a plan in lines of text: objective, recommendation, and whether asynchrony pays."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, Final

from areal_lab.config.problem import Kind
from simulator.assembly.build import lengths_of
from simulator.catalogue.gpu import find_gpu
from simulator.config.load import load_simulation
from simulator.config.schema import SimulationConfig
from simulator.costs.training_layout import GIB
from simulator.plan.result import (
    Comparison,
    End,
    Option,
    Outcome,
    Plan,
    memory_of,
    nodes_of,
    other_prices,
)
from simulator.plan.schema import PlanConfig
from simulator.plan.sensitivity import at_end, measure
from simulator.plan.space import Candidate, Refusal
from simulator.report.lags import NUMBERS, lag_span
from simulator.report.measured_errors import (
    PERCENT,
    gpus_of,
    kind_of,
    known_lines,
    never_compared,
    never_line,
)
from simulator.report.notes import STALENESS_BOUND
from simulator.report.to_json import price_warnings, warnings
from simulator.stats.format import number, span
from simulator.stats.statistics import Prediction

AIMS: Final = {"gpus": "fewest GPUs", "dollars": "lowest cost", "hours": "shortest time"}
"""Goal of the search, by objective."""


def question_lines(plan: Plan) -> Iterator[str]:
    """The objective with its limits, and the numbers of candidates."""
    limits = plan.config.limits
    bounds = [
        text
        for value, text in (
            (limits.eta, f"eta <= {limits.eta:g}"),
            (limits.deadline_h, f"at most {limits.deadline_h:g} h"),
            (limits.budget_dollars, f"at most ${limits.budget_dollars:,.0f}"),
            (limits.gpus, f"at most {limits.gpus:g} GPUs"),
        )
        if math.isfinite(value)
    ]
    within = f" with {', '.join(bounds)}" if bounds else ""
    yield (
        f"{AIMS[plan.config.objective]} for {plan.config.steps:,} steps of "
        f"{plan.config.base.model}{within}{ranked_by(plan)}"
    )
    yield workload_line(plan.config)
    space = plan.space
    yield (
        f"{space.combinations:,} combination{'s' if space.combinations > 1 else ''}: "
        f"{space.merged:,} duplicates, "
        f"{len(space.over_limits):,} over the limits, {len(space.impossible):,} impossible, "
        f"{len(space.possible):,} possible"
    )
    for title, refusals in (("impossible", space.impossible), ("over a limit", space.over_limits)):
        for row in counted(refusals):
            yield f"  {row['count']:,} {title} ({row['kind']}), e.g. {row['example']}"
    yield (
        f"{plan.bounded:,} excluded by their lower bound; {len(plan.screened):,} simulated once, "
        f"{len(plan.outcomes):,} of them with {plan.config.search.seeds} seeds"
    )
    if plan.stopped_in:
        left = len(plan.waiting)
        waits = f", with {left:,} candidate{'s' if left > 1 else ''} left" if left else ""
        yield f"stopped during {plan.stopped_in}{waits}"


def workload_line(config: PlanConfig) -> str:
    """The work of a step, with the source of each number."""
    base = config.base
    workload, lengths = base.workload, lengths_of(base, [])
    assert lengths is not None, "check_plan has refused what has no lengths"
    preset = load_simulation(config.simulation) if config.simulation else None

    def told(name: str, value: object) -> str:
        own, default = setting_of(base, name), setting_of(SimulationConfig(), name)
        if preset is not None and own == setting_of(preset, name) != default:
            return f"{value} ({config.simulation})"
        return f"{value} (default)" if own == default else str(value)

    parts = [
        told("workload.prompts_per_batch", f"{workload.prompts_per_batch:,} prompts"),
        told("workload.samples_per_prompt", f"{workload.samples_per_prompt:,} responses each"),
        told("workload.prompt_tokens", f"prompts of {workload.prompt_tokens:,} tokens"),
        told("workload.answers", f"responses of {lengths.mean_tokens():,.0f} tokens on average")
        if workload.answers.kind in ("trace", "recorded")
        else told(
            "workload.answers.mean_tokens",
            f"responses of {lengths.mean_tokens():,.0f} tokens on average",
        ),
        told("workload.answers.max_tokens", f"at most {workload.answers.max_tokens:,}"),
    ]
    if workload.most_turns > 1:
        parts.append(told("workload.turns", f"{workload.turns} turns"))
    return f"a step: {'; '.join(parts)}; change them as base.workload.*"


def setting_of(config: SimulationConfig, name: str) -> object:
    """Value of a dotted setting."""
    return attrgetter(name)(config)


def against(plan: Plan, one: Option) -> str:
    """How an option compares with the recommendation, by equal simulations, and what limits it."""
    if one.outcome is None:
        return f"not simulated: over {number(one.least_hours)} h in any layout, and so dominated"
    if plan.best is None:
        return one.outcome.limit
    if one.outcome.candidate is plan.best.candidate:
        return "the recommendation"
    parts = []
    best, other = plan.comparable_best(one.outcome), one.outcome
    for name, more, less in (("hours", "slower", "faster"), ("dollars", "dearer", "cheaper")):
        own, theirs = other.value(name), best.value(name)
        if math.isfinite(own) and math.isfinite(theirs) and theirs > 0:
            change = own / theirs - 1
            parts.append(f"{abs(change):.0%} {more if change > 0 else less}")
    if not other.meets(plan.config.limits):
        parts.append("over a limit")
    parts.append(other.limit)
    if partial := partial_nodes(other.candidate):
        parts.append(partial)
    return ", ".join(parts)


def partial_nodes(candidate: Candidate) -> str:
    """How many nodes the GPUs of a candidate are, if the last one is not used whole; else ""."""
    return " and ".join(
        f"{number(nodes)} nodes of {gpu.node_gpus} {name}"
        for name, (gpu, nodes) in nodes_of(candidate).items()
        if abs(nodes - round(nodes)) > 1e-9
    )


def ranked_by(plan: Plan) -> str:
    """Order of candidates, if not by their means; begins with a comma."""
    if plan.config.rank_by == "mean":
        return ""
    return f", ranked by the pessimistic end of the {PERCENT} interval"


def model_error_lines(plan: Plan) -> Iterator[str]:
    """Errors of predictions like the recommendation, and of gains, on measured runs."""
    shown = plan.best or next(iter(plan.front), None)
    if shown is None:
        return
    yield from known_lines("step", shown.known.step)
    if plan.comparisons:
        # The fits are those of the steps, which are told.
        yield known_lines("gain", plan.comparisons[0].asynchronous.known.gain)[0]
    configs = [one.config for one in plan.space.possible]
    gpus = dict.fromkeys(gpu for config in configs for gpu in gpus_of(config))
    yield from never_line(never_compared(map(kind_of, configs), gpus, plan.errors))


def recommendation_lines(plan: Plan) -> Iterator[str]:
    """The recommendation in words; if there is none, the limits to raise."""
    best, limits = plan.best, plan.config.limits
    so_far = "" if plan.settled else "so far, "
    name = f"{so_far}{AIMS[plan.config.objective]}"
    if best is not None:
        candidate = best.candidate
        yield (
            f"{name}: {candidate.hardware} ({candidate.split}; {candidate.schedule}; micro-batches "
            f"of {candidate.config.trainer.micro_batch_tokens:,} tokens), {answer(best)}; "
            f"bottleneck: {best.limit}"
        )
        dollars = best.predicted_dollars
        over = []
        if best.predicted_hours.high > limits.deadline_h:
            over.append(f"the deadline of {limits.deadline_h:g} h")
        if dollars and dollars.high > limits.budget_dollars:
            over.append(f"the budget of ${limits.budget_dollars:,.0f}")
        if over:
            yield (
                f"its {PERCENT} interval exceeds {' and '.join(over)}; with rank_by=pessimistic "
                "only candidates whose high ends are within the limits are recommended"
            )
        if partial := partial_nodes(candidate):
            yield f"{candidate.hardware}: {partial}; the cost is that of these GPUs alone"
        if best.candidate.stale:
            yield staleness_line(best)
        yield from _other_price_lines(plan, best)
        yield from _memory_lines(candidate)
        gentler = plan.gentler
        if gentler is not None:
            yield (
                f"within 2 % of it, with less staleness: {gentler.candidate.split}; "
                f"{gentler.candidate.schedule}; {hours(gentler)}"
            )
        return
    if not plan.space.possible:
        yield "no candidate is possible, for the reasons above"
        return
    if not plan.screened:
        yield "no candidate is simulated yet"
        return
    known = plan.outcomes or plan.screened
    fastest = min(known, key=lambda one: one.hours.mean)
    yield (
        f"{so_far}no candidate is within the limits; the fastest is {fastest.candidate.hardware} "
        f"({fastest.candidate.split}; {fastest.candidate.schedule}) with {answer(fastest)}"
    )
    priced = [one for one in known if one.dollars is not None]
    if priced and math.isfinite(limits.budget_dollars):
        cheapest = min(priced, key=lambda one: one.value("dollars"))
        yield (
            f"the cheapest is {cheapest.candidate.hardware} ({cheapest.candidate.split}; "
            f"{cheapest.candidate.schedule}) with {answer(cheapest)}"
        )
    yield "raise deadline, budget or limits.gpus, or add candidates"


def best_so_far(plan: Plan) -> str:
    """The best candidate so far in a few words, after a comma; empty without one."""
    best = plan.best
    if best is None:
        return ""
    dollars = "" if best.dollars is None else f", ${number(best.dollars.mean)}"
    return f", best {best.candidate.hardware}, {number(best.hours.mean)} h{dollars}"


def staleness_line(one: Outcome) -> str:
    """Lags of an outcome in words, and what it throws away."""
    told = one.staleness
    line = (
        f"lag of first tokens: {told['head_mean']:.2f} versions in the mean "
        f"({told['before_queue_mean']:.2f} before the queue, {told['in_queue_mean']:.2f} in it), "
        f"{number(told['head_p95'])} at the 95th percentile ({number(told['before_queue_p95'])}, "
        f"{number(told['in_queue_p95'])})"
    )
    if lags := one.lags:
        mean, p95 = (lag_span(lags[name].range.low, lags[name].range.high) for name in NUMBERS)
        line += f"; {PERCENT} interval {mean}, of the percentile {p95}"
    thrown = told["thrown_away"]
    return f"{line}; {thrown:.0%} of the generated tokens are thrown away" if thrown else line


def _memory_lines(candidate: Candidate) -> Iterator[str]:
    for one in memory_of(candidate):
        parts = ", ".join(
            f"{name} {size / GIB:.1f}" for name, size in one.parts.items() if size >= 0.05 * GIB
        )
        yield (
            f"memory of a GPU in {one.side}: {one.free / GIB:.1f} of {one.available / GIB:.1f} GiB "
            f"free ({parts})"
        )


def _other_price_lines(plan: Plan, one: Outcome) -> Iterator[str]:
    for price in other_prices(one, plan.config.prices):
        text = f"at {price.name} prices: ${number(price.dollars)}"
        if price.interruptions_per_h:
            hours = one.hours.mean * price.factor
            text += (
                f" and {number(hours)} h as expected, {number(price.factor)} times as long, with "
                f"{number(price.interruptions_per_h * hours)} interruptions; each loses half of "
                f"{one.candidate.config.outside.checkpoint_steps} steps and a restart"
            )
        yield text


def sensitivity_lines(plan: Plan) -> Iterator[str]:
    """Say whether the recommendation stays with every input at either end of its error."""
    found = plan.sensitivity
    if found is None or not found.inputs:
        return
    own, name = found.base, measure(plan.config.objective)
    first = found.inputs[0]
    ends = [at_end(end, own) for end in (first.low, first.high)]
    told = " to ".join(
        "impossible" if one is None else with_unit(number(one.value(name)), name) for one in ends
    )
    yield (
        f"{first.name} matters most: {first.low.value} to {first.high.value} gives {told} "
        f"instead of {with_unit(number(own.value(name)), name)}"
    )
    changes = [
        f"{one.name} {end.value}: {_then(end)}"
        for one in found.inputs
        for end in (one.low, one.high)
        if end.best is None or end.best.candidate is not own.candidate
    ]
    so_far = "so far, " if plan.stopped_in else ""
    if changes:
        yield f"{so_far}the recommendation changes with {'; '.join(changes)}"
    else:
        count = len(found.inputs)
        yield (
            f"{so_far}the recommendation stays with each of {count} inputs at either end of its "
            "range"
        )


def _then(end: End) -> str:
    if end.best is None:
        return "no candidate is within the limits"
    candidate = end.best.candidate
    return f"{candidate.hardware} ({candidate.split}; {candidate.schedule})"


def nothing_possible(plan: Plan) -> str:
    """One line with the bounds that leave no candidate, those that exclude most first."""
    limits, space = plan.config.limits, plan.space
    every = {one.why for one in space.impossible}
    if len(every) == 1 and not space.over_limits:
        return (
            f"no candidate is possible, because: {every.pop()}; change it in base, or use other "
            "candidates"
        )
    reasons = [
        (row["count"], f"{row['kind']} = {getattr(limits, row['kind'].split('.')[1]):g}", row)
        for row in counted(space.over_limits)
    ]
    reasons += [(row["count"], row["kind"], row) for row in counted(space.impossible)]
    reasons.sort(key=lambda reason: -reason[0])
    lines = [f"{count:,} by {bound} (e.g. {row['example']})" for count, bound, row in reasons]
    fix = "relax a bound, or change candidates"
    if any(one.kind is Kind.SETTINGS for one in space.impossible):
        fix = "correct these settings in base, or change candidates"
    return f"no candidate is possible: {'; '.join(lines)}; {fix}"


def verdict(one: Comparison) -> str:
    """Return whether asynchrony pays on these GPUs, in one line."""
    slow, fast, ratio = one.synchronous, one.asynchronous, one.predicted_ratio
    pair = (
        f"x{ratio.value:.3g}{_around(ratio)}: {number(slow.hours.mean)} h "
        f"synchronous ({slow.candidate.split}), {number(fast.hours.mean)} h "
        f"{fast.candidate.schedule} ({fast.candidate.split})"
    )
    where = f"on {slow.candidate.hardware}"
    if one.pays:
        return f"asynchrony pays {where}, {pair}"
    if one.pays is None:
        told = f"whether asynchrony pays {where} is undecided, {pair}; the {PERCENT} interval"
        if one.needs_seeds:
            more = f"search.seeds={4 * len(slow.trials)}"
            return f"{told} contains 1, and so does that of the seeds alone: {more}"
        return f"{told} contains 1"
    why = "" if slow.limit == STALENESS_BOUND else f"; synchronous bottleneck: {slow.limit}"
    return f"asynchrony does not help {where}, {pair}{why}"


def plan_warnings(plan: Plan) -> list[str]:
    """Warnings about the candidates' inputs and prices."""
    found: list[str] = []
    types = sorted({one.config.cluster.gpu for one in plan.space.possible})
    for spelled in types:
        some = next(one for one in plan.space.possible if one.config.cluster.gpu == spelled)
        config = some.config.with_settings({"seeds": plan.config.search.seeds})
        found.extend(line for line in warnings(config, prices=False) if line not in found)
    clusters = [one.config.cluster for one in plan.space.possible]
    own = {find_gpu(entry.gpu).name for entry in plan.config.prices}
    if plan.config.base.cluster.price_per_gpu_h is None:
        for spelled in sorted({name for one in clusters for name in (one.gpu, one.rollout_gpu)}):
            if spelled and find_gpu(spelled).name not in own:
                fix = f"set prices: [{{gpu: {spelled}, typical: 2.0}}] (dollars per GPU-hour)"
                found.extend(price_warnings(find_gpu(spelled), fix))
    return found


def no_comparison(plan: Plan) -> str:
    """Reason for a missing comparison of synchronous and asynchronous candidates."""
    kinds = {one.stale for one in plan.space.possible}
    if kinds == {True}:
        return "no synchronous candidate to compare with: add 0 to candidates.eta"
    if kinds == {False}:
        return "no asynchronous candidate to compare with: add candidates.eta above 0"
    return "no cluster has both a synchronous and an asynchronous candidate to compare"


def answer(one: Outcome) -> str:
    """Hours and dollars, and their intervals, which are one factor."""
    duration, dollars = one.predicted_hours, one.predicted_dollars
    paid = (one.predicted_gpu_hours, "GPU-hours") if dollars is None else (dollars, "dollars")
    ends = " and ".join(
        with_unit(around, unit)
        for value, unit in ((duration, "hours"), paid)
        if (around := span({"low": value.low, "high": value.high}))
    )
    return "".join(
        (
            f"{with_unit(number(duration.value), 'hours')}, ",
            "money unknown, " if dollars is None else "",
            with_unit(number(paid[0].value), paid[1]),
            _at_prices(one),
            f"; {PERCENT} within a factor of {duration.factor:.2f}: {ends}" if ends else "",
        )
    )


def hours(one: Outcome) -> str:
    """Hours of the whole run, with the interval."""
    return predicted_text(one.predicted_hours, "hours")


def cost(one: Outcome) -> str:
    """Dollars of the whole run at typical prices, with the interval; GPU-hours without a price."""
    if one.predicted_dollars is None:
        return f"money unknown ({predicted_text(one.predicted_gpu_hours, 'GPU-hours')})"
    return predicted_text(one.predicted_dollars, "dollars")


def predicted_text(value: Prediction, unit: str) -> str:
    """A number with its interval, as in `76.1 h (42 to 138)`."""
    return f"{with_unit(number(value.value), unit)}{_around(value)}"


def with_unit(text: str, unit: str) -> str:
    """`76.1 h`, `$2,058`, or the unit behind the number."""
    return f"${text}" if unit == "dollars" else f"{text} {'h' if unit == 'hours' else unit}"


def _around(value: Prediction) -> str:
    around = span({"low": value.low, "high": value.high})
    return f" ({around})" if around else ""


def money(one: Outcome) -> str:
    """Dollars, with the range between low and high prices."""
    return f"{cost(one)}{_at_prices(one)}"


def _at_prices(one: Outcome) -> str:
    low, high, hours = one.hourly.low, one.hourly.high, one.hours.mean
    if low is None or high is None or low >= high:
        return ""
    return f" (at low and high prices ${number(low * hours)} to ${number(high * hours)})"


def counted(refusals: Sequence[Refusal]) -> list[dict[str, Any]]:
    """Refusals by kind, with the most frequent line of each."""
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
