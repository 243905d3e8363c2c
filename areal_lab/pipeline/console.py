"""Training runs in a terminal or in a separate process, and the table of results.

The separate process continues after the end of the process that started it:

    start_run(config) --> run folder, process.json --> python -m areal_lab.pipeline.console FOLDER
                      --> AttachedRun                        output: FOLDER/logs/run.log

A restarted notebook finds the run again (`live_runs`), because no process of the run ends with the
notebook's process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.table import Table

from areal_lab.config.given import Source
from areal_lab.config.load import load_config, train_config
from areal_lab.config.schema import TrainConfig
from areal_lab.live.attach import OUTPUT, AttachedRun, attach_run
from areal_lab.live.mailbox import open_mailbox
from areal_lab.live.presence import new_presence, write_presence
from areal_lab.metrics.glossary import ENVIRONMENT
from areal_lab.pipeline.resume.recovery import Recovery, resolve_recovery
from areal_lab.pipeline.run import run
from areal_lab.pipeline.state import RunState
from areal_lab.resolve.resolved import resolve
from areal_lab.runlog.folder import RunFolder
from areal_lab.runlog.replay import etas_in_words
from areal_lab.shell.display import Display, terminal_display
from areal_lab.shell.terminal import TerminalRun, add_watching_rows, interval_text, two_columns


def run_to_end(
    config: TrainConfig, folder: RunFolder | None = None, recovery: Recovery | None = None
) -> int:
    """Check, run and report; see `TerminalRun.to_end`.

    Args:
        config: settings of the run.
        folder: new run folder with the configuration; None creates it.
        recovery: run to continue, with its configuration.

    Raises:
        ConfigError: one line per problem, before any process starts.
        Exception: the error that ended the run.
    """
    with loading(config):
        resolved = resolve(config) if recovery is None else resolve_recovery(recovery)
    state = RunState()
    terminal = TerminalRun(
        results=summary_table,
        saved=lambda: _saved(state),
        waiting_for=lambda: state.waiting_for,
        counts=lambda: state.counts,
        files="pictures, trace and weights",
    )

    async def body(display: Display) -> tuple[Path, dict[str, Any]]:
        result = await run(
            resolved,
            on_step=lambda _: None,
            display=display,
            stop=terminal.stop,
            state=state,
            folder=folder,
            recovery=recovery,
        )
        return result.folder, result.summary

    return terminal.to_end(body)


@contextmanager
def loading(config: TrainConfig) -> Iterator[None]:
    """Show that the environment of a config is being loaded, which can take minutes."""
    if config.dataset.type != "environment":
        yield
        return
    with terminal_display(str, str) as display:
        display.phase(f"loading {config.environment.name}")
        yield


def _saved(state: RunState) -> str:
    saved = None if state.performer is None else state.performer.last_checkpoint
    return "nothing was saved" if saved is None else f"version {saved} is saved"


def summary_table(summary: Mapping[str, Any]) -> Table:
    """Return the results of a run as a table for the terminal."""
    table = two_columns()
    for when in ("before", "after"):
        table.add_row(f"held-out reward {when}", interval_text(summary[f"reward_{when}"]))
    if best := summary.get("best"):
        width = "" if best["ci95"] is None else f" +- {best['ci95']:.3f} (95 %)"
        mixed = "" if not best["later_tokens"] else ", of several versions"
        table.add_row(
            "best checkpoint", f"step {best['version']}: {best['reward']:.3f}{width}{mixed}"
        )
    if evaluations := summary.get("evaluations"):
        table.add_row("evaluations", _evaluations(evaluations))
    lag = summary["lag"]["token"]
    table.add_row(
        "trained on",
        f"{summary['trained_samples']:,} samples, {summary['trained_tokens']:,} tokens "
        f"in {summary['steps']} steps",
    )
    table.add_row("wall time", f"{summary['wall_s']:.0f} s, {summary['training_s']:.0f} s training")
    table.add_row(
        "staleness",
        f"eta {etas_in_words(summary['eta'], summary['eta_changes'])}; "
        f"token lag mean {lag['mean']:.2f}, max {lag['max']:.0f} versions",
    )
    if pauses := summary["pauses"]:
        times = {1: "once", 2: "twice"}.get(pauses, f"{pauses} times")
        table.add_row("paused by hand", f"{times}, {summary['paused_s']:.0f} s in total")
    if recoveries := summary["recoveries"]:
        table.add_row(
            "continued",
            f"{recoveries} times; {summary['restarted_groups']} groups started over",
        )
    table.add_row(
        "interruptions",
        f"{summary['interruptions']}; {summary['multi_version_share']:.1%} of samples have "
        f"tokens from two or more versions; {summary['recomputed_tokens']:,} tokens recomputed",
    )
    if summary.get("host_losses"):
        table.add_row("hosts", f"{summary['host_losses']} lost")
    if summary["engine_losses"]:
        table.add_row(
            "engines",
            f"{summary['engine_losses']} lost, {summary['engine_restarts']} came back; "
            f"{summary['resubmitted_samples']:,} samples resubmitted to other engines, "
            f"keeping {summary['kept_tokens']:,} tokens" + _discarded(summary["discarded_tokens"]),
        )
    # 0 mismatches is shown too if versions changed during the run.
    if summary["version_mismatches"] or summary["interruptions"] or summary["steps"]:
        table.add_row("version mismatches", _mismatches(summary["version_mismatches"]))
    add_watching_rows(table, summary)
    table.add_row("groups", _groups(summary))
    if found := summary.get("environment"):
        values = (f"{name.removeprefix(ENVIRONMENT)} {one:.3g}" for name, one in found.items())
        table.add_row("environment, last step", ", ".join(values))
    if speed := summary.get("trainer_speed"):
        table.add_row("trainer speed", speed_text(speed))
    for name, use in summary["processes"].items():
        table.add_row(name, f"busy {use['busy_share']:.0%} of the time")
    return table


def _evaluations(evaluations: Mapping[str, Any]) -> str:
    """Describe the versions measured on held-out problems, and the missed steps."""
    text = f"{len(evaluations['versions'])} versions on held-out problems"
    if mixed := evaluations["mixed"]:
        text += f"; interrupted by weight updates: steps {', '.join(map(str, mixed))}"
    if missed := evaluations["missed"]:
        text += f"; not evaluated: steps {', '.join(map(str, missed))}"
    return text


def _groups(summary: Mapping[str, Any]) -> str:
    """Describe groups that were not trained on, and batches that became smaller."""
    text = f"{summary['dropped']} dropped, {summary['filtered']} filtered"
    if reasons := summary["filtered_by_reason"]:
        text += f" ({', '.join(f'{count} {why}' for why, count in sorted(reasons.items()))})"
    if smaller := summary["smaller_batches"]:
        text += f"; {smaller} smaller batch{'es' if smaller > 1 else ''}"
    return text


def speed_text(speed: Mapping[str, float]) -> str:
    """Median speed of a trainer process, and the peak of its GPU's memory, where they are known."""
    text = f"{speed['trainer_tokens_per_s']:,.0f} tokens/s"
    if (tflop := speed.get("trainer_tflop_per_s")) is not None:
        text += f", {tflop:.3g} TFLOP/s" if tflop >= 1 else f", {1e3 * tflop:.3g} GFLOP/s"
    if (mfu := speed.get("mfu")) is not None:
        text += f", MFU {mfu:.1%}"
    text += " per process"
    if (peak := speed.get("gpu_peak_allocated_bytes")) is not None:
        reserved = speed["gpu_peak_reserved_bytes"]
        text += f"; GPU memory up to {peak / 2**30:.1f} GiB"
        text += f" ({reserved / 2**30:.1f} GiB with free blocks)"
    return text


