"""Progress displays of a run: step, reward, speed, staleness, and the cause of waiting.

On a terminal a panel is redrawn in place. Elsewhere each step and each phase is one line, and
reminders of the cause of waiting follow after 10, 20, 40 s of silence and so on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from areal_lab.host.terminal import printable
from areal_lab.shell.step_report import StepReport

_BAR_WIDTH = 32
_REMIND_S = 10.0
"""Seconds of silence before the first reminder; doubled for each further one."""
_CHECK_S = 0.5


class Display(Protocol):
    """Shows the progress of a run."""

    def phase(self, text: str) -> None:
        """Show a new phase, described by `text`."""
        ...

    def step(self, report: StepReport) -> None:
        """Show a complete training step."""
        ...

    def note(self, text: str) -> None:
        """Show another message for the user."""
        ...


class Silent:
    """Display without output, for library use."""

    def phase(self, text: str) -> None:
        """Show nothing."""

    def step(self, report: StepReport) -> None:
        """Show nothing."""

    def note(self, text: str) -> None:
        """Show nothing."""


@dataclass
class Lines:
    """One line per phase, step and note: for logs and pipes."""

    console: Console
    waiting_for: Callable[[], str] = str
    """Returns a description of what the run waits for; empty before training."""
    clock: Callable[[], float] = time.monotonic
    _began_s: float = field(init=False)
    _line_s: float = field(init=False)
    """Time of the last line that was not a reminder."""
    _remind_s: float = _REMIND_S
    _phase: str = "starting"

    def __post_init__(self) -> None:
        self._began_s = self._line_s = self.clock()

    def phase(self, text: str) -> None:
        """Print the phase with the seconds since the start."""
        self._phase = text
        self._report(text)

    def step(self, report: StepReport) -> None:
        """Print the step."""
        self._report(describe(report))

    def note(self, text: str) -> None:
        """Print the note."""
        self._report(text)

    def remind(self) -> None:
        """Print the cause of waiting after a long silence; call this repeatedly."""
        silent_s = self.clock() - self._line_s
        if silent_s >= self._remind_s:
            self._remind_s *= 2
            waiting = self.waiting_for()
            what = f"still waiting for {waiting}" if waiting else f"still: {self._phase}"
            self._print(f"{what} ({silent_s:.0f} s)")

    def _report(self, text: str) -> None:
        self._line_s, self._remind_s = self.clock(), _REMIND_S
        self._print(text)

    def _print(self, text: str) -> None:
        line = f"[{self.clock() - self._began_s:6.1f} s] {printable(text)}"
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


@dataclass
class Screen:
    """A panel that is redrawn in place, four times a second."""

    console: Console
    waiting_for: Callable[[], str]
    """Returns a description of what the run waits for, read at every redraw."""
    live_counts: Callable[[], str]
    """Returns a description of versions, groups and tokens, read at every redraw."""
    _began_s: float = field(default_factory=time.monotonic)
    _phase: str = "starting"
    _phase_s: float = field(default_factory=time.monotonic)
    _last: StepReport | None = None

    def phase(self, text: str) -> None:
        """Show the phase until the next one."""
        self._phase, self._phase_s = printable(text), time.monotonic()

    def step(self, report: StepReport) -> None:
        """Print the step above the panel."""
        self._last = report
        self.console.print(Text(describe(report)))

    def note(self, text: str) -> None:
        """Print the note above the panel."""
        self.console.print(Text(printable(text), style="bold"))

    def __rich__(self) -> RenderableType:
        """Return the current panel."""
        now = time.monotonic()
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", justify="right")
        table.add_column(overflow="fold")
        table.add_row("now", f"{self._phase}  ({now - self._phase_s:.0f} s)")
        if waiting := self.waiting_for():
            table.add_row("waiting for", waiting)
        if counts := self.live_counts():
            table.add_row("state", counts)
        if self._last is not None:
            table.add_row(
                f"step {self._last.step}/{self._last.total_steps}",
                ProgressBar(
                    total=self._last.total_steps, completed=self._last.step, width=_BAR_WIDTH
                ),
            )
        table.add_row("elapsed", f"{now - self._began_s:.0f} s")
        return Group(Text(""), table)


def describe(report: StepReport) -> str:
    """Describe a step in one line."""
    filtered = int(report.metrics.get("filtered_groups", 0))
    return (
        f"step {report.step:>3}/{report.total_steps}  reward {report.reward_mean:.3f}  "
        f"loss {report.loss:+.4f}  {report.tokens_per_s:5.0f} tokens/s  "
        f"lag mean {report.lag_token_mean:.1f} max {report.lag_token_max:.0f}  "
        f"{report.step_s:.1f} s"
        + (f"  {filtered} groups filtered" if filtered else "")
        + (f"  {report.evaluating}" if report.evaluating else "")
    )


@contextmanager
def terminal_display(
    waiting_for: Callable[[], str], live_counts: Callable[[], str]
) -> Iterator[Display]:
    """Open the display for standard error: a panel on a terminal, lines elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        lines = Lines(console, waiting_for)
        with reminders(lines):
            yield lines
        return
    screen = Screen(console, waiting_for, live_counts)
    with Live(screen, console=console, refresh_per_second=4, transient=True):
        yield screen


@contextmanager
def reminders(lines: Lines) -> Iterator[None]:
    """Print reminders from a separate thread, because the caller's may be blocked."""
    over = threading.Event()

    def remind() -> None:
        while not over.wait(_CHECK_S):
            lines.remind()

    thread = threading.Thread(target=remind, name="reminders", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
