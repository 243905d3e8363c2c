"""Answers of `bounded_drift`: the schedule against fixed eta, controls, the product, truncation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from areal_lab.control.drift import advise_on_lag
from areal_lab.control.schedule import MAX_DRIFT, SAFE_DRIFT
from areal_lab.plots.style import BLUE, GREY, VERMILION, finished, new_figure
from reproductions.learning.compare import BySeed, chosen, over, written
from reproductions.learning.equal_hours import (
    BOUNDS_OF_DRIFT,
    ETAS,
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
from reproductions.learning.setting import OBJECTIVES, ORACLE, PRESET, settings_of
from reproductions.learning.staleness.cells import PREDICTORS, Cells, cells_of, counted
from reproductions.learning.staleness.cells import Cell as MapCell
from reproductions.learning.staleness.rule import Verdicts, best_threshold, verdicts
from reproductions.report.records import Row
from simulator.stats.statistics import Estimate, estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from areal_lab.plots.picture import Picture

BOUNDED: Final = "bounded drift"
UNTRUNCATED: Final = "no loss on truncated"
CONTROLS: Final = (
    "rate by sample size (VCPO)",
    "shrinking clip (SAT)",
    "projected gradients (GAC)",
    "binary-KL mask (KPop)",
    "largest-KL mask (TRM)",
    "veto suffix (mu-GRPO)",
    "variance penalty (R2VPO)",
    "weight by age",
    UNTRUNCATED,
)
STALE: Final = "16"
"""Eta of the controls."""
_LIMIT: Final = 0.02
"""Loss of reward that counts, as for the rule of `where_staleness_hurts`."""
_SHOWN: Final = (ORACLE, "1", "4", STALE)
"""Values of eta with a row; the tables have all."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A run with what its log has of every step."""

    task: str
    run: Run
    drift: Sequence[float]
    """Of every step; 0 for a batch without a gradient."""
    truncated: float
    """Share of the responses over the last half of the steps."""

    @property
    def arm(self) -> str:
        """`eta 4`, the schedule or a control."""
        return self.run.choice["arm"]

    @property
    def cell(self) -> str:
        """`sorting, 3e-4`."""
        return f"{self.task}, {self.run.choice['rate']}"


@dataclass(frozen=True)
class Cell:
    """One task and learning rate: the runs of every arm, with eta 0 and the schedule."""

    task: str
    rate: str
    arms: Mapping[str, BySeed]
    """By eta (`4`), the schedule, and the controls."""

    @property
    def name(self) -> str:
        """`sorting, 3e-4`."""
        return f"{self.task}, {self.rate}"

    @property
    def fixed(self) -> list[str]:
        """The values of eta that were run."""
        return [eta for eta in ETAS if eta in self.arms]

    @cached_property
    def at_hours(self) -> AtHours:
        """All arms after the hours of the shortest run."""
        return at_equal_hours(self.name, self.arms)

    def minus(self, arm: str, other: str) -> Estimate:
        """Reward of an arm minus that of another one at equal hours, seed by seed."""
        return minus_at_hours(self.arms[arm], self.arms[other], self.at_hours.hours)

    def minus_before(self, arm: str) -> Estimate:
        """Reward of an arm at equal hours minus that before training, seed by seed."""
        before, reward = self.arms[arm], self.at_hours.reward[arm]
        return estimate([reward[seed] - run.before for seed, run in before.items()])

    @cached_property
    def best(self) -> str:
        """The best fixed eta at equal hours, in hindsight."""
        return max(self.fixed, key=self.at_hours.mean)

    @property
    def learns(self) -> bool:
        """True if synchronous training is above its start at equal hours."""
        return self.minus_before(ORACLE).mean > 0

    def regret(self, arm: str) -> float:
        """Reward of the best fixed eta minus that of an arm, at equal hours."""
        return self.at_hours.mean(self.best) - self.at_hours.mean(arm)


@dataclass(frozen=True, slots=True)
class Evidence:
    """The runs of the study, and what was recorded before."""

    runs: Sequence[Measured]
    cells: Sequence[Cell]
    table_2: Mapping[str, Sequence[AtHours]]
    """Settings of Table 2 by objective."""
    mapped: Cells
    """Cells of the map of `where_staleness_hurts`."""
    other_seeds: Cells
    """Cells of Table 2 on addition, the task of the map."""
    tested: Cells
    """Cells on sorting, other settings and Table 2."""

    def of(self, cell: Cell, arm: str) -> list[Measured]:
        """The runs of an arm of a cell."""
        return [one for one in self.runs if (one.cell, one.arm) == (cell.name, arm)]


