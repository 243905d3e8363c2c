"""Answers of `bounded_drift`: the schedule against fixed eta, controls, the product, truncation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from areal_lab.control.drift import advise_on_lag
from areal_lab.control.schedule import MAX_DRIFT, SAFE_DRIFT
from areal_lab.plots.style import BLUE, GREY, VERMILION, finished, new_figure
from reproductions.learning.compare import BySeed, chosen, minus, written
from reproductions.learning.equal_hours import (
    BOUNDS_OF_DRIFT,
    AtHours,
    at_equal_hours,
    by_bound,
    by_eta,
    gain_of_bound,
    left_out,
    minus_at_hours,
    of_settings,
    shared_etas,
)
from reproductions.learning.runs import Data, Run
from reproductions.learning.setting import BOUNDS, OBJECTIVES, ORACLE, PRESET, settings_of
from reproductions.learning.staleness.cells import PREDICTORS, Cells, cells_of, counted
from reproductions.learning.staleness.cells import Cell as MapCell
from reproductions.learning.staleness.rule import Verdicts, best_threshold, verdicts
from reproductions.report.records import Row
from simulator.stats.statistics import Estimate, estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from areal_lab.plots.picture import Picture

BOUNDED: Final = "bounded drift"
CONTROLS: Final = (
    "rate by sample size (VCPO)",
    "shrinking clip (SAT)",
    "projected gradients (GAC)",
    "weight by age",
    "binary-KL mask (KPop)",
    "largest-KL mask (TRM)",
    "veto suffix (mu-GRPO)",
    "variance penalty (R2VPO)",
)
UNTRUNCATED: Final = "no loss on truncated"
STALE: Final = "16"
"""Eta of the controls."""
_LIMIT: Final = 0.02
"""Loss of reward that counts, as for the rule of `where_staleness_hurts`."""
_SHOWN: Final = (ORACLE, "1", "4", STALE)
"""Values of eta with a row; the tables have all."""
_RECORDED: Final = "sorting"
"""The task whose fixed eta are those of Table 2."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One task and learning rate."""

    task: str
    rate: str
    bounded: BySeed
    fixed: Mapping[str, BySeed]
    """Runs by eta; of Table 2 for sorting."""

    @property
    def name(self) -> str:
        """`sorting, 3e-4`."""
        return f"{self.task}, {self.rate}"

    @property
    def at_hours(self) -> AtHours:
        """The fixed eta and the schedule, after the hours of the shortest run."""
        return at_equal_hours(self.name, {**self.fixed, BOUNDED: self.bounded})

    def minus(self, eta: str) -> Estimate:
        """Reward of the schedule minus that of an eta at equal hours, seed by seed."""
        return minus_at_hours(self.bounded, self.fixed[eta], self.at_hours.hours)

    @property
    def best(self) -> str:
        """The best fixed eta at equal hours, in hindsight."""
        return max(self.fixed, key=self.at_hours.mean)

    def regret(self, schedule: str) -> float:
        """Reward of the best fixed eta minus that of a schedule, at equal hours."""
        return self.at_hours.mean(self.best) - self.at_hours.mean(schedule)


@dataclass(frozen=True, slots=True)
class Evidence:
    """The runs of the study, and what was recorded before."""

    runs: Mapping[str, Sequence[Run]]
    """By task."""
    steps: Sequence[tuple[str, Run, Mapping[str, Sequence[float]]]]
    """Task, run and metrics of every step."""
    cells: Sequence[Cell]
    controls: AtHours | None
    """Controls at eta 16 on sorting at rate 3e-4, beside eta 0 and 16 of Table 2."""
    before: Mapping[int, float]
    """Held-out reward before training on sorting, by seed."""
    table_2: Mapping[str, Sequence[AtHours]]
    """Settings of Table 2 by objective."""
    mapped: Cells
    """Cells of the map of `where_staleness_hurts`."""
    other_seeds: Cells
    """Cells of Table 2 on addition, the task of the map."""
    tested: Cells
    """Cells on sorting, other settings and Table 2."""

    def of(self, task: str, arm: str, rate: str) -> BySeed:
        """The runs of a cell by seed."""
        return chosen(self.runs.get(task, ()), arm=arm, rate=rate)


