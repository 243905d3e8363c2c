"""The `areal-lab cosim` command: load, run with progress, print a table and the run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from areal_lab.config.load import split_arguments
from areal_lab.pipeline.console import add_watching_rows, interval_text
from areal_lab.pipeline.progress import terminal_display
from cosim.load import load_cosim
from cosim.run import run_cosim


def run_command(source: str, overrides: Sequence[str]) -> None:
    """Run to the end; the last line on standard output is the run folder.

    Raises:
        ValueError: if settings are wrong; one line per problem.
    """
    configs, changes = split_arguments(overrides)
    config = load_cosim([source, *configs], changes)
    with terminal_display(str, str) as display:
        result = run_cosim(config, display=display)
    Console().print(summary_table(result.summary))
    print(result.folder)


def summary_table(summary: Mapping[str, Any]) -> Table:
    """The results of a co-simulated run as a table for people."""
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_column(style="dim", justify="right")
    table.add_column()
    for when in ("before", "after"):
        table.add_row(f"held-out reward {when}", interval_text(summary[f"reward_{when}"]))
    lag = summary["lag"]["token"]
    table.add_row("objective", f"{summary['objective']} {summary['loss']}, seed {summary['seed']}")
    table.add_row(
        "trained on", f"{summary['trained_samples']:,} samples in {summary['steps']} steps"
    )
    table.add_row("simulated time", f"{summary['simulated_hours']:.2f} h")
    table.add_row(
        "staleness",
        f"{summary['schedule']}, eta {float(summary['eta']):g}; token lag mean {lag['mean']:.2f}, "
        f"max {lag['max']:.0f} versions",
    )
    table.add_row(
        "interruptions",
        f"{summary['interruptions']}; {summary['multi_version_share']:.1%} of samples have "
        "tokens from two or more versions",
    )
    add_watching_rows(table, summary)
    return table