def _mismatches(count: int) -> str:
    """Describe servers that reported another version than the pushed one."""
    return f"{count}; tokens of unknown versions were discarded" if count else "0"


def _discarded(tokens: int) -> str:
    return f"; {tokens:,} tokens discarded" if tokens else ""


def start_run(config: TrainConfig | Source) -> AttachedRun:
    """Check a configuration, start its run in another process, and return immediately.

    The run ends by itself or with `stop`, but not with this process.

    Args:
        config: settings of the run, or an argument of `load_config`. A reward function or a loss is
            named by its import path (`train` also takes functions).

    Raises:
        ConfigError: one line per problem, before any process starts.
        OSError: the run folder cannot be made.
    """
    config = train_config(config)
    resolve(config)
    folder = RunFolder.create(config).path
    open_mailbox(folder)
    with (folder / OUTPUT).open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C and a closed terminal do not reach it
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    write_presence(folder, new_presence(process.pid, "loading the program"))
    # A child that nothing waits for stays as a zombie of this process after its end.
    threading.Thread(target=process.wait, name=f"wait for {folder.name}", daemon=True).start()
    return attach_run(folder)


def main(folder: Path) -> int:
    """Run in this process until the end; returns the exit code."""
    config = load_config(folder / "config.yaml", files_are_given=False)  # `start_run` checked it
    return run_to_end(config, folder=RunFolder(folder))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
