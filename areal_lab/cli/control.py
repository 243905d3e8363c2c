"""The commands `areal-lab control` and `areal-lab runs`: look at live runs, and ask them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Final

import typer

from areal_lab.cli.errors import FAILED, error_exit
from areal_lab.config.suggest import nearest
from areal_lab.host.terminal import printable
from areal_lab.live.attach import AttachedRun, attach_run, live_runs
from areal_lab.live.mailbox import RequestRefused, RunEnded
from areal_lab.runlog.records import finite_json

STATUS: Final = "status"
_VERBS: Final = (STATUS, "pause", "resume", "stop", "eta=NUMBER")


def run_control(folder: Path, asked: str, *, as_json: bool) -> None:
    """Do what is asked of the run in a folder, and print what it replies.

    Raises:
        ValueError: in one line: it is not a run folder, or no such request.
        typer.Exit: with 1, if the run is not alive or refuses.
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
    """One line for each run below `parent` that is alive."""
    found = live_runs(parent)
    for run in found:
        typer.echo(printable(f"{_shown(run.folder)}  {run.snapshot()}"))
    if not found:
        typer.echo(f"no run is alive in {parent}")


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
    """The folder as it is typed, if it is below this one."""
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder
