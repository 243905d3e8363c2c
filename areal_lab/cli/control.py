"""`areal-lab control`, `runs`, `watch` and `compare`: look at runs, and send live ones requests."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

import typer
from rich.console import Console
from rich.live import Live

from areal_lab.cli.outputs import FAILED, error_exit
from areal_lab.config.unknown import nearest
from areal_lab.host.terminal import printable
from areal_lab.live.attach import AttachedRun, attach_run, live_runs
from areal_lab.live.mailbox import RequestRefused, RunEnded
from areal_lab.live.presence import FILE
from areal_lab.live.watch_view import Watched, over, view
from areal_lab.runlog.compare import compare
from areal_lab.runlog.read_run import find_runs
from areal_lab.runlog.records import finite_json

STATUS: Final = "status"
_VERBS: Final = (STATUS, "pause", "resume", "stop", "eta=NUMBER")


def run_control(folder: Path, asked: str, *, as_json: bool) -> None:
    """Send a request to the run in a folder, and print its reply.

    Raises typer.Exit with 1 if the run is not alive or refuses.
    """
    run = attach_run(folder)
    if asked == STATUS:
        _print_status(run, as_json=as_json)
        return
    if as_json:
        raise ValueError(f"--json has no effect with {asked}; it prints the status")
    try:
        typer.echo(printable(_ask(run, asked)))
    except (RequestRefused, RunEnded) as error:
        raise error_exit(str(error), FAILED) from error


def print_live_runs(parent: Path) -> None:
    """Print one line for each run below `parent` that is alive."""
    found = live_runs(parent)
    for run in found:
        typer.echo(printable(f"{_shown(run.folder)}  {run.snapshot()}"))
    if not found:
        typer.echo(f"no run is alive in {parent}")


def run_compare(runs: Sequence[Path], *, as_json: bool) -> None:
    """Print runs side by side."""
    found = compare(*runs)
    typer.echo(
        json.dumps(finite_json(asdict(found)), indent=2) if as_json else printable(str(found))
    )


def _print_status(run: AttachedRun, *, as_json: bool) -> None:
    now = run.snapshot()
    typer.echo(json.dumps(finite_json(asdict(now)), indent=2) if as_json else printable(str(now)))
    if now.alive is False:
        raise typer.Exit(FAILED)


def _ask(run: AttachedRun, asked: str) -> str:
    name, equals, value = asked.partition("=")
    match name:
        case "pause" if not equals:
            return run.pause()
        case "resume" if not equals:
            return run.resume()
        case "stop" if not equals:
            return run.stop()
        case "eta" if value:
            try:
                eta = float(value)
            except ValueError as error:
                raise ValueError(f"eta is {value!r}, but must be a number, or inf") from error
            return run.set_eta(eta)
    raise ValueError(f"{asked!r} is none of {', '.join(_VERBS)}{nearest(asked, _VERBS)}")


def _shown(folder: Path) -> Path:
    """Folder as it would be typed, if it is below this one."""
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder


LATEST: Final = "latest"
_LOOK_S: Final = 1.0
_SHARE: Final = 0.1
"""Largest share of the time spent on reading: a slow file system is read less often."""


def run_watch(run: str, parent: Path, *, once: bool, console: Console | None = None) -> None:
    """Show a run until it ends, or until Ctrl-C, which does not affect the run.

    `run` is a run folder, or `latest`: the newest below `parent`. With `once`, show it and return.
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
    """Most recently written run folder, even without a log."""
    starting = [(file.stat().st_mtime, file.parent) for file in parent.glob(f"*/{FILE}")]
    logged = [
        ((run / "events.jsonl").stat().st_mtime, run)
        for run in find_runs(parent)
        if (run / "events.jsonl").is_file()
    ]
    if not (found := [*starting, *logged]):
        raise ValueError(f"{parent} has no run; name its folder, or the folder of runs by --in")
    return max(found)[1]
