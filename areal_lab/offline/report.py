"""What surrounds a run on fixed data: sinks, picture, the summary of a failure; and its table."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.table import Table

from areal_lab.live.presence import Present
from areal_lab.offline.job import Job
from areal_lab.pipeline.console import add_watching_rows
from areal_lab.pipeline.progress import Display
from areal_lab.runlog.appended import read_appended
from areal_lab.runlog.folder import RunFolder
from areal_lab.runlog.read_run import METRICS
from areal_lab.sinks.start import Sinks, add_to_summary


def summary_table(summary: Mapping[str, Any]) -> Table:
    """The results of a run."""
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_column(style="dim", justify="right")
    table.add_column()
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


@contextmanager
def recorded(job: Job, display: Display) -> Iterator[tuple[dict[str, Any], Present]]:
    """What surrounds a run: its presence, sinks, picture, and the summary of a failure.

    Yields:
        A dictionary for the summary, and the presence, for its phases.
    """
    began_s = time.time()
    present = Present(job.folder)
    present.enter("starting")
    sinks = Sinks(job.config, job.folder, display.note)
    summary: dict[str, Any] = {}
    try:
        yield summary, present
        if job.config.plots:
            display.phase("drawing loss.png")
            write_picture(job.folder)
    except BaseException as error:
        _write_failure(job, error, wall_s=time.time() - began_s)
        add_to_summary(job.folder, sinks.close(at_once=True))
        raise
    finally:
        present.leave()
    if reports := sinks.close():
        add_to_summary(job.folder, reports)
        summary["sinks"] = reports


def _write_failure(job: Job, error: BaseException, *, wall_s: float) -> None:
    """Write summary.json of a run that an error ended."""
    lines = read_appended(job.folder / METRICS).lines if _has_metrics(job.folder) else ()
    cancelled = isinstance(error, asyncio.CancelledError | KeyboardInterrupt)
    RunFolder(job.folder).write_json(
        "summary.json",
        {
            "command": job.kind,
            "status": "stopped at once" if cancelled else "failed",
            "error": str(error) or type(error).__name__,
            "steps": int(json.loads(lines[-1])["step"]) if lines else 0,
            "wall_s": wall_s,
        },
    )


def write_picture(run: Path) -> Path | None:
    """Draw loss.png from metrics.jsonl into the run folder; None if there is nothing to draw."""
    # matplotlib takes half a second to import, which other commands do without
    from areal_lab.plots.loss import draw_loss
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
