"""Run the cells of a study in child processes, some concurrently.

| loop     | produces         | waits for         | unblocked by                          |
| worker   | the end of cells | a child's exit    | the run's end, or a signal            |

    Ctrl-C once     no cell starts, the running ones get SIGTERM: a training run finishes its step
    Ctrl-C twice    the running ones are killed
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Final, Protocol

from areal_lab.config.dump import to_yaml
from areal_lab.config.problem import ConfigError, Kind, Problem
from areal_lab.host.durable import replace_text
from areal_lab.host.processes import Child, last_lines, start_command
from areal_lab.shell.stop import StopSignal, stop_on_interrupt
from areal_lab.sweep.command import Command, Incomplete, result_of
from areal_lab.sweep.grid import Cell
from areal_lab.sweep.store import StoredCell, package_version

CONFIG: Final = "config.yaml"
OUTPUT, ERRORS = "stdout.log", "stderr.log"
_ERROR_LINES: Final = 12
_PROGRAM: Final = ("-m", "areal_lab.cli.watched")
"""`areal-lab`, as a child that ends with this process."""


class Display(Protocol):
    """Progress display of a sweep."""

    def started(self, cell: Cell) -> None:
        """A run has started."""
        ...

    def ended(self, cell: Cell, stored: StoredCell) -> None:
        """A run has ended, for any reason."""
        ...

    def stopping(self, running: int) -> None:
        """Ctrl-C: nothing new starts, and these runs were asked to end."""
        ...


@dataclass(slots=True)
class Pace:
    """Estimate of the remaining time, from the durations of complete cells."""

    workers: int
    waiting: int
    seconds: list[float]
    """Durations of the complete cells."""
    running: dict[str, float]
    """Start times of the running ones, by label."""

    def left_s(self, now_s: float) -> float | None:
        """Seconds until the last cell ends; None before one is complete."""
        if not self.seconds:
            return None
        one_s = fmean(self.seconds)
        under_way_s = [max(0.0, one_s - now_s + began_s) for began_s in self.running.values()]
        shared_s = (self.waiting * one_s + sum(under_way_s)) / self.workers
        # One cell cannot be divided among workers.
        return max([shared_s, one_s if self.waiting else 0.0, *under_way_s])


def workers_for(command: Command, cells: Sequence[Cell], asked: int) -> int:
    """Number of concurrent runs.

    `asked` 0 derives it from the cores of this machine and those that a run keeps busy.
    """
    shared = next(filter(None, (command.alone(cell.record) for cell in cells)), "")
    if asked > 1 and shared:
        message = f"workers is {asked}, but runs with the same {shared} must be one at a time"
        raise ConfigError(Problem(Kind.SETTINGS, "workers", f"{message}; set workers=1"))
    if asked:
        return asked
    cores = len(os.sched_getaffinity(0))
    needs = [command.needs(cell.record) or cores for cell in cells]
    return max(1, cores // max(needs))


class Sweep:
    """The running sweep over the planned cells."""

    def __init__(
        self, command: Command, planned: Sequence[tuple[Cell, StoredCell]], pace: Pace
    ) -> None:
        """Plan to run these cells, in this order."""
        self._command = command
        self._waiting = deque(planned)
        self._children: set[Child] = set()
        self.pace = pace
        self._stop = StopSignal()

    @property
    def stopped(self) -> bool:
        """True after Ctrl-C."""
        return self._stop.requested

    async def perform(self, display: Display) -> None:
        """Run all cells; a cell that fails does not end the others.

        Raises CancelledError after the second Ctrl-C, when all children have ended.
        """

        def stopping() -> None:
            display.stopping(len(self._children))
            for child in self._children:
                child.ask_to_end()

        stop_on_interrupt(self._stop, first=stopping)
        async with asyncio.TaskGroup() as group:
            for _ in range(self.pace.workers):
                group.create_task(self._work(display))

    async def _work(self, display: Display) -> None:
        while self._waiting and not self.stopped:
            cell, stored = self._waiting.popleft()
            self.pace.waiting -= 1
            self.pace.running[cell.label] = time.monotonic()
            display.started(cell)
            try:
                ended = await self._run(cell, stored)
            finally:
                del self.pace.running[cell.label]
            if ended.status == "complete":
                self.pace.seconds.append(ended.wall_s)
            display.ended(cell, ended)

    async def _run(self, cell: Cell, stored: StoredCell) -> StoredCell:
        """Run one cell, and store its result."""
        folder, began_s = stored.folder, time.monotonic()
        stored = replace(
            stored,
            settings=cell.settings,
            status="running",
            error="",
            figures={},
            run="",
            areal_lab=package_version(),
        )
        stored.write()
        _write_config(cell, self._command, folder)
        command = [self._command.name, str(folder / CONFIG), *self._command.options]
        for name in (OUTPUT, ERRORS):
            (folder / name).unlink(missing_ok=True)
        child = await start_command(
            cell.label,
            [sys.executable, *_PROGRAM, *command],
            log_path=folder / ERRORS,
            output_path=folder / OUTPUT,
            environment=os.environ,  # its cells are runs, which may attach to servers with a key
        )
        self._children.add(child)
        try:
            if self.stopped:  # while it was being started
                child.ask_to_end()
            code = await child.process.wait()
        except asyncio.CancelledError:
            replace(stored, status="stopped", error="Ctrl-C, twice").write()
            raise
        finally:
            self._children.discard(child)
            await child.stop()
        stored = replace(stored, wall_s=round(time.monotonic() - began_s, 3))
        ended = self._ended(stored, code)
        ended.write()
        return ended

    def _ended(self, stored: StoredCell, code: int) -> StoredCell:
        error = ""
        if code == 0:
            try:
                result = result_of(self._command.prints, stored.folder / OUTPUT)
            except Incomplete as incomplete:
                error = str(incomplete)
            else:
                run = os.path.relpath(result.run, stored.folder) if result.run else ""
                return replace(stored, status="complete", figures=result.figures, run=run)
        if self.stopped:
            return replace(stored, status="stopped", error="Ctrl-C")
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        said = f"{how}; the end of its output:\n{_said(stored.folder)}"
        return replace(stored, status="failed", error=error or said)


def _write_config(cell: Cell, command: Command, folder: Path) -> None:
    """Write the settings of the run as a file that repeats it: `areal-lab COMMAND FILE`."""
    record = cell.record.with_settings(command.placed(folder))
    options = "".join(f" {one}" for one in command.options)
    head = [cell.label, f"areal-lab {command.name} {CONFIG}{options}"]
    replace_text(folder / CONFIG, to_yaml(record, head=head))


def _said(folder: Path) -> str:
    """Last lines of a run's output, errors before output."""
    for name in (ERRORS, OUTPUT):
        if (folder / name).is_file() and (folder / name).stat().st_size:
            return last_lines(folder / name, _ERROR_LINES)
    return "(it wrote nothing)"