def evidence_of(data: Data, table_2: Data, mapped: Data) -> Evidence:
    """Put the runs together with those of Table 2 and of the map.

    Args:
        data: as `bounded_drift.measure` gives it.
        table_2: data of the recorded Table 2.
        mapped: data of the recorded `where_staleness_hurts`.
    """
    runs = [
        Measured(task, Run.from_json(one["run"]), one["drift"], one["truncated"])
        for task, records in data["tasks"].items()
        for one in records
    ]
    small = [one for one in settings_of(table_2) if one.task in ("addition", "sorting")]
    old = [Run.from_json(record) for record in table_2["tasks"].get("sorting", ())]
    return Evidence(
        runs=runs,
        cells=list(_cells(runs)),
        table_2={one: of_settings(small, one) for one in OBJECTIVES},
        mapped=cells_of(_read(mapped.get("map", ()))),
        other_seeds=cells_of(list(map(Run.from_json, table_2["tasks"].get("addition", ())))),
        tested=cells_of([*old, *_read(mapped.get("test", ()))]),
    )


def _cells(runs: Sequence[Measured]) -> Iterator[Cell]:
    for task, rate in dict.fromkeys((one.task, one.run.choice["rate"]) for one in runs):
        own = [one.run for one in runs if one.task == task]
        names = {**{eta: f"eta {eta}" for eta in ETAS}, BOUNDED: BOUNDED}
        names |= {control: control for control in CONTROLS}
        found = {name: chosen(own, arm=arm, rate=rate) for name, arm in names.items()}
        arms = {name: by_seed for name, by_seed in found.items() if by_seed}
        if ORACLE in arms and BOUNDED in arms:
            yield Cell(task, rate, arms)


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
    losses = [cell.minus(BOUNDED, cell.best) for cell in found.cells]
    below = sum(one.high < 0 for one in losses)
    above = sum(one.low > 0 for one in losses)
    return (
        "The schedule that sets eta in the run is "
        f"{fmean(cell.regret(BOUNDED) for cell in found.cells):.3f} below the best eta of each of "
        f"{counted(len(losses), 'cell')} of short runs: below it in {below}, above it in {above}, "
        f"not told apart in {len(losses) - below - above}. "
    )


def rows(found: Evidence) -> list[Row]:
    """The schedule minus each fixed eta by cell, and each control minus none over all cells."""
    own = [
        Row(
            name=f"{cell.name}: bounded drift minus eta {eta}",
            paper=None,
            ours=cell.minus(BOUNDED, eta),
            unit="reward at equal hours",
        )
        for cell in found.cells
        for eta in cell.fixed
        if eta in _SHOWN
    ]
    return own + [
        Row(
            name=f"eta {STALE}, {counted(len(cells), 'cell')}: {name} minus none",
            paper=None,
            ours=over_cells(cells, name),
            unit="reward at equal hours",
        )
        for name, cells in controlled(found).items()
    ]


def controlled(found: Evidence) -> dict[str, list[Cell]]:
    """The cells by control that was run in them, beside the same eta without it."""
    cells = {
        name: [cell for cell in found.cells if {name, STALE} <= cell.arms.keys()]
        for name in CONTROLS
    }
    return {name: own for name, own in cells.items() if own}


def over_cells(cells: Sequence[Cell], control: str) -> Estimate:
    """A control minus none at equal hours: mean over cells, with the interval over cells."""
    return estimate([cell.minus(control, STALE).mean for cell in cells])


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
        f"{cell.name}: {written(change, sign='+')} against eta {cell.best} "
        f"({_verdict(change)}; {_seeds(cell.arms[BOUNDED], cell.arms[cell.best])})"
        for cell in found.cells
        for change in (cell.minus(BOUNDED, cell.best),)
    ]
    if told:
        yield (
            "(a) Reward of the schedule at equal hours, minus that of the best fixed eta of the "
            f"cell in hindsight, seed by seed: {'; '.join(told)}."
        )
    shared = [eta for eta in ETAS if all(eta in cell.arms for cell in found.cells)]
    if len(found.cells) > 1 and shared:
        losses = {eta: fmean(cell.regret(eta) for cell in found.cells) for eta in shared}
        ours = fmean(cell.regret(BOUNDED) for cell in found.cells)
        others = ", ".join(f"eta {eta} {loss:.3f}" for eta, loss in losses.items())
        worst = max(found.cells, key=lambda cell: cell.regret(BOUNDED))
        yield (
            f"Over these {len(found.cells)} cells the schedule is {ours:.3f} below the best eta of "
            f"each (worst: {worst.regret(BOUNDED):.3f}, {worst.name}); the same eta for all cells: "
            f"{others}."
        )


