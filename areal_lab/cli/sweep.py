"""The `areal-lab sweep` command: check the whole grid, run incomplete cells, tabulate, draw.

study.yaml --cells--> stored results | cells to run --child processes--> cells.csv, figure
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from areal_lab.cli.outputs import FAILED, console_on, folder_to_write
from areal_lab.config.problem import ConfigError, Kind, Problem
from areal_lab.config.unknown import did_you_mean
from areal_lab.host.terminal import INTERRUPTED, printable
from areal_lab.runlog.records import finite_json
from areal_lab.sweep.command import Command
from areal_lab.sweep.grid import Cell, expand
from areal_lab.sweep.perform import Pace, Sweep, workers_for
from areal_lab.sweep.read import (
    Interval,
    RecordedSweep,
    read_sweep,
    write_cells,
    write_steps,
)
from areal_lab.sweep.store import StoredCell, only_sweep, placed_cells, write_study
from areal_lab.sweep.study import Study, load_study, parsed_baseline, shown

if TYPE_CHECKING:
    from rich.console import Console

_SHORT_S: Final = 10.0
"""Shorter runs are reported only at their end, if there is no bar."""
_FAILED_SHOWN: Final = 5
"""Maximum failed cells whose last lines are printed again at the end."""
_COMMAND_SHOWN: Final = 300
"""Maximum characters of a command that is printed again at the end."""


def train_command() -> Command:
    """`areal-lab train`."""
    from areal_lab.config.load import ALIASES, load_config
    from areal_lab.config.schema import TrainConfig
    from areal_lab.extras import require

    require("a sweep of `train`", "train")
    from areal_lab.resolve.resolved import check

    return Command(
        name="train",
        settings=TrainConfig,
        aliases=ALIASES,
        load=load_config,
        check=check,
        prints="run folder",
        placed=_run_below,
        needs=lambda _: None,
        alone=lambda config: (
            "rollout.addresses" * bool(config.rollout.addresses)
            or "rollout.port" * bool(config.rollout.port)
        ),
    )


def simulate_command() -> Command:
    """`areal-lab simulate`."""
    from simulator.assembly.simulate import fitted
    from simulator.config.load import ALIASES, load_simulation
    from simulator.config.schema import SimulationConfig

    return Command(
        name="simulate",
        settings=SimulationConfig,
        aliases=ALIASES,
        load=load_simulation,
        check=fitted,
        prints="json",
        options=("--json",),
        placed=lambda folder: {"name": folder.name or "cell"},
        needs=lambda config: config.seeds,
        shares_seeds=lambda config: config.seeds > 1,
        metric="tokens_per_s",
    )


def cosim_command() -> Command:
    """`areal-lab cosim`."""
    from areal_lab.extras import require

    require("a sweep of `cosim`", "train")
    from cosim.load import ALIASES, load_cosim, resolve_cosim
    from cosim.schema import CosimConfig

    return Command(
        name="cosim",
        settings=CosimConfig,
        aliases=ALIASES,
        load=load_cosim,
        check=resolve_cosim,
        prints="run folder",
        placed=_run_below,
    )


def _run_below(folder: Path) -> dict[str, Any]:
    """Settings that put the run folder of a cell into the cell's folder."""
    return {"run_dir": str(folder), "experiment_name": "run", "plots": False}


COMMANDS: Final[dict[str, Callable[[], Command]]] = {
    "train": train_command,
    "simulate": simulate_command,
    "cosim": cosim_command,
}
"""Commands that a study may name."""


def run_sweep(
    source: str, overrides: Sequence[str] = (), *, as_json: bool = False, dry_run: bool = False
) -> int:
    """Run the incomplete cells of a study; write and print the results.

    With `dry_run`, only check and list the cells. Returns the exit code: 0; 1 if a cell failed; 130
    after Ctrl-C.
    """
    study = load_study(source, overrides)
    command = _command(study)
    folder_to_write("folder", study.folder)
    notes = console_on(sys.stderr)
    cells = expand(study, command)
    placed = placed_cells(study, command, cells)
    todo = _in_order(study, [pair for pair in zip(cells, placed, strict=True) if _open(pair[1])])
    workers = min(workers_for(command, cells, study.config.workers), max(1, len(todo)))
    _print_plan(notes, study, placed, len(todo), workers)
    if dry_run:
        for cell, one in zip(cells, placed, strict=True):
            print(f"{_shown_status(one)}  {cell.label}")
        return 0
    with only_sweep(study.folder):
        write_study(study, command, cells, placed)
        pace = Pace(workers, len(todo), [one.wall_s for one in placed if not _open(one)], {})
        sweep = Sweep(command, todo, pace)
        try:
            with _display(notes, len(cells), len(todo), pace, command) as display:
                asyncio.run(sweep.perform(display))
        except asyncio.CancelledError:
            notes.print("stopped at once, as requested", style="red")
        recorded = read_sweep(study.folder)
        _report(recorded, study, notes, as_json=as_json)
    return _exit_code(recorded, sweep, notes, source, overrides)