def evidence_of(data: Data, table_2: Data, mapped: Data) -> Evidence:
    """Put the runs together with those of Table 2 and of the map.

    Args:
        data: as `bounded_drift.measure` gives it.
        table_2: data of the recorded Table 2.
        mapped: data of the recorded `where_staleness_hurts`.
    """
    steps = [
        (task, Run.from_json(one["run"]), one["steps"])
        for task, records in data["tasks"].items()
        for one in records
    ]
    runs = {task: [run for own, run, _ in steps if own == task] for task in data["tasks"]}
    small = [one for one in settings_of(table_2) if one.task in ("addition", "sorting")]
    old = [Run.from_json(record) for record in table_2["tasks"].get("sorting", ())]
    cells = []
    for task, own in runs.items():
        for rate in dict.fromkeys(run.choice["rate"] for run in own):
            bounded = chosen(own, arm=BOUNDED, rate=rate)
            fixed = {
                eta: chosen(old, staleness=eta, objective="decoupled", rate=rate)
                if task == _RECORDED
                else chosen(own, arm=f"eta {eta}", rate=rate)
                for eta in (ORACLE, *BOUNDS)
            }
            known = {eta: found for eta, found in fixed.items() if found}
            if bounded and ORACLE in known:
                cells.append(Cell(task, rate, bounded, known))
    return Evidence(
        runs=runs,
        steps=steps,
        cells=cells,
        controls=_controls(runs.get(_RECORDED, ()), old),
        before={run.seed: run.before for run in old},
        table_2={one: of_settings(small, one) for one in OBJECTIVES},
        mapped=cells_of(_read(mapped.get("map", ()))),
        other_seeds=cells_of(list(map(Run.from_json, table_2["tasks"].get("addition", ())))),
        tested=cells_of([*old, *_read(mapped.get("test", ()))]),
    )


def _controls(own: Sequence[Run], old: Sequence[Run]) -> AtHours | None:
    rate = "3e-4"
    fixed = {
        eta: chosen(old, staleness=eta, objective="decoupled", rate=rate) for eta in (ORACLE, STALE)
    }
    found = {name: chosen(own, arm=name, rate=rate) for name in CONTROLS}
    known = {name: runs for name, runs in found.items() if runs}
    if not known or not all(fixed.values()):
        return None
    return at_equal_hours(f"{_RECORDED}, {rate}", {**fixed, **known})


def _minus(own: AtHours, arm: str, other: str) -> Estimate:
    """Difference of the rewards of two arms, over the seeds that both have."""
    ours, theirs = own.reward[arm], own.reward[other]
    return estimate([ours[seed] - theirs[seed] for seed in ours if seed in theirs])


def _read(records: Sequence[Mapping[str, Any]]) -> list[Run]:
    missing = {"curve": (), "training": (), "hours": 0.0}
    return [Run.from_json({**missing, **record}) for record in records]


def claim(found: Evidence) -> str:
    """One bound on drift for every setting, against one eta for every setting."""
    own = found.table_2["decoupled"]
    best = min(shared_etas(own), key=lambda eta: by_eta(own, eta).regret)
    gain = gain_of_bound(own, MAX_DRIFT, best)
    return (
        "Run as asynchronously as the drift allows. On recorded runs, one drift bound of "
        f"{MAX_DRIFT:g} for all settings gains {_between(gain)} of reward at equal hours over the "
        f"best single eta ({best}, chosen in hindsight). {_schedule_claim(found)}Not in the paper."
    )


