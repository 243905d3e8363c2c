"""The command `areal-lab watch`: a run in the terminal, as it grows."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.live import Live

from areal_lab.live.presence import FILE
from areal_lab.live.watch_view import Watched, over, view
from areal_lab.runlog.read_run import find_runs

LATEST: Final = "latest"
_LOOK_S: Final = 1.0
_SHARE: Final = 0.1
"""Largest share of the time that is spent looking: a slow file system is looked at less often."""


def run_watch(run: str, parent: Path, *, once: bool, console: Console | None = None) -> None:
    """Show a run until it ends, or Ctrl-C, which does not reach it.

    Args:
        run: its folder, or `latest`.
        parent: folder of the runs, for `latest`.
        once: show it and return.
        console: where to show it; None takes standard output.

    Raises:
        ValueError: in one line: there is no such run.
    """
    console = console or Console()
    watched = Watched(latest_run(parent) if run == LATEST else Path(run))
    if once or not console.is_terminal:
        console.print(view(*watched.look(), watched.folder, console.width))
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
        while True:
            began_s = time.monotonic()
            now = watched.look()
            live.update(view(*now, watched.folder, console.width), refresh=True)
            if over(*now):
                return
            took_s = time.monotonic() - began_s
            time.sleep(max(_LOOK_S, took_s * (1 / _SHARE - 1)))


def latest_run(parent: Path) -> Path:
    """The run folder that was written to last, also one that has no log yet.

    Raises:
        ValueError: if there is none.
    """
    starting = [(file.stat().st_mtime, file.parent) for file in parent.glob(f"*/{FILE}")]
    logged = [
        ((run / "events.jsonl").stat().st_mtime, run)
        for run in find_runs(parent)
        if (run / "events.jsonl").is_file()
    ]
    if not (found := [*starting, *logged]):
        raise ValueError(f"{parent} has no run; name its folder, or the folder of runs by --in")
    return max(found)[1]
