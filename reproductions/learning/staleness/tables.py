"""Tables of the map, of what predicts the losses, and of the rule's test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from reproductions.learning.setting import OBJECTIVES, ORACLE
from reproductions.learning.staleness.cells import PREDICTORS, Cell, Setting
from reproductions.learning.staleness.evidence import LIMITS, Evidence, of
from reproductions.learning.staleness.rule import (
    Verdicts,
    best_threshold,
    correlation_with_loss,
    verdicts,
)
from reproductions.report.records import Row
from simulator.stats.statistics import Estimate

Table = list[dict[str, Any]]


def tables(evidence: Evidence) -> dict[str, Table]:
    """All of them, by title; without those that would be empty."""
    every = {
        "The map: held-out reward lost ± its standard error over seeds, and drift": table_of_map(
            evidence
        ),
        "Predictors on the map: rank correlation with the loss (95 % interval over cells), and "
        "balanced accuracy of the best threshold, then of the same threshold on all other "
        "cells": table_of_predictors(evidence),
        "The rule on the cells that it was made from, and on others": table_of_rule(evidence),
    }
    return {title: table for title, table in every.items() if table}


def headlines(evidence: Evidence) -> list[Row]:
    """The thresholds, how well drift ranks losses, and how often the rule is right elsewhere."""
    rows = []
    for (objective, limit), threshold in evidence.thresholds.items():
        name = f"{objective}: drift above which more than {limit:g} is lost"
        rows.append(_row(name, threshold, "drift", fitted=True))
    for objective in OBJECTIVES:
        cells = of(evidence.made_from.stale, objective)
        found = correlation_with_loss(cells, PREDICTORS["drift"])
        rows.append(
            Row(
                name=f"{objective}: rank correlation of drift and loss on the map",
                paper=None,
                ours=found,
                unit="",
            )
        )
        for limit in LIMITS:
            right = evidence.scored(evidence.tested, objective, limit).balanced_accuracy
            name = f"{objective}: balanced accuracy on other cells, limit {limit:g}"
            rows.append(_row(name, right, "share"))
    return [row for row in rows if not math.isnan(row.ours.mean)]


def table_of_map(evidence: Evidence) -> Table:
    """A line per learning rate, minibatches and objective, with a column per eta."""
    stale = {cell.setting: cell for cell in evidence.made_from.stale}
    etas = list(dict.fromkeys(staleness for _, _, staleness, _ in stale))
    synchronous = {cell.setting: cell for cell in evidence.made_from.synchronous}
    lines = dict.fromkeys((objective, rate, minis) for rate, minis, _, objective in stale)
    found = []
    for objective, rate, minibatches in sorted(lines, key=lambda one: OBJECTIVES.index(one[0])):
        own: Setting = (rate, minibatches, ORACLE, objective)
        line = {
            "objective": objective,
            "rate": rate,
            "minibatches": minibatches,
            "gained at eta 0": f"{synchronous[own].gain:+.3f}",
            "drift at eta 0": f"{synchronous[own].drift:.3f}",
        }
        for eta in etas:
            cell = stale.get((rate, minibatches, eta, objective))
            line[f"eta {eta}"] = "" if cell is None else _lost(cell)
        found.append(line)
    return found


def table_of_predictors(evidence: Evidence) -> Table:
    """A line per objective and predictor."""
    found = []
    for objective in OBJECTIVES:
        cells, others = (
            of(every, objective) for every in (evidence.made_from.stale, evidence.tested)
        )
        for name, predictor in PREDICTORS.items():
            correlation = correlation_with_loss(cells, predictor)
            if math.isnan(correlation.mean):
                continue
            line = {
                "objective": objective,
                "predictor": name,
                "rank correlation": f"{correlation.mean:.2f} ({correlation.low:.2f} to "
                f"{correlation.high:.2f})",
            }
            for limit in LIMITS:
                threshold = best_threshold(cells, limit, predictor)
                right = (
                    [
                        verdicts(some, threshold, limit, predictor).balanced_accuracy
                        for some in (cells, others)
                    ]
                    if threshold is not None
                    else []
                )
                line[f"loss above {limit:g}"] = ", ".join(map(_share, right)) or "-"
            found.append(line)
    return found


def table_of_rule(evidence: Evidence) -> Table:
    """A line per limit, objective and set of cells; the map first."""
    sets: dict[str, Sequence[Cell]] = {
        "the map": evidence.made_from.stale,
        **{name: cells.stale for name, cells in evidence.tests.items() if cells.stale},
    }
    if len(sets) > 2:
        sets["all but the map"] = evidence.tested
    return [
        _scored(name, objective, limit, threshold, evidence.scored(cells, objective, limit))
        for (objective, limit), threshold in sorted(
            evidence.thresholds.items(), key=lambda one: (one[0][1], OBJECTIVES.index(one[0][0]))
        )
        for name, cells in sets.items()
    ]


def _scored(
    name: str, objective: str, limit: float, threshold: float, found: Verdicts
) -> dict[str, Any]:
    return {
        "rule": f"{objective}: drift above {threshold:g} loses more than {limit:g}",
        "cells": name,
        "number": found.cells,
        "hits": found.hits,
        "misses": found.misses,
        "false alarms": found.false_alarms,
        "rightly silent": found.silent,
        "balanced accuracy": _share(found.balanced_accuracy),
    }


def _lost(cell: Cell) -> str:
    error = "" if math.isnan(cell.error) else f" ± {cell.error:.3f}"
    share = "" if cell.share is None else f" ({cell.share:.0%})"
    return f"{cell.loss:+.3f}{error}{share}, drift {cell.drift:.3f}"


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def _row(name: str, value: float, unit: str, *, fitted: bool = False) -> Row:
    ours = Estimate(value, -math.inf, math.inf)
    return Row(name=name, paper=None, ours=ours, unit=unit, fitted=fitted)
