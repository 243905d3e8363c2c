"""Run in a terminal: progress, Ctrl-C, table of results, exit code.

Ctrl-C once     finish the step, save, exit 130
Ctrl-C twice    stop immediately, exit 130; every process ends and the run folder stays readable
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from areal_lab.host.terminal import INTERRUPTED, printable
from areal_lab.shell.display import Display, terminal_display
from areal_lab.shell.stop import StopSignal, stop_on_interrupt, stopping_on_interrupt


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalRun:
    """Terminal output of a command's run."""

    results: Callable[[Mapping[str, Any]], Table]
    """Makes a table from the content of summary.json."""
    saved: Callable[[], str]
    """Describes the saved state of a run that was stopped immediately."""
    waiting_for: Callable[[], str] = str
    """Describes what the run waits for, read at every redraw."""
    counts: Callable[[], str] = str
    """Describes the progress of the run, read at every redraw."""
    files: str = ""
    """Names of files in the run folder, printed before its path."""
    stop: StopSignal = field(default_factory=StopSignal)

    def to_end(
        self, body: Callable[[Display], Coroutine[Any, Any, tuple[Path, Mapping[str, Any]]]]
    ) -> int:
        """Run, print the results and, as the last line on standard output, the run folder.

        Args:
            body: returns the run folder and the content of summary.json.

        Returns:
            The exit code: 0, or 130 after Ctrl-C.

        Raises:
            Exception: the error that ended the run.
        """

        async def until_done(display: Display) -> tuple[Path, Mapping[str, Any]]:
            stop_on_interrupt(self.stop)
            return await body(display)

        return self._shown(lambda display: asyncio.run(until_done(display)))

    def to_end_here(self, body: Callable[[Display], tuple[Path, Mapping[str, Any]]]) -> int:
        """Run as `to_end` does, for a run without an event loop."""
        with stopping_on_interrupt(self.stop):
            return self._shown(body)

    def _shown(self, run: Callable[[Display], tuple[Path, Mapping[str, Any]]]) -> int:
        try:
            with terminal_display(self.waiting_for, self.counts) as display:
                folder, summary = run(display)
        except (asyncio.CancelledError, KeyboardInterrupt):
            text = f"stopped at once, as requested; {self.saved()}"
            Console(stderr=True).print(text, style="red", soft_wrap=True, markup=False)
            return INTERRUPTED
        console = Console()
        console.print(self.results(summary))
        if self.files:
            console.print(f"{self.files} are in {folder}", soft_wrap=True, markup=False)
        print(folder)
        return INTERRUPTED if self.stop.requested else 0


def two_columns() -> Table:
    """Make an empty table with a column of names and one of values."""
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_column(style="dim", justify="right")
    table.add_column()
    return table


def add_watching_rows(table: Table, summary: Mapping[str, Any]) -> None:
    """Add the alarms of a run, and the points and failures of its sinks."""
    for alarm in summary.get("alarms") or ():
        ended = alarm["ended_step"]
        until = "to the end" if ended is None else f"to {ended}"
        name = alarm["name"].replace("_", " ")
        said = f"{name}, step {alarm['since_step']} {until}: {alarm['what']}"
        table.add_row("alarm", Text(said), style="red")
    for name, sink in (summary.get("sinks") or {}).items():
        problems = [
            *([f"{sink['missing_points']} points missing"] if sink["missing_points"] else []),
            *([f"{sink['failures']} failures, first {sink['error']}"] if sink["failures"] else []),
        ]
        got = f"{sink['points']} points; {sink['where']}" if sink["where"] else "not opened"
        table.add_row(name, Text(printable("; ".join([got, *problems]))))


def interval_text(reward: dict[str, Any] | None) -> str:
    """Describe a mean with its confidence interval; `not measured` for None."""
    if reward is None:
        return "not measured"
    ci95 = "" if reward["ci95"] is None else f" +- {reward['ci95']:.3f} (95 %)"
    return f"{reward['mean']:.3f}{ci95} over {reward['n']} problems"
