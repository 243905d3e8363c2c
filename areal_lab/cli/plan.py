"""The `areal-lab plan` command: load, search with progress, print, draw."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from areal_lab.cli.outputs import console_on, picture_to_write
from areal_lab.host.terminal import INTERRUPTED
from areal_lab.shell.stop import ended_like_ctrl_c
from simulator.plan.report import plan_report, show_plan
from simulator.plan.result import Plan
from simulator.plan.schema import load_plan
from simulator.plan.search import PlanSearch, follow
from simulator.plan.summary import best_so_far, nothing_possible
from simulator.plan.trial import Progress
from simulator.plan.trial import workers as processes

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH: Final = 110
_FIRST_S: Final = 2.0
"""Seconds until the first progress line without a terminal."""
_PROGRESS_S: Final = 15.0
"""Seconds between two progress lines without a terminal."""


def run_plan(
    file: str | Path,
    overrides: Sequence[str] = (),
    *,
    as_json: bool = False,
    plot: Path | None = None,
    workers: int | None = None,
) -> None:
    """Load the plan file, search, and print or draw the result.

    `workers` is the number of worker processes; None takes one per CPU.
    """
    config = load_plan(file, overrides)
    plot = plot and picture_to_write("--plot", plot)
    notes = console_on(sys.stderr, _WIDTH)
    started_s = time.monotonic()
    with processes(workers or os.cpu_count() or 1) as run, ended_like_ctrl_c():
        search = PlanSearch(config, run)
        try:
            with _progress(notes, lambda: best_so_far(search.plan)) as progress:
                follow(search, progress)
        except KeyboardInterrupt:
            _report(search.plan, notes, started_s, as_json=as_json)
            notes.print("stopped, as requested: this is the best answer so far", style="red")
            raise typer.Exit(INTERRUPTED) from None
    plan = search.plan
    _report(plan, notes, started_s, as_json=as_json)
    if not plan.space.possible:
        raise ValueError(nothing_possible(plan))
    if plot:
        from simulator.plan.plots import draw_plan

        notes.print(f"written: {draw_plan(plan, plot)}", highlight=False, soft_wrap=True)


def _report(plan: Plan, notes: Console, started_s: float, *, as_json: bool) -> None:
    """Print the plan of a complete or stopped search."""
    notes.print(
        f"{plan.simulations} simulations in {time.monotonic() - started_s:.0f} s", highlight=False
    )
    if as_json:
        print(json.dumps(plan_report(plan), indent=2, allow_nan=False))
    else:
        show_plan(console_on(sys.stdout, _WIDTH), plan)


@contextmanager
def _progress(notes: Console, best: Callable[[], str]) -> Iterator[Progress]:
    if not notes.is_terminal:
        yield Lines(notes, best)
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bars
    from rich.text import Text

    class Rate(ProgressColumn):
        """Simulations per second."""

        def render(self, task: Task) -> Text:
            return Text(f"{task.speed:.1f}/s" if task.speed else "")

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=10),
        MofNCompleteColumn(),
        Rate(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[best]}", markup=False),
    )
    with Bars(*columns, console=notes, transient=True) as bars:
        yield _Bar(bars, best)


class _Bar:
    """Progress bar on a terminal."""

    def __init__(self, bars: Any, best: Callable[[], str]) -> None:
        self._bars, self._best = bars, best
        self._task: Any = None
        self._told_s = time.monotonic()

    def stage(self, name: str, total: int) -> None:
        """Replace the bar by a new one."""
        if self._task is not None:
            self._bars.remove_task(self._task)
        self._task = self._bars.add_task(name, total=total, best=self._best().removeprefix(", "))

    def advance(self, count: int = 1) -> None:
        """Advance the bar; now and then with the best so far."""
        self._bars.advance(self._task, count)
        if time.monotonic() - self._told_s >= _FIRST_S:
            self._bars.update(self._task, best=self._best().removeprefix(", "))
            self._told_s = time.monotonic()


class Lines:
    """Progress without a terminal: a line after two seconds, then every 15 s."""

    def __init__(
        self,
        notes: Console,
        best: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start to count.

        Args:
            best: text about the best so far, which ends a line; empty if there is none.
            clock: seconds from any start.
        """
        self._notes, self._best, self._clock = notes, best, clock
        self._name, self._total, self._done = "", 0, 0
        self._started_s = clock()
        self._next_s = self._started_s + _FIRST_S

    def stage(self, name: str, total: int) -> None:
        """Reset the counts, and print a line when another stage starts."""
        if name != self._name:
            self._notes.print(f"{name}: {total}", highlight=False)
        self._name, self._total, self._done = name, total, 0
        self._started_s = self._clock()

    def advance(self, count: int = 1) -> None:
        """Count, and print a line if the last one is old enough."""
        self._done += count
        now_s = self._clock()
        if now_s < self._next_s or now_s <= self._started_s:
            return
        self._next_s = now_s + _PROGRESS_S
        rate = self._done / (now_s - self._started_s)
        left_s = (self._total - self._done) / rate
        self._notes.print(
            f"{self._name}: {self._done} of {self._total}, {rate:.1f}/s, {left_s:.0f} s left"
            f"{self._best()}",
            highlight=False,
            markup=False,
        )