def _command(study: Study) -> Command:
    name = study.config.command
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS)
        message = f"command is {name!r}, but a sweep runs others; {hint}"
        raise ConfigError(*study.problems, Problem(Kind.SETTINGS, "command", message))
    return COMMANDS[name]()


def _open(stored: StoredCell) -> bool:
    """Return whether a cell has to run."""
    return stored.status != "complete"


def _in_order(
    study: Study, pairs: Sequence[tuple[Cell, StoredCell]]
) -> list[tuple[Cell, StoredCell]]:
    """Repetitions are the outer loop: after a stop, all settings have about the same number of
    runs.
    """
    over = study.config.figure.over
    values = next((list(axis.values) for axis in study.axes if axis.name == over), [])

    def repetition(pair: tuple[Cell, StoredCell]) -> int:
        return values.index(pair[0].choice[over]) if values else 0

    return sorted(pairs, key=repetition)


def _print_plan(
    notes: Console, study: Study, placed: Sequence[StoredCell], todo: int, workers: int
) -> None:
    grid = " x ".join(
        f"{len(axis.values)} {axis.name}" for axis in study.axes if len(axis.values) > 1
    )
    failed = sum(one.status == "failed" for one in placed)
    said = [
        f"{len(placed) - todo} complete" * (todo < len(placed)),
        f"{todo} to run" * (todo > 0) + f" ({failed} failed before)" * (failed > 0),
        f"{workers} at a time" * (todo > 0),
    ]
    run = " ".join(filter(None, [study.config.command, study.config.config]))
    notes.print(
        f"{study.config.name}: {_count(len(placed), 'cell')}{f' ({grid})' if grid else ''} of "
        f"`{run}`; {', '.join(filter(None, said))}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _report(recorded: RecordedSweep, study: Study, notes: Console, *, as_json: bool) -> None:
    """Write the tables and the picture, and print the intervals."""
    written = [write_cells(recorded, recorded.folder / "cells.csv")]
    if study.config.steps_table:
        steps = write_steps(recorded, recorded.folder / "steps.csv")
        if steps:
            written.append(steps)
        elif any(row.complete for row in recorded.rows):
            notes.print("note: no steps.csv: the runs report no single steps", highlight=False)
    baseline = parsed_baseline(study) or None
    found: list[Interval] = []
    if any(row.complete for row in recorded.rows):
        try:
            found = recorded.intervals(baseline=baseline)
            from areal_lab.plots.style import save_picture
            from areal_lab.sweep.picture import draw_sweep

            picture = draw_sweep(recorded, baseline=baseline)
            written.append(save_picture(picture, recorded.folder / "figure.png"))
        except ValueError as error:
            notes.print(f"note: no figure.png: {error}", highlight=False)
    if as_json:
        print(json.dumps(_json(recorded, found), indent=2, allow_nan=False))
    elif found:
        _print_intervals(recorded, found)
    for path in written:
        notes.print(f"written: {path}", highlight=False, soft_wrap=True)
    if not as_json:
        print(recorded.folder)


def _json(recorded: RecordedSweep, found: Sequence[Interval]) -> dict[str, Any]:
    values = {
        "folder": str(recorded.folder),
        "metric": recorded.study["metric"],
        "cells": [
            {
                **row.choice,
                "status": row.stored.status,
                "folder": str(row.stored.folder),
                "error": row.stored.error,
                "figures": row.stored.figures,
            }
            for row in recorded.rows
        ],
        "intervals": [
            {
                **one.choice,
                "mean": one.value.mean,
                "ci95": one.value.ci95,
                "n": one.value.n,
                "difference": one.difference and one.difference.mean,
                "difference_ci95": one.difference and one.difference.ci95,
            }
            for one in found
        ],
    }
    return dict(finite_json(values))


def _print_intervals(recorded: RecordedSweep, found: Sequence[Interval]) -> None:
    from rich.table import Table

    baseline = recorded.study["figure"]["baseline"]
    over = recorded.study["figure"]["over"]
    table = Table(box=None, padding=(0, 3, 0, 0))
    for name in found[0].choice:
        table.add_column(name, justify="right")
    table.add_column(str(recorded.study["metric"]), justify="right")
    if over in recorded.axes:
        table.add_column(f"{over}s", justify="right")
    if any(one.difference for one in found):
        table.add_column(f"minus {baseline}", justify="right")
    for one in found:
        cells = [*map(shown, one.choice.values()), _interval(one.value.mean, one.value.ci95)]
        if over in recorded.axes:
            cells.append(str(one.value.n))
        if one.difference:
            cells.append(_interval(one.difference.mean, one.difference.ci95, sign="+"))
        table.add_row(*cells)
    console_on(sys.stdout).print(table, highlight=False)


def _interval(mean: float, ci95: float | None, sign: str = "") -> str:
    """Format a mean with as many digits as its interval supports."""
    if ci95 is None:
        return f"{mean:{sign}.4g}"
    digits = 0
    while digits < 6 and 0 < ci95 * 10**digits < 10:
        digits += 1
    return f"{mean:{sign}.{digits}f} +- {ci95:.{digits}f}"


def _exit_code(
    recorded: RecordedSweep,
    sweep: Sweep,
    notes: Console,
    source: str,
    overrides: Sequence[str],
) -> int:
    failed = [row for row in recorded.rows if row.stored.status == "failed"]
    for row in failed[:_FAILED_SHOWN]:
        told = printable(f"{row.label} failed: {row.stored.error}")
        notes.print(told, style="red", highlight=False, markup=False, soft_wrap=True)
        notes.print(f"folder: {row.stored.folder}", highlight=False, soft_wrap=True)
    if len(failed) > _FAILED_SHOWN:
        notes.print(f"and {len(failed) - _FAILED_SHOWN} more, see cells.csv", style="red")
    missing = sum(not row.complete for row in recorded.rows)
    if missing:
        import shlex

        again = shlex.join(["areal-lab", "sweep", source, *overrides])
        command = f": {again}" if len(again) <= _COMMAND_SHOWN else ""
        notes.print(
            f"{len(recorded.rows) - missing} of {len(recorded.rows)} cells are complete; the same "
            f"command runs the others{command}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    if sweep.stopped:
        return INTERRUPTED
    return FAILED if failed else 0


def _shown_status(stored: StoredCell) -> str:
    """Status to print: `running` in a folder without a sweep means interrupted."""
    return f"{'stopped' if stored.status == 'running' else stored.status:8}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)


@contextmanager
def _display(
    notes: Console, cells: int, todo: int, pace: Pace, command: Command
) -> Iterator[_Lines]:
    """Print lines for each cell; on a terminal also a bar below them."""
    lines = _Lines(notes, cells, cells - todo, pace, command)
    if not notes.is_terminal or not todo:
        yield lines
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task
    from rich.table import Column
    from rich.text import Text

    class Running(ProgressColumn):
        """Running cells, and the remaining time."""

        def render(self, task: Task) -> Text:  # noqa: ARG002 - the pace has it all
            return Text(_under_way(pace))

    rest = Running(table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1))
    columns = (BarColumn(bar_width=20), MofNCompleteColumn(), rest)
    with Progress(*columns, console=notes, transient=True, expand=True) as bar:
        lines.on_end = lambda: bar.advance(task)
        task = bar.add_task("", total=cells, completed=cells - todo)
        yield lines


def _under_way(pace: Pace) -> str:
    left_s = pace.left_s(time.monotonic())
    left = "" if left_s is None else f"about {duration(left_s)} left; "
    return f"{left}running {'; '.join(pace.running)}" if pace.running else ""


class _Lines:
    """One line at the end of each run and, without a terminal, at its start."""

    def __init__(self, notes: Console, cells: int, done: int, pace: Pace, command: Command) -> None:
        self._notes, self._cells, self._done = notes, cells, done
        self._pace, self._command = pace, command
        self.on_end: Callable[[], None] = lambda: None

    def started(self, cell: Cell) -> None:
        """Print the start of a run, unless a bar shows it or runs are short."""
        seconds = self._pace.seconds
        if not self._notes.is_terminal and not (seconds and fmean(seconds) < _SHORT_S):
            self._say(f"running   {cell.label}")

    def ended(self, cell: Cell, stored: StoredCell) -> None:
        """Print the result of a run, and the number of remaining ones."""
        if stored.status != "stopped":
            self._done += 1
            self.on_end()
        value = stored.figures.get(self._command.metric)
        figure = "" if value is None else f", {self._command.metric} {value:.4g}"
        left_s = self._pace.left_s(time.monotonic())
        rest = self._cells - self._done
        left = f"; {rest} left" + ("" if left_s is None else f", about {duration(left_s)}")
        self._say(
            f"{stored.status:8}  {cell.label} in {duration(stored.wall_s)}{figure}"
            + (left if rest and stored.status != "stopped" else ""),
            style="red" if stored.status == "failed" else None,
        )

    def stopping(self, running: int) -> None:
        """Print the effect of Ctrl-C."""
        self._say(
            f"stopping: waiting for {_count(running, 'run')} to end; Ctrl-C again kills "
            f"{'it' if running == 1 else 'them'}"
        )

    def _say(self, text: str, style: str | None = None) -> None:
        self._notes.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """Format seconds: `45 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = max(1, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours} h {minute} min" if hours else f"{minutes} min {second} s"
