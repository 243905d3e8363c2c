"""Output of a run on fixed data: steps, table of results, picture, summary of a failure."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from areal_lab.offline.job import Emit, Job, Note, Phase, RunEvent, Stepped
from areal_lab.runlog.appended import read_appended
from areal_lab.runlog.read_run import METRICS
from areal_lab.shell.display import Display
from areal_lab.shell.recorded import Ending
from areal_lab.shell.terminal import add_watching_rows, two_columns


def summary_table(summary: Mapping[str, Any]) -> Table:
    """Return the table of a run's results."""
    table = two_columns()
    for when in ("before", "after"):
        table.add_row(f"held-out {when}", _metrics(summary.get(f"held_out_{when}")))
    if summary["best_step"] not in (None, summary["steps"]):
        best = f"step {summary['best_step']}: {_metrics(summary['best_held_out'])}"
        table.add_row("best", f"{best}; link best")
    rows = summary["rows"]
    table.add_row(
        "trained",
        f"{summary['steps']:,} of {summary['total_steps']:,} steps on {rows['train']:,} rows, "
        f"{summary['trained_tokens']:,} tokens in {summary['training_s']:.0f} s",
    )
    for reason, count in rows["left_out"].items():
        table.add_row("left out", f"{count:,} rows: {reason}")
    share = (
        ""
        if summary["parameters"] == summary["trained_parameters"]
        else (f", {summary['trained_parameters']:,} of them trained")
    )
    table.add_row(
        "model",
        f"{summary['parameters']:,} parameters{share}; {summary['compute_dtype']} on "
        f"{summary['device']}; {summary['peak_rss_bytes'] / 2**20:,.0f} MiB at the peak",
    )
    add_watching_rows(table, summary)
    return table


def event_handler(display: Display, on_step: Callable[[Stepped], object]) -> Emit:
    """Make a function that shows the events of a run, and passes steps to `on_step`."""

    def emit(event: RunEvent) -> None:
        match event:
            case Phase(text):
                display.phase(text)
            case Note(text):
                display.note(text)
            case Stepped():
                on_step(event)
            case _:
                pass

    return emit


def ending(job: Job) -> Ending:
    """Return the actions at the end of a run: its picture, and its summary after a failure."""

    def failure(wall_s: float) -> dict[str, Any]:
        lines = read_appended(job.folder / METRICS).lines if _has_metrics(job.folder) else ()
        steps = int(json.loads(lines[-1])["step"]) if lines else 0
        return {"command": job.kind, "steps": steps, "wall_s": wall_s}

    return Ending(draw=write_picture, pictures="loss.png", failure=failure)


def write_picture(run: Path) -> Path | None:
    """Draw loss.png from metrics.jsonl into the run folder; None if there is nothing to draw."""
    # matplotlib takes half a second to import, which other commands do without
    from areal_lab.plots.curves import draw_loss
    from areal_lab.plots.style import save_picture

    if not _has_metrics(run):
        return None
    lines = [json.loads(line) for line in read_appended(run / METRICS).lines]
    path = run / "loss.png"
    save_picture(draw_loss(lines), path)
    return path


def _has_metrics(run: Path) -> bool:
    return (run / METRICS).is_file() and os.path.getsize(run / METRICS) > 0


def _metrics(found: Mapping[str, float] | None) -> str:
    if not found:
        return "not measured"
    names = ["loss", *(name for name in found if name != "loss")]
    return ", ".join(f"{name.replace('_', ' ')} {found[name]:.4g}" for name in names)
