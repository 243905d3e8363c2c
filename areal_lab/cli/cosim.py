"""`areal-lab cosim`: a co-simulated run in the terminal, and the table of its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from areal_lab.config.load import split_arguments
from areal_lab.runlog.replay import etas_in_words
from areal_lab.shell.display import Display
from areal_lab.shell.terminal import TerminalRun, add_watching_rows, interval_text, two_columns
from cosim.load import load_cosim
from cosim.run import run_cosim


def run_command(source: str, overrides: Sequence[str]) -> int:
    """Run and report; see `TerminalRun.to_end`.

    Raises:
        ValueError: if settings are wrong; one line per problem.
    """
    configs, changes = split_arguments(overrides)
    config = load_cosim([source, *configs], changes)
    terminal = TerminalRun(results=summary_table, saved=lambda: "the steps so far are kept")

    def body(display: Display) -> tuple[Path, Mapping[str, Any]]:
        result = run_cosim(config, display=display, stop=terminal.stop)
        return result.folder, result.summary

    return terminal.to_end_here(body)


def summary_table(summary: Mapping[str, Any]) -> Table:
    """Results of a co-simulated run as a table."""
    table = two_columns()
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
        f"{summary['schedule']}, eta {etas_in_words(summary['eta'], summary['eta_changes'])}; "
        f"token lag mean {lag['mean']:.2f}, max {lag['max']:.0f} versions",
    )
    table.add_row(
        "interruptions",
        f"{summary['interruptions']}; {summary['multi_version_share']:.1%} of samples have "
        "tokens from two or more versions",
    )
    add_watching_rows(table, summary)
    return table