def _schedule_claim(found: Evidence) -> str:
    if not found.cells:
        return ""
    losses = [cell.minus(cell.best) for cell in found.cells]
    below = sum(one.high < 0 for one in losses)
    above = sum(one.low > 0 for one in losses)
    return (
        "The schedule that sets eta in the run is "
        f"{fmean(cell.regret(BOUNDED) for cell in found.cells):.3f} below the best eta of each of "
        f"{counted(len(losses), 'cell')} of short runs: below it in {below}, above it in {above}, "
        f"not told apart in {len(losses) - below - above}. "
    )


def rows(found: Evidence) -> list[Row]:
    """The schedule minus each fixed eta, and each control minus no control."""
    own = [
        Row(
            name=f"{cell.name}: bounded drift minus eta {eta}",
            paper=None,
            ours=cell.minus(eta),
            unit="reward at equal hours",
        )
        for cell in found.cells
        for eta in cell.fixed
        if eta in _SHOWN
    ]
    stale = found.controls
    if stale is None:
        return own
    return own + [
        Row(
            name=f"sorting, 3e-4, eta {STALE}: {name} minus none",
            paper=None,
            ours=_minus(stale, name, STALE),
            unit="reward at equal hours",
        )
        for name in stale.etas
        if name in CONTROLS
    ]


def findings(found: Evidence) -> list[str]:
    """Answers to the five questions, from the numbers; with what was not run."""
    return [
        *one_bound(found),
        *schedule(found),
        *hours(found),
        *controls(found),
        *product(found),
        *practice(found),
        *truncation(found),
        *within(found),
        *extent(found),
    ]


def one_bound(found: Evidence) -> Iterator[str]:
    """A bound against one eta, on the recorded runs of Table 2."""
    for objective, own in found.table_2.items():
        if len(own) < 2:
            continue
        eta = min(shared_etas(own), key=lambda one: by_eta(own, one).regret)
        bound = min(BOUNDS_OF_DRIFT, key=lambda one: by_bound(own, one).regret)
        ours, theirs, best = by_bound(own, MAX_DRIFT), by_eta(own, eta), by_bound(own, bound)
        out = left_out(own)
        yield (
            f"Table 2, {objective}, {len(own)} settings: with the largest eta whose drift is at "
            f"most {MAX_DRIFT:g} ({', '.join(ours.chosen)}) the reward at equal hours is on "
            f"average {ours.regret:.3f} below that of the best eta of each setting (worst "
            f"{ours.worst:.3f}); with eta {eta} for all, the best single one, {theirs.regret:.3f} "
            f"({theirs.worst:.3f}). Difference {_between(gain_of_bound(own, MAX_DRIFT, eta))}. The "
            f"best bound in hindsight is {bound:g} ({best.regret:.3f}). Chosen on the other "
            f"settings, each left out in turn, a bound loses {out[0]:.3f} and an eta {out[1]:.3f}."
        )


def schedule(found: Evidence) -> Iterator[str]:
    """(a) The schedule against the best fixed eta of every cell."""
    told = [
        f"{cell.name}: {written(cell.minus(cell.best), sign='+')} against eta {cell.best} "
        f"({_verdict(cell.minus(cell.best))}; {_seeds(cell.bounded, cell.fixed[cell.best])})"
        for cell in found.cells
    ]
    if told:
        yield (
            "(a) Reward of the schedule at equal hours, minus that of the best fixed eta of the "
            f"cell in hindsight, seed by seed: {'; '.join(told)}."
        )
    shared = [eta for eta in (ORACLE, *BOUNDS) if all(eta in cell.fixed for cell in found.cells)]
    if len(found.cells) > 1 and shared:
        losses = {
            eta: fmean(
                cell.at_hours.mean(cell.best) - cell.at_hours.mean(eta) for cell in found.cells
            )
            for eta in shared
        }
        ours = fmean(cell.regret(BOUNDED) for cell in found.cells)
        others = ", ".join(f"eta {eta} {loss:.3f}" for eta, loss in losses.items())
        yield (
            f"Over these {len(found.cells)} cells the schedule is {ours:.3f} below the best eta of "
            f"each; the same eta for all cells: {others}."
        )


