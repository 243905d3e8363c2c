"""What the map says, in sentences that are made from its numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from statistics import fmean

from areal_lab.config.sections import AlarmsConfig
from reproductions.learning.setting import OBJECTIVES
from reproductions.learning.staleness.cells import PREDICTORS, Cell, counted, noise
from reproductions.learning.staleness.evidence import LIMITS, Evidence, of
from reproductions.learning.staleness.levers import levers
from reproductions.learning.staleness.rule import correlation_with_loss

GROWING, CONSTANT = "inf", "8"
"""Values of eta that are compared: without a bound lag grows from step to step."""


def findings(evidence: Evidence) -> list[str]:
    """All sentences; without those for which there are no cells."""
    if not evidence.made_from.stale:
        return ["No stale run has a synchronous partner yet."]
    return [
        *where(evidence),
        *predictors(evidence),
        *rule(evidence),
        *elsewhere(evidence),
        *alarm(evidence),
        *without_staleness(evidence),
        *growing(evidence),
        *levers(evidence),
        *uncertainty(evidence),
    ]


def claim(evidence: Evidence) -> str:
    """The rule of thumb."""
    limit = LIMITS[0]
    found = [
        f"{evidence.thresholds[objective, limit]:g} ({objective})"
        for objective in OBJECTIVES
        if (objective, limit) in evidence.thresholds
    ]
    if not found:
        return "Where staleness hurts; the cells are too few for a rule. Not in the paper."
    return (
        "Staleness hurts where the policy moves far while a sample waits. Rule of thumb: with "
        f"drift (mean |log pi_theta - log pi_behav|) above {' or '.join(found)}, lower eta, the "
        "learning rate or the number of minibatches. Not in the paper."
    )


def where(evidence: Evidence) -> Iterator[str]:
    """Which cells lose, by learning rate."""
    for objective in OBJECTIVES:
        cells = sorted(of(evidence.made_from.stale, objective), key=lambda cell: cell.rate)
        if not cells:
            continue
        by_rate = [
            f"{_losing(list(own), LIMITS[0])} at rate {rate}"
            for rate, own in groupby(cells, key=lambda cell: cell.setting[0])
        ]
        worst = max(cells, key=lambda cell: cell.loss)
        yield (
            f"{objective}: {_losing(cells, LIMITS[0])} stale cells of the map lose more than "
            f"{LIMITS[0]:g} of held-out reward ({', '.join(by_rate)}). The worst "
            f"({_place(worst)}) loses {worst.loss:.3f}, where the synchronous run gained "
            f"{worst.gain:.3f}."
        )


def predictors(evidence: Evidence) -> Iterator[str]:
    """How well each predictor ranks the losses of the map."""
    for objective in OBJECTIVES:
        cells = of(evidence.made_from.stale, objective)
        found = {name: correlation_with_loss(cells, one) for name, one in PREDICTORS.items()}
        known = [(name, one) for name, one in found.items() if not math.isnan(one.mean)]
        if not known:
            continue
        ranked = sorted(known, key=lambda one: -one[1].mean)
        told = [f"{name} {one.mean:.2f} ({one.low:.2f} to {one.high:.2f})" for name, one in ranked]
        yield (
            f"{objective}: rank correlation with the loss on the map, with 95 % intervals over "
            f"cells: {', '.join(told)}."
        )


def rule(evidence: Evidence) -> Iterator[str]:
    """The thresholds, and how they do on their own cells."""
    for limit in LIMITS:
        told = []
        for objective in OBJECTIVES:
            threshold = evidence.thresholds.get((objective, limit))
            if threshold is None:
                continue
            own = evidence.scored(evidence.made_from.stale, objective, limit)
            told.append(
                f"drift above {threshold:g} with the {objective} objective ({own.hits} of "
                f"{own.losing} losing cells are above it, {own.silent} of "
                f"{own.false_alarms + own.silent} others are not)"
            )
        if told:
            yield (
                f"Rule made from the map: more than {limit:g} of held-out reward is lost at "
                f"{' and at '.join(told)}."
            )


def elsewhere(evidence: Evidence) -> Iterator[str]:
    """How the rule does on cells that it was not made from."""
    for limit in LIMITS:
        found = [evidence.scored(evidence.tested, objective, limit) for objective in OBJECTIVES]
        total = found[0] + found[1]
        if not total.cells:
            continue
        each = "; ".join(
            f"{objective}: {counted(one.hits, 'hit')}, {counted(one.misses, 'miss', 'es')}, "
            f"{counted(one.false_alarms, 'false alarm')}, {one.silent} rightly silent"
            for objective, one in zip(OBJECTIVES, found, strict=True)
        )
        yield (
            f"The rule for {limit:g} is right about {total.hits + total.silent} of {total.cells} "
            f"cells that it was not made from ({each})."
        )
        misses, alarms = evidence.wrong(evidence.tested, limit)
        told = [
            f"The worst {kind} is {cells[0].name} ({evidence.set_of(cells[0])}): drift "
            f"{cells[0].drift:.3f}, loss {cells[0].loss:.3f}{_plus_minus(cells[0].error)}."
            for kind, cells in (("miss", misses), ("false alarm", alarms))
            if cells
        ]
        wrong = misses + alarms
        if wrong and not any(math.isnan(cell.error) for cell in wrong):
            near = sum(abs(cell.loss - limit) < 2 * cell.error for cell in wrong)
            told.append(
                f"Of the {counted(len(wrong), 'wrong verdict')} for {limit:g}, {near} "
                f"{'is' if near == 1 else 'are'} within two standard errors of the limit."
            )
        if told:
            yield " ".join(told)


def alarm(evidence: Evidence) -> Iterator[str]:
    """What the alarm `drift` of a run tells of all stale cells, those of the map and the others."""
    bound = AlarmsConfig().drift
    cells = [one for one in (*evidence.made_from.stale, *evidence.tested) if one.gain > 0]
    above = [cell.loss > cell.gain / 2 for cell in cells if cell.drift > bound]
    below = [cell.loss > cell.gain / 2 for cell in cells if cell.drift <= bound]
    if above and below:
        yield (
            f"The alarm `drift` of a run has the bound {bound:g}: {sum(above)} of {len(above)} "
            "stale cells above it lose more than half of what the synchronous run gains, and "
            f"{sum(below)} of {len(below)} below it."
        )


def without_staleness(evidence: Evidence) -> Iterator[str]:
    """What drift is at eta 0, and whom the rule would blame there."""
    cells = evidence.made_from.synchronous
    by_minibatches = [
        f"{max(cell.drift for cell in own):.3f} with {counted(count, 'minibatch', 'es')}"
        for count in sorted({cell.minibatches for cell in cells})
        if (own := [cell for cell in cells if cell.minibatches == count])
    ]
    limit = LIMITS[0]
    blamed = [
        cell
        for cell in cells
        if cell.drift > evidence.thresholds.get((cell.objective, limit), math.inf)
    ]
    text = (
        "Drift is not zero at eta 0, because the minibatches of a step move the policy, too: at "
        f"most {', '.join(by_minibatches)}."
    )
    if blamed:
        names = ", ".join(
            f"{cell.name} (drift {cell.drift:.3f}, gained {cell.gain:+.3f})" for cell in blamed
        )
        text += (
            f" {len(blamed)} of {len(cells)} synchronous cells are above the threshold: {names}. "
            "Staleness is not to blame there, and there is no lower eta: compare with the drift of "
            "some steps at eta 0 before you lower eta."
        )
    else:
        text += f" None of {len(cells)} synchronous cells is above the threshold."
    yield text
    fallen = [cell for cell in cells if cell.gain < 0]
    if fallen:
        yield (
            f"{counted(len(fallen), 'synchronous cell')} {'ends' if len(fallen) == 1 else 'end'} "
            f"below {'its' if len(fallen) == 1 else 'their'} start: "
            f"{', '.join(cell.name for cell in fallen)}."
        )


def growing(evidence: Evidence) -> Iterator[str]:
    """Whether lag that grows drifts more and loses less than constant lag."""
    stale = {cell.setting: cell for cell in evidence.made_from.stale}
    for objective in OBJECTIVES:
        pairs = [
            (cell, stale[constant])
            for cell in of(evidence.made_from.stale, objective)
            if cell.setting[2] == GROWING
            and (constant := (*cell.setting[:2], CONSTANT, objective)) in stale
        ]
        if not pairs:
            continue
        more = [(one, other) for one, other in pairs if one.drift > other.drift]
        less = sum(one.loss < other.loss for one, other in more)
        change = fmean(one.loss - other.loss for one, other in pairs)
        yield (
            f"{objective}: lag that grows without a bound (eta {GROWING}, mean lag "
            f"{fmean(one.lag for one, _ in pairs):.0f}) drifts more than eta {CONSTANT} in "
            f"{len(more)} of {len(pairs)} settings, and loses less in {less} of these; over all of "
            f"them it loses {abs(change):.3f} {'less' if change < 0 else 'more'} on average."
        )


def uncertainty(evidence: Evidence) -> Iterator[str]:
    """How exact the losses are, and what was left out."""
    error = noise(evidence.made_from.stale)
    if not math.isnan(error):
        seeds = max(len(cell.losses) for cell in evidence.made_from.stale)
        text = (
            f"The loss of a cell of the map has a standard error of {error:.3f} (root mean square "
            f"over cells of {seeds} seeds)"
        )
        if not math.isnan(evidence.noise):
            text += (
                f"; at eta 0, where both objectives are the same, two runs with one seed differ by "
                f"{evidence.noise:.3f}, by rounding that grows"
            )
        yield text + "."
    if evidence.left_out:
        yield (
            f"{counted(evidence.left_out, 'stale run')} without a synchronous partner of the same "
            f"seed {'is' if evidence.left_out == 1 else 'are'} left out."
        )


def _losing(cells: Sequence[Cell], limit: float) -> str:
    return f"{sum(cell.loss > limit for cell in cells)} of {len(cells)}"


def _place(cell: Cell) -> str:
    return cell.name.removeprefix(f"{cell.objective}, ")


def _plus_minus(error: float) -> str:
    return "" if math.isnan(error) else f" ± {error:.3f}"
