"""A schedule bounded by drift against fixed eta, and controls at eta 16. Not in the paper.

    python -m reproductions.bounded_drift     3 tasks x 3 learning rates x 17 arms, seed by seed

Runs that `sweeps/bounded_drift_*` hold are not repeated; after Ctrl-C the result is that of the
complete runs. A run takes some 15 CPU seconds, all cells with five seeds three to four CPU hours.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from areal_lab.cli.sweep import cosim_command
from areal_lab.control.schedule import MAX_DRIFT
from areal_lab.sweep.grid import expand
from areal_lab.sweep.store import placed_cells
from areal_lab.sweep.study import Study, load_study, shown
from benchmarks.harness import Arguments
from reproductions.learning.bounded import (
    Evidence,
    claim,
    draw,
    evidence_of,
    findings,
    rows,
    tables,
)
from reproductions.learning.runs import STUDIES, Data, perform, quick, run_of
from reproductions.report.harness import main
from reproductions.report.records import Reproduction
from reproductions.report.results import load

NAME: Final = "bounded_drift"
SEEDS: Final = 5
TASKS: Final = ("sorting", "addition", "truncated")
_DIGITS: Final = 4
WHY: Final = (
    "Hours are those of the simulated cluster: 128 GPUs of the paper's 1.5B run, scaled to a batch "
    "of 512 responses. The synchronous step takes about twice as long there, so a schedule that "
    "stays close to eta 0 has half of the steps.",
    "The bound is the default of the schedule, 0.08 nats. It was made from the map of "
    "`where_staleness_hurts` (addition, other seeds), not from these runs.",
    "The schedule starts at eta 0 and raises eta in small steps; a run of 40 steps is short for "
    "it. Longer runs and other bounds were not run.",
    "The best eta of a cell is chosen in hindsight by the runs that are compared, so it is a "
    "little lucky.",
    "Each control has one strength, chosen beforehand and not tuned. Several were coded from "
    "retellings of their papers (docs/functional/staleness.md).",
)


def reproduce(arguments: Arguments) -> Reproduction:
    """Run what is missing; `--quick` runs two short cells."""
    return build(measure(arguments))


def recorded(_: Arguments) -> Reproduction:
    """The result that is packaged.

    Raises:
        ValueError: there is none.
    """
    saved = load(NAME)
    return build(saved.data, saved.origin)


def measure(arguments: Arguments) -> Data:
    """Run all cells, seed by seed, and read every complete run of the studies."""
    overrides = [*quick(NAME), *_QUICK] if arguments.quick else []
    tasks = TASKS[:1] if arguments.quick else TASKS
    try:
        for seed in range(1, arguments.repeats + 1):
            for task in tasks:
                perform(f"{NAME}_{task}", [*overrides, f"grid.seed=[{seed}]", "workers=1"])
    except SystemExit as stopped:
        if stopped.code != _INTERRUPTED:
            raise
        print("stopped: the result is that of the complete runs", file=sys.stderr)
    return {"tasks": {task: complete(study_of(task, overrides)) for task in tasks}}


def build(data: Data, origin: str = "") -> Reproduction:
    """The reproduction from its runs and those of Table 2."""
    found: Evidence = evidence_of(data, load("table_2").data, load("where_staleness_hurts").data)
    return Reproduction(
        name=NAME,
        claim=claim(found),
        rows=rows(found),
        parameters=(),
        why=WHY,
        findings=findings(found),
        tables=tables(found),
        figure=lambda: draw(found),
        title=f"Reward at equal hours: schedule with drift bound {MAX_DRIFT:g} minus fixed eta",
        data=data,
        origin=origin,
    )


def complete(study: Study) -> list[dict[str, Any]]:
    """The complete runs of the whole grid of a study, with drift by step and truncation."""
    command = cosim_command()
    cells = expand(study, command)
    found = []
    for cell, stored in zip(cells, placed_cells(study, command, cells), strict=True):
        if stored.status == "complete" and stored.run_folder:
            choice = {name: shown(value) for name, value in cell.choice.items()}
            run = run_of(stored.run_folder, choice, int(choice.pop("seed")))
            found.append({"run": run.to_json(), **_of_steps(stored.run_folder)})
    return found


_INTERRUPTED: Final = 130
_QUICK: Final = (
    'grid.arm={"eta 0": {"eta": 0}, "bounded drift": {"rollout.schedule": "bounded_drift", '
    '"eta": "inf"}}',
    'grid.rate={"3e-4": {"actor.optimizer.lr": 3e-4}}',
)


def _of_steps(folder: Path) -> dict[str, Any]:
    """Drift of every step, 0 for a batch without a gradient, and what was truncated."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    settled = lines[len(lines) // 2 :]
    return {
        "drift": [round(line.get("drift", 0.0), _DIGITS) for line in lines],
        "truncated": round(fmean(line["truncated_share"] for line in settled), _DIGITS),
    }


def study_of(task: str, overrides: Sequence[str] = ()) -> Study:
    """The study of a task."""
    return load_study(STUDIES / f"{NAME}_{task}.yaml", overrides)


if __name__ == "__main__":
    main(reproduce, __doc__, seeds=SEEDS)