def hours(found: Evidence) -> Iterator[str]:
    """(b) Hours to the reward of the synchronous run, against synchronous and eta 4."""
    told = []
    for cell in found.cells:
        target = cell.at_hours.mean(ORACLE)
        known = [one for one in (ORACLE, "4") if one in cell.fixed]
        parts = [_hours_over(cell, one, target) for one in known]
        reached = sum(math.isfinite(run.hours_to(target)) for run in cell.bounded.values())
        told.append(
            f"{cell.name}, reward {target:.3f}: {' and '.join(parts)}; {reached} of "
            f"{len(cell.bounded)} runs of the schedule reach it"
        )
    if told:
        yield (
            "(b) Hours of a fixed eta over those of the schedule, to the reward of the synchronous "
            "runs at equal hours; a run that does not get there counts with all of these hours, "
            "and an interval with 1 in it tells no difference: "
            f"{'. '.join(told)}."
        )


def _hours_over(cell: Cell, eta: str, target: float) -> str:
    others = cell.fixed[eta]
    limit = cell.at_hours.hours

    def until(run: Run) -> float:
        return max(min(limit, run.hours_to(target)), 1e-9)

    shared = [seed for seed in cell.bounded if seed in others]
    ratio = estimate([until(others[one]) / until(cell.bounded[one]) for one in shared])
    return f"{written(ratio)} against {'synchronous' if eta == ORACLE else f'eta {eta}'}"


def controls(found: Evidence) -> Iterator[str]:
    """(c) What survives eta 16."""
    own = found.controls
    if own is None:
        yield "(c) No control was run."
        return
    groups: dict[str, list[str]] = {"above": [], "below": [], "undecided": []}
    for name in own.etas:
        change = _gained(found, own, name)
        kind = "above" if change.low > 0 else "below" if change.high < 0 else "undecided"
        shown = {ORACLE: "eta 0", STALE: "no control"}.get(name, name)
        groups[kind].append(f"{shown} {written(change, sign='+')}")
    told = "; ".join(f"{kind}: {', '.join(names) or 'none'}" for kind, names in groups.items())
    least = min(len(own.reward[name]) for name in own.etas)
    missing = [name for name in CONTROLS if name not in own.etas]
    yield (
        f"(c) Controls at eta {STALE} on sorting at rate 3e-4, reward at equal hours minus that "
        f"before training ({counted(least, 'seed')} or more; by the interval): "
        f"{told}. Not run: {', '.join(missing) or 'none'}."
    )


def _gained(found: Evidence, own: AtHours, name: str) -> Estimate:
    return estimate([reward - found.before[seed] for seed, reward in own.reward[name].items()])


def product(found: Evidence) -> Iterator[str]:
    """(d) Does a bound on the product of learning rate and lag tell which cells lose?"""
    by_product = PREDICTORS["rate x minibatches x lag"]
    told = []
    for objective in OBJECTIVES:
        made, tests = (
            [cell for cell in cells.stale if cell.objective == objective]
            for cells in (found.mapped, found.tested)
        )
        scores = []
        for name, predictor in (("product", by_product), ("drift", PREDICTORS["drift"])):
            threshold = best_threshold(made, _LIMIT, predictor) if made else None
            if threshold is None or not tests:
                continue
            one = verdicts(tests, threshold, _LIMIT, predictor)
            scores.append(f"{name} {one.hits + one.silent} of {one.cells}")
        if scores:
            told.append(f"{objective}: {', '.join(scores)}")
    if told:
        yield (
            "(d) A threshold on learning rate x minibatches x lag, made from the map (addition), "
            f"against one on drift, both on cells of sorting: right about {'; '.join(told)}. The "
            "product was tested at rates from 3e-5 to 3e-4 and lags from 1 to about 40 versions."
        )


def practice(found: Evidence) -> Iterator[str]:
    """How often the rule for other people's logs is right, on cells it was not made from."""
    for objective, bound in SAFE_DRIFT.items():
        sets = {"Table 2, addition": found.other_seeds, "sorting": found.tested}
        scores = {name: advised(cells, objective, bound) for name, cells in sets.items()}
        known = {name: own for name, own in scores.items() if own.cells}
        if not known:
            continue
        total = sum(known.values(), start=Verdicts())
        told = [
            f"{name}: {own.hits} hits, {counted(own.misses, 'miss', 'es')}, "
            f"{counted(own.false_alarms, 'false alarm')}, {own.silent} rightly silent"
            for name, own in known.items()
        ]
        yield (
            f"Rule for the log of one eta (`advise_on_lag`, bound {bound:g}, {objective}): from "
            "drift and lag of one cell it says whether another eta of the same setting loses more "
            f"than {_LIMIT:g}. On {total.cells} pairs of cells that it was not made from it finds "
            f"{total.hits} of {total.losing} that lose, with "
            f"{counted(total.false_alarms, 'false alarm')} among "
            f"{total.cells - total.losing} that do not: balanced accuracy "
            f"{total.balanced_accuracy:.2f}, where the same answer for all has 0.5 "
            f"({'; '.join(told)})."
        )


def advised(cells: Cells, objective: str, max_drift: float) -> Verdicts:
    """What `advise_on_lag` says from each cell of every other cell of its setting."""
    settings: dict[tuple[str, int], list[MapCell]] = {}
    for cell in cells.stale:
        if cell.objective == objective and cell.setting[2] != PRESET:
            settings.setdefault((cell.setting[0], cell.minibatches), []).append(cell)
    total = Verdicts()
    for own in settings.values():
        for logged in own:
            advice = advise_on_lag(
                logged.drift, logged.lag, max_drift=max_drift, minibatches=logged.minibatches
            )
            others = [cell for cell in own if cell is not logged]
            total += verdicts(others, advice.permitted_lag, _LIMIT, PREDICTORS["lag"])
    return total


