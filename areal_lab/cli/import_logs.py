"""The `areal-lab import` command: read logs of another framework and print what they say."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer
from rich.console import Console
from rich.table import Table

from areal_lab.cli.outputs import FAILED, console_on
from areal_lab.foreign.read import read_run
from areal_lab.foreign.record import QUANTITIES, ImportedRun, Step, as_json
from areal_lab.host.terminal import printable
from areal_lab.runlog.imported import health, import_into, metric_lines
from areal_lab.runlog.lag_advice import lag_lines, logged_drift

if TYPE_CHECKING:
    from simulator.calibrate.advise import Advice

PARTS: Final = (
    "generation_s",
    "wait_for_batch_s",
    "rollout_fetch_s",
    "old_logprob_s",
    "reference_s",
    "logprobs_s",
    "reward_s",
    "advantage_s",
    "training_s",
    "critic_s",
    "weight_sync_s",
    "validation_s",
    "save_s",
)
"""Parts of a step, in the order in which a synchronous run has them."""
_KEYS_SHOWN: Final = 12
_QUIET_S: Final = 2.0
"""Seconds before progress is shown, and between two lines of it."""


def run_import(
    arguments: Sequence[str],
    *,
    framework: str,
    as_json: bool,
    out: Path | None = None,
    advise: bool = False,
) -> int:
    """Read the logs, print them, write a run folder, advise; return the exit code.

    It is 1 for a log that is refused.

    Args:
        arguments: logs; and settings of `simulate`, `a.b=c` each, for the advice.
        out: run folder to write; None writes none.
    """
    settings = [one for one in arguments if "=" in one and not Path(one).exists()]
    paths = [Path(one) for one in arguments if one not in settings]
    if not paths:
        raise ValueError("no log is given; name a file, or - for standard input")
    if settings and not advise:
        raise ValueError(f"{settings[0]} is not a file; settings need --advise")
    try:
        found = read_run(
            paths, framework=framework, stdin=sys.stdin.buffer, progress=_progress(paths)
        )
    except ValueError as error:
        if as_json:
            print_run(ImportedRun(framework=None, refused=str(error)), in_json=True)
        raise
    if found.refused is not None:
        print_run(found, in_json=as_json)
        return FAILED
    advice = _advice(found, settings) if advise else None
    if out is not None:
        from areal_lab.pipeline.report import write_report

        folder = import_into(found, out)
        write_report(folder)
        typer.echo(f"written: {folder} (areal-lab trace {folder})", err=True)
    print_run(found, in_json=as_json, advice=advice)
    return 0


def _advice(run: ImportedRun, settings: Sequence[str]) -> Advice:
    from simulator.calibrate.advise import Stage, advise

    began = last = time.monotonic()

    def show(stage: Stage) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _QUIET_S:
            last = now
            typer.echo(
                f"simulated {stage.done} of about {stage.total} runs in {now - began:.0f} s; "
                f"now: {stage.what}",
                err=True,
            )

    return advise(as_json(run), settings, progress=show)


def print_run(run: ImportedRun, *, in_json: bool, advice: Advice | None = None) -> None:
    """Print a run with its alarms and advice: text, or one JSON object in one line."""
    alarms = health(run, metric_lines(run))
    if in_json:
        more = {"advice": advice.to_json()} if advice else {}
        drift = logged_drift(run)
        told = {
            "alarms": [asdict(one) for one in alarms],
            "lag_advice": None if drift is None else drift.as_json(),
        }
        typer.echo(json.dumps({**as_json(run), **told, **more}, allow_nan=False))
        return
    console = console_on(sys.stdout)
    if run.refused is not None:
        name = f"{run.framework}: " if run.framework else ""
        console.print(printable(f"{name}not imported. {run.refused}"))
        return
    _print_head(run, console)
    if run.steps:
        console.print(_quantities(run))
    _print_rest(run, console)
    for alarm in alarms:
        console.print(printable(f"alarm: {alarm}"), style="red", markup=False)
    for line in lag_lines(run):
        console.print(line, markup=False)
    if advice is not None:
        from simulator.calibrate.report import show_advice

        console.print()
        show_advice(console, advice)


def _print_head(run: ImportedRun, console: Console) -> None:
    version = f" {run.version}" if run.version else ""
    mode = f", {run.mode}" if run.mode else ""
    console.print(printable(f"{run.framework or 'framework unknown'}{version}{mode}"))
    if run.steps:
        numbers = [one.step for one in run.steps]
        base = "" if run.step_base is None else f", counted from {run.step_base}"
        which = f"steps {min(numbers)} to {max(numbers)}{base}"
        if not run.numbered:
            which = f"without step numbers: {min(numbers)} to {max(numbers)} is their order"
        console.print(f"{len(numbers)} records, {which}")
    for name, value in run.settings.items():
        console.print(printable(f"  {name}: {value}"))


def _quantities(run: ImportedRun) -> Table:
    """Median of each quantity; parts of a step with their share of it."""
    table = Table(box=None, pad_edge=False)
    for title in ("quantity", "median", "share", "steps", "meaning"):
        table.add_column(title, justify="left" if title in ("quantity", "meaning") else "right")
    for role in dict.fromkeys(one.role for one in run.steps):
        steps = [one for one in run.steps if one.role == role]
        for name in dict.fromkeys(name for one in steps for name in one.values):
            values = [value for one in steps if (value := one.number(name)) is not None]
            if values:
                label = f"{role} {name}" if role else name
                table.add_row(
                    label,
                    f"{statistics.median(values):.5g}",
                    _share(name, steps) if name in PARTS else "",
                    str(len(values)),
                    QUANTITIES.get(name, ""),
                )
    return table


def _share(name: str, steps: Sequence[Step]) -> str:
    """Share of a part in the time of those steps that have both."""
    pairs = [
        (part, whole)
        for one in steps
        if (part := one.number(name)) is not None and (whole := one.number("step_time_s"))
    ]
    total = sum(whole for _, whole in pairs)
    return f"{sum(part for part, _ in pairs) / total:.0%}" if total else ""


def _print_rest(run: ImportedRun, console: Console) -> None:
    if run.validation:
        console.print(f"{len(run.validation)} validations")
    if run.missing:
        console.print("not in the log: " + ", ".join(run.missing))
    for name, how in run.derived.items():
        console.print(printable(f"{name} = {how}"))
    for name, why in run.ambiguous.items():
        console.print(printable(f"{name} left out: {why}"))
    for kind, count in run.unread.items():
        if count:
            console.print(printable(f"not read: {count} {kind}"))
    if run.unknown:
        names = sorted(run.unknown)
        more = f" and {len(names) - _KEYS_SHOWN} more" if len(names) > _KEYS_SHOWN else ""
        console.print(
            printable(
                f"{len(names)} keys without a meaning here: {', '.join(names[:_KEYS_SHOWN])}{more}"
            )
        )
    for note in run.notes:
        console.print(printable(note))


def _progress(paths: Sequence[Path]) -> Callable[[int], None]:
    """Show bytes on stderr every two seconds, for logs that take longer."""
    total = sum(one.stat().st_size for one in paths if one.is_file())
    began = last = time.monotonic()
    before = done = 0

    def show(current: int) -> None:
        nonlocal last, before, done
        done += current - before if current >= before else current
        before = current
        now = time.monotonic()
        if now - last >= _QUIET_S:
            last = now
            share = f" of {total / 1e6:,.0f}" if total else ""
            typer.echo(f"read {done / 1e6:,.0f}{share} MB in {now - began:.0f} s", err=True)

    return show
