"""The commands `calibrate` and `simulate --against`: read, fit or replay, print, write."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from areal_lab.cli.outputs import console_on, file_to_write, folder_to_write, picture_to_write
from areal_lab.host.durable import replace_text
from areal_lab.runlog.read_run import read_run
from simulator.assembly.build import check_config
from simulator.calibrate.fit_run import Calibration, calibrate_from
from simulator.calibrate.gpu_day import calibrate_day
from simulator.calibrate.replay import Compared, Replay, replay
from simulator.calibrate.report import (
    configuration,
    show,
    to_json,
    to_yaml,
    write_fit,
    write_replay,
)
from simulator.calibrate.step_table import fit_step_table
from simulator.config.load import ALIASES, load_simulation
from simulator.stats.format import number

if TYPE_CHECKING:
    from rich.console import Console


def run_calibration(
    source: Path,
    overrides: Sequence[str] = (),
    *,
    out: Path | None = None,
    as_json: bool = False,
    plot: Path | None = None,
) -> None:
    """Fit the simulator to a run, write the YAML file, and print the fit.

    `out` is the file to write; None writes simulation.yaml into the run folder, or next to the CSV
    file.
    """
    out = file_to_write("--out", out or _beside(source))
    plot = plot and picture_to_write("--plot", plot)
    _finish(calibrate_from(source, overrides), out, as_json=as_json, plot=plot)


def run_gpu_day(
    source: Path,
    overrides: Sequence[str] = (),
    *,
    out: Path | None = None,
    as_json: bool = False,
    plot: Path | None = None,
) -> None:
    """Fit this library's trainer and engine to a day on a GPU, write the YAML file (by default
    next to it), print the fit.
    """
    out = file_to_write("--out", out or source.with_suffix(".yaml"))
    plot = plot and picture_to_write("--plot", plot)
    fit = calibrate_day(source, overrides)
    if plot and not fit.parts:
        raise ValueError("--plot draws fits of the engine, but the day has too few decode steps")
    _finish(fit, out, as_json=as_json, plot=plot)


def _finish(fit: Calibration, out: Path, *, as_json: bool, plot: Path | None) -> None:
    check_config(configuration(fit))
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_text(out, to_yaml(fit))
    if as_json:
        print(json.dumps({**to_json(fit), "file": str(out)}, indent=2, allow_nan=False))
    else:
        show(console_on(sys.stdout), fit)
    notes = console_on(sys.stderr)
    notes.print(f"written: {out}", highlight=False, soft_wrap=True)
    if plot:
        notes.print(f"written: {write_fit(fit, plot)}", highlight=False, soft_wrap=True)
    if not as_json:
        _next(notes, fit, out)


def run_step_table(
    source: Path,
    overrides: Sequence[str] = (),
    *,
    out: Path | None = None,
    as_json: bool = False,
    plot: Path | None = None,
) -> None:
    """Fit a named trainer to a table of steps, write the YAML file (by default next to it),
    print the fit.
    """
    if plot:
        raise ValueError("--plot draws the fit of a run; it cannot be used with --step-table")
    out = file_to_write("--out", out or source.with_suffix(".yaml"))
    fit = fit_step_table(source, overrides)
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_text(out, fit.to_yaml())
    if as_json:
        print(json.dumps({**fit.to_json(), "file": str(out)}, indent=2, allow_nan=False))
    else:
        console = console_on(sys.stdout)
        for line in fit.lines():
            console.print(line, highlight=False, soft_wrap=True)
    notes = console_on(sys.stderr)
    notes.print(f"written: {out}", highlight=False, soft_wrap=True)
    if not as_json:
        _print_next(notes, "simulate", str(out))


def run_replay(
    source: str | None,
    run: Path,
    overrides: tuple[str, ...] = (),
    *,
    as_json: bool = False,
    plots: Path | None = None,
) -> None:
    """Simulate a recorded run with the costs of a config, and print measured and predicted
    times.
    """
    if plots:
        folder_to_write("--plots", plots)
    config = load_simulation(source, overrides)
    names = [one.partition("=")[0].strip() for one in overrides]
    recorded = read_run(run)
    found = replay(
        config,
        recorded,
        own=[ALIASES.get(name, name) for name in names],
        name=recorded.folder.name,
    )
    costs = Path(source).name if source else config.name
    if as_json:
        print(json.dumps({"config": config.name, **found.to_json()}, indent=2, allow_nan=False))
    else:
        show_replay(console_on(sys.stdout), found, costs)
    if plots:
        path = write_replay(found, plots / "replay.png", costs)
        console_on(sys.stderr).print(f"written: {path}", highlight=False, soft_wrap=True)


def show_replay(console: Console, found: Replay, costs: str) -> None:
    """Print measured and predicted values side by side."""
    from rich import box
    from rich.table import Table

    workload, schedule = found.config.workload, found.config.schedule
    console.print(f"{found.name}, replayed with the costs of {costs}", highlight=False)
    console.print(
        f"{schedule.name.replace('_', ' ')}, eta {schedule.eta:g}; {workload.steps} steps of "
        f"{workload.prompts_per_batch} x {workload.samples_per_prompt} responses, averages "
        f"without the first {found.warmup_steps}; lengths as recorded",
        highlight=False,
    )
    console.print()
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False, pad_edge=False)
    table.add_column("")
    for title in ("measured", "predicted", "gap"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in found.rows:
        table.add_row(*replay_cells(row))
    console.print(table)


def replay_cells(row: Compared) -> tuple[str, str, str, str]:
    """Table cells of a row: name, measured, predicted, gap."""
    if not row.unit:
        return (
            row.name,
            f"{row.measured:.1%}",
            f"{row.predicted:.1%}",
            f"{100 * row.gap:+.1f} points",
        )
    measured, predicted = (f"{number(one)} {row.unit}" for one in (row.measured, row.predicted))
    return (row.name, measured, predicted, f"{row.gap:+.1%}" if row.measured else "")


def _beside(source: Path) -> Path:
    if source.is_dir():
        return source / "simulation.yaml"
    if source.suffix.lower() == ".csv":
        return source.with_suffix(".yaml")
    return source.parent / "simulation.yaml"


def _next(notes: Console, fit: Calibration, out: Path) -> None:
    against = () if fit.run is None else ("--against", str(fit.source))
    _print_next(notes, "simulate", str(out), *against)


def _print_next(notes: Console, *command: str) -> None:
    """Print a command to copy, in which any folder name is quoted as one word."""
    notes.print(f"next: {shlex.join(('areal-lab', *command))}", highlight=False, soft_wrap=True)