def truncation(found: Evidence) -> Iterator[str]:
    """(e) Does truncation drive the collapse?"""
    own = {
        arm: found.of("truncated", arm, "3e-4") for arm in ("eta 0", f"eta {STALE}", UNTRUNCATED)
    }
    if not all(own.values()):
        yield "(e) Whether truncation drives the collapse was not run."
        return
    stale = own[f"eta {STALE}"]
    loss = minus(stale, own["eta 0"])
    change = minus(own[UNTRUNCATED], stale)
    share = {
        arm: fmean(
            fmean(steps["truncated"][len(steps["truncated"]) // 2 :])
            for task, run, steps in found.steps
            if task == "truncated" and run.choice["arm"] == arm
        )
        for arm in ("eta 0", f"eta {STALE}")
    }
    yield (
        f"(e) Where lists of eight digits are cut off (rate 3e-4, {len(stale)} seeds) eta {STALE} "
        f"has {written(loss, sign='+')} against eta 0. Without loss on truncated responses it has "
        f"{written(change, sign='+')} against a loss on all ({_verdict(change)}). Truncated over "
        f"the last half: {share['eta 0']:.0%} of the responses at eta 0, "
        f"{share[f'eta {STALE}']:.0%} at eta {STALE}. This task cannot repeat the collapse of the "
        "public campaign, whose responses run to 16,384 tokens: here a model cannot make its "
        "responses much longer."
    )


def within(found: Evidence) -> Iterator[str]:
    """Share of steps in which drift was within the bound."""
    told = []
    for cell in found.cells:
        shares = {
            arm: _share_within(found, cell.task, arm, cell.rate)
            for arm in (BOUNDED, "eta 0", "eta 4", f"eta {STALE}")
        }
        known = [f"{arm} {share:.0%}" for arm, share in shares.items() if share is not None]
        told.append(f"{cell.name}: {', '.join(known)}")
    if told:
        yield f"Steps with a drift of at most {MAX_DRIFT:g}: {'; '.join(told)}."


def _share_within(found: Evidence, task: str, arm: str, rate: str) -> float | None:
    values = [
        value
        for own, run, steps in found.steps
        if (own, run.choice["arm"], run.choice["rate"]) == (task, arm, rate)
        for value in steps["drift"]
    ]
    return fmean(value <= MAX_DRIFT for value in values) if values else None


def extent(found: Evidence) -> Iterator[str]:
    """What was run, and what was not."""
    runs = [run for own in found.runs.values() for run in own]
    if not runs:
        return
    seeds = sorted({run.seed for run in runs})
    rates = sorted({run.choice["rate"] for run in runs}, key=float)
    cpu_h = sum(run.cpu_s for run in runs) / 3600
    yield (
        f"{len(runs)} runs of {runs[0].steps} steps, up to {len(seeds)} seeds a cell, rates "
        f"{', '.join(rates)}: {cpu_h:.2f} CPU hours. The whole grid has 153 cells (3 tasks, 3 "
        "rates, 17 arms); what the tables do not show was not run."
    )


def tables(found: Evidence) -> dict[str, list[dict[str, str]]]:
    """A table for each cell, and one of the controls."""
    result = {
        f"{cell.name}: after {cell.at_hours.hours:.2f} simulated hours": _table(cell)
        for cell in found.cells
    }
    if found.controls is not None:
        title = f"Controls at eta {STALE}: {found.controls.name}, after "
        result[f"{title}{found.controls.hours:.2f} simulated hours"] = _controls_table(found)
    return result


def _table(cell: Cell) -> list[dict[str, str]]:
    own = cell.at_hours
    return [
        {
            "schedule": BOUNDED if eta == BOUNDED else f"eta {eta}",
            "seeds": str(len(own.reward[eta])),
            "reward": written(estimate(list(own.reward[eta].values()))),
            "bounded drift minus this": ""
            if eta == BOUNDED
            else written(cell.minus(eta), sign="+"),
            "drift": f"{own.drift[eta]:.3f}",
            "steps an hour, eta 0 = 1": f"{own.speed[eta]:.2f}",
        }
        for eta in own.etas
    ]


def _controls_table(found: Evidence) -> list[dict[str, str]]:
    own = found.controls
    assert own is not None, "the caller has looked"
    return [
        {
            "control": {ORACLE: "eta 0", STALE: "none"}.get(name, name),
            "seeds": str(len(own.reward[name])),
            "reward": written(estimate(list(own.reward[name].values()))),
            "minus before": written(_gained(found, own, name), sign="+"),
            "minus none": "" if name == STALE else written(_minus(own, name, STALE), sign="+"),
            "drift": f"{own.drift[name]:.3f}",
        }
        for name in own.etas
    ]


def _seeds(own: BySeed, others: BySeed) -> str:
    count = sum(seed in others for seed in own)
    return counted(count, "seed")


def _verdict(found: Estimate) -> str:
    if found.low > 0:
        return "above"
    return "below" if found.high < 0 else "undecided"


def _between(found: Estimate) -> str:
    return f"{found.mean:+.3f} ({found.low:+.3f} to {found.high:+.3f})"


@finished
def draw(found: Evidence) -> Picture:
    """The schedule minus every fixed eta at equal hours, a panel for each task and rate."""
    cells = found.cells
    figure = new_figure(9, 3.2)
    panels = figure.subplots(1, max(1, len(cells)), sharey=True, squeeze=False)[0]
    for axes, cell in zip(panels, cells, strict=False):
        _draw_cell(axes, cell)
    panels[0].set_ylabel("reward, schedule minus eta")
    return figure


def _draw_cell(axes: Axes, cell: Cell) -> None:
    axes.axhline(0, color=GREY, linewidth=1)
    for place, eta in enumerate(cell.fixed):
        own = cell.minus(eta)
        color = BLUE if own.low > 0 else VERMILION if own.high < 0 else GREY
        width = 0.0 if math.isinf(own.half_width) else own.half_width
        axes.errorbar(place, own.mean, yerr=width, fmt="o", color=color, capsize=3)
    axes.set_xticks(range(len(cell.fixed)), list(cell.fixed))
    axes.set(xlabel="eta, versions", title=cell.name)