def hours(found: Evidence) -> Iterator[str]:
    """(b) Hours to the reward of the synchronous run, against synchronous and eta 4."""
    told = []
    learning = [cell for cell in found.cells if cell.learns]
    for eta in (ORACLE, "4"):
        ratios = [_hours_over(cell, eta) for cell in learning if eta in cell.arms]
        if ratios:
            faster = sum(one.low > 1 for one in ratios)
            slower = sum(one.high < 1 for one in ratios)
            told.append(
                f"{'synchronous' if eta == ORACLE else f'eta {eta}'}: "
                f"{fmean(one.mean for one in ratios):.2f} on average, above 1 in {faster}, below "
                f"1 in {slower} of {counted(len(ratios), 'cell')}"
            )
    if told:
        yield (
            "(b) Hours of a fixed eta over those of the schedule, to the reward of the synchronous "
            "runs at equal hours; a run that does not get there counts with all of these hours. "
            f"Against {'; against '.join(told)}. In {len(found.cells) - len(learning)} other cells "
            "synchronous training ends below its start, and there is no reward to reach."
        )


def _hours_over(cell: Cell, eta: str) -> Estimate:
    """Hours of a fixed eta over those of the schedule, seed by seed."""
    limit, target = cell.at_hours.hours, cell.at_hours.mean(ORACLE)

    def until(run: Run) -> float:
        # Not before its first measurement after the start, which noise can lift.
        return max(run.curve[1][1], min(limit, run.hours_to(target)))

    return over(cell.arms[eta], cell.arms[BOUNDED], lambda one, ours: until(one) / until(ours))


def controls(found: Evidence) -> Iterator[str]:
    """(c) What survives eta 16."""
    known = controlled(found)
    if not known:
        yield "(c) No control was run."
        return
    cells = max(known.values(), key=len)
    lossy = [cell for cell in cells if cell.minus(STALE, ORACLE).high < 0]
    yield (
        f"(c) Eta {STALE} without a control is below eta 0 at equal hours in "
        f"{counted(len(lossy), 'cell')} of {len(cells)} by the interval"
        f"{': ' if lossy else ''}{'; '.join(cell.name for cell in lossy)}, and above its own start "
        f"in {_learns(cells, STALE)}."
    )
    for name, own in sorted(known.items(), key=lambda one: -over_cells(one[1], one[0]).mean):
        changes = [cell.minus(name, STALE) for cell in own]
        yield (
            f"{name}, eta {STALE}: {_between(over_cells(own, name))} against none, mean of "
            f"{counted(len(own), 'cell')} (interval over cells); above none in "
            f"{sum(one.low > 0 for one in changes)}, below in "
            f"{sum(one.high < 0 for one in changes)}; above its own start in "
            f"{_learns(own, name)}; below eta 0 in "
            f"{sum(cell.minus(name, ORACLE).high < 0 for cell in own)}."
        )
    missing = [name for name in CONTROLS if name not in known]
    if missing:
        yield f"Not run: {', '.join(missing)}."


def _learns(cells: Sequence[Cell], arm: str) -> int:
    return sum(cell.minus_before(arm).low > 0 for cell in cells)


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
    cells = [
        cell
        for cell in found.cells
        if cell.task == "truncated" and {STALE, UNTRUNCATED} <= cell.arms.keys()
    ]
    if not cells:
        yield "(e) Whether truncation drives the collapse was not run."
        return
    told = []
    for cell in cells:
        change = cell.minus(UNTRUNCATED, STALE)
        share = {
            eta: fmean(one.truncated for one in found.of(cell, f"eta {eta}"))
            for eta in (ORACLE, STALE)
        }
        told.append(
            f"rate {cell.rate}: eta {STALE} has "
            f"{written(cell.minus(STALE, ORACLE), sign='+')} against eta 0, and without loss on "
            f"truncated responses {written(change, sign='+')} against a loss on all "
            f"({_verdict(change)}); truncated are {share[ORACLE]:.0%} of the responses at eta 0, "
            f"{share[STALE]:.0%} at eta {STALE}"
        )
    yield (
        f"(e) Where lists of eight digits are cut off, reward at equal hours: {'. '.join(told)}. "
        "This task cannot repeat the collapse of the public campaign, whose responses run to "
        "16,384 tokens: here a model cannot make its responses much longer."
    )


def within(found: Evidence) -> Iterator[str]:
    """Share of steps in which drift was within the bound."""
    told = []
    for cell in found.cells:
        shares = {
            arm: _share_within(found, cell, arm)
            for arm in (BOUNDED, "eta 0", "eta 4", f"eta {STALE}")
        }
        known = [f"{arm} {share:.0%}" for arm, share in shares.items() if share is not None]
        told.append(f"{cell.name}: {', '.join(known)}")
    if told:
        yield f"Steps with a drift of at most {MAX_DRIFT:g}: {'; '.join(told)}."


