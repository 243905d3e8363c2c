"""A schedule bounded by drift against fixed eta, and controls at eta 16. Not in the paper.

    python -m reproductions.bounded_drift             the cells of `PLAN`, seed by seed
    python -m reproductions.bounded_drift --full      all cells: 3 tasks x 3 rates x 17 arms

Runs that `sweeps/bounded_drift_*` hold are not repeated; after Ctrl-C the result is that of the
complete runs. A run takes some 15 CPU seconds, the plan with five seeds half a CPU hour, all cells
with five seeds three to four CPU hours.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from areal_lab.cli.sweep import cosim_command
from areal_lab.control.schedule import MAX_DRIFT
from areal_lab.sweep.grid import expand
from areal_lab.sweep.store import StoredCell, placed_cells
from areal_lab.sweep.study import Study, load_study, shown
from benchmarks.harness import Arguments
from reproductions.learning.bounded import (
    BOUNDED,
    CONTROLS,
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
    "it. Longer runs, other bounds and a third learning rate were not run.",
    "On sorting at 3e-4 the best eta is 0, and the bound still permits a lag with three times the "
    "drift of eta 0: a bound that is right for one task can be too high for another.",
    "The fixed eta on sorting are the runs of Table 2: the same settings and seeds, recorded by an "
    "earlier version. Its first measurement is repeated exactly, later ones differ, because "
    "rounding differs.",
    "Drift of the fixed eta on sorting is that of the whole runs of 150 or 200 steps.",
    "Each control has one strength, chosen beforehand and not tuned, and one learning rate. "
    "Several were coded from retellings of their papers (docs/functional/staleness.md).",
)


class Block(NamedTuple):
    """Cells of one study that run together: every arm at every rate."""

    task: str
    rates: tuple[str, ...]
    arms: tuple[str, ...]


PLAN: Final[tuple[Block, ...]] = (
    Block("sorting", ("1e-4", "3e-4"), (BOUNDED,)),
    Block("sorting", ("3e-4",), CONTROLS[:4]),
    Block("addition", ("3e-4",), ("eta 0", "eta 1", BOUNDED)),
)
"""What is run without `--full`; Table 2 has the fixed eta of sorting."""


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
    """Run the plan, or all cells, seed by seed, and read every complete run of the studies."""
    overrides: tuple[str, ...] = ()
    plan = PLAN
    if arguments.quick:
        overrides = tuple(quick(NAME))
        plan = (Block("sorting", ("3e-4",), ("eta 0", BOUNDED)),)
    elif arguments.own.full:
        plan = tuple(Block(task, _names(task, "rate"), _names(task, "arm")) for task in TASKS)
    try:
        for seed in range(1, arguments.repeats + 1):
            for block in plan:
                _run(block, seed, overrides)
    except SystemExit as stopped:
        if stopped.code != _INTERRUPTED:
            raise
        print("stopped: the result is that of the complete runs", file=sys.stderr)
    tasks = dict.fromkeys(block.task for block in plan)
    return {"tasks": {task: complete(_study(task, overrides)) for task in tasks}}


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
    """The complete runs of the whole grid of a study, with drift, lag and truncation by step."""
    command = cosim_command()
    cells = expand(study, command)
    found = []
    for cell, stored in zip(cells, placed_cells(study, command, cells), strict=True):
        if stored.status == "complete" and stored.run_folder:
            choice = {name: shown(value) for name, value in cell.choice.items()}
            run = run_of(stored.run_folder, choice, int(choice.pop("seed")))
            found.append({"run": run.to_json(), "steps": _steps(stored)})
    return found


_INTERRUPTED: Final = 130
_METRICS: Final = {
    "drift": "drift",
    "lag": "lag_token_mean",
    "truncated": "truncated_share",
    "weight_deviation": "weight_deviation",
}


def _steps(stored: StoredCell) -> Mapping[str, Sequence[float]]:
    """Metrics of every step; 0 where a batch without a gradient has none."""
    assert stored.run_folder is not None, "complete runs have folders"
    text = (stored.run_folder / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    return {
        name: [round(line.get(metric, 0.0), _DIGITS) for line in lines]
        for name, metric in _METRICS.items()
    }


def _study(task: str, overrides: Sequence[str] = ()) -> Study:
    return load_study(STUDIES / f"{NAME}_{task}.yaml", overrides)


def _names(task: str, axis: str) -> tuple[str, ...]:
    (found,) = (one for one in _study(task).axes if one.name == axis)
    return tuple(map(shown, found.values))


def _run(block: Block, seed: int, overrides: Sequence[str]) -> None:
    """Run the cells of a block that are not complete, one at a time."""
    groups = {axis.name: axis.groups or {} for axis in _study(block.task).axes}

    def grid(name: str, values: Sequence[str]) -> str:
        return f"grid.{name}={json.dumps({one: groups[name][one] for one in values})}"

    perform(
        f"{NAME}_{block.task}",
        [
            *overrides,
            grid("arm", block.arms),
            grid("rate", block.rates),
            f"grid.seed=[{seed}]",
            "workers=1",
        ],
    )


if __name__ == "__main__":
    main(reproduce, __doc__, seeds=SEEDS)