def _share_within(found: Evidence, cell: Cell, arm: str) -> float | None:
    values = [value for one in found.of(cell, arm) for value in one.drift]
    return fmean(value <= MAX_DRIFT for value in values) if values else None


def extent(found: Evidence) -> Iterator[str]:
    """What was run, and what was not."""
    if not found.runs:
        return
    runs = [one.run for one in found.runs]
    per_arm = Counter((one.cell, one.arm) for one in found.runs)
    least, most = min(per_arm.values()), max(per_arm.values())
    seeds = counted(most, "seed") if least == most else f"{least} to {most} seeds"
    cpu_h = sum(run.cpu_s for run in runs) / 3600
    yield (
        f"{len(runs)} runs of {runs[0].steps} steps, {seeds} for each of {len(per_arm)} of "
        f"the 153 arms of the grid (3 tasks, 3 rates, 17 schedules and controls): {cpu_h:.2f} CPU "
        "hours. What the tables do not show was not run."
    )


def tables(found: Evidence) -> dict[str, list[dict[str, str]]]:
    """A table of all cells, and one for each."""
    if not found.cells:
        return {}
    return {"The schedule in every cell": [_summary(found, cell) for cell in found.cells]} | {
        f"{cell.name}: after {cell.at_hours.hours:.2f} simulated hours": _table(cell)
        for cell in found.cells
    }


def _summary(found: Evidence, cell: Cell) -> dict[str, str]:
    shares = {arm: _share_within(found, cell, arm) for arm in (BOUNDED, "eta 4")}
    over_eta = {
        eta: written(_hours_over(cell, eta)) if cell.learns and eta in cell.arms else ""
        for eta in (ORACLE, "4")
    }
    target = cell.at_hours.mean(ORACLE)
    reached = sum(math.isfinite(run.hours_to(target)) for run in cell.arms[BOUNDED].values())
    return {
        "task, rate": cell.name,
        "best eta": cell.best,
        "schedule minus it": written(cell.minus(BOUNDED, cell.best), sign="+"),
        "hours of eta 0 over its": over_eta[ORACLE],
        "hours of eta 4 over its": over_eta["4"],
        "runs that get there": f"{reached} of {len(cell.arms[BOUNDED])}" if cell.learns else "",
        **{
            f"steps within, {arm}": "" if share is None else f"{share:.0%}"
            for arm, share in shares.items()
        },
    }


def _table(cell: Cell) -> list[dict[str, str]]:
    own = cell.at_hours
    return [
        {
            "arm": f"eta {arm}" if arm in cell.fixed else arm,
            "seeds": str(len(own.reward[arm])),
            "reward": written(estimate(list(own.reward[arm].values()))),
            "minus before": written(cell.minus_before(arm), sign="+"),
            f"minus eta {STALE}": ""
            if arm == STALE or STALE not in cell.arms
            else written(cell.minus(arm, STALE), sign="+"),
            "drift": f"{own.drift[arm]:.3f}",
            "steps an hour, eta 0 = 1": f"{own.speed[arm]:.2f}",
        }
        for arm in own.etas
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
    """The schedule minus every fixed eta at equal hours, a row for each task."""
    tasks = list(dict.fromkeys(cell.task for cell in found.cells)) or [""]
    rates = sorted({cell.rate for cell in found.cells}, key=float) or [""]
    figure = new_figure(9, 0.6 + 2.3 * len(tasks))
    panels = figure.subplots(len(tasks), len(rates), sharex=True, sharey="row", squeeze=False)
    for cell in found.cells:
        _draw_cell(panels[tasks.index(cell.task)][rates.index(cell.rate)], cell)
    for axes in panels[:, 0]:
        axes.set_ylabel("schedule minus eta")
    for axes in panels[-1]:
        axes.set_xlabel("eta, versions")
    return figure


def _draw_cell(axes: Axes, cell: Cell) -> None:
    axes.axhline(0, color=GREY, linewidth=1)
    for place, eta in enumerate(cell.fixed):
        own = cell.minus(BOUNDED, eta)
        color = BLUE if own.low > 0 else VERMILION if own.high < 0 else GREY
        width = 0.0 if math.isinf(own.half_width) else own.half_width
        axes.errorbar(place, own.mean, yerr=width, fmt="o", color=color, capsize=3)
    axes.set_xticks(range(len(cell.fixed)), cell.fixed)
    axes.set_title(cell.name)
