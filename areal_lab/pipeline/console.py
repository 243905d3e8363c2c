"""A training run in a terminal: progress, Ctrl-C, a summary at the end, an exit code.

Ctrl-C once     finish the step, save, exit 130
Ctrl-C twice    stop at once, exit 130; every process ends and the run folder stays readable
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from areal_lab.config.schema import TrainConfig
from areal_lab.host.terminal import printable
from areal_lab.pipeline.progress import Display, terminal_display
from areal_lab.pipeline.resume.recovery import Recovery
from areal_lab.pipeline.run import RunResult, prepare, prepare_recovery, run
from areal_lab.pipeline.state import RunState, StopSignal
from areal_lab.runlog.folder import RunFolder

INTERRUPTED: Final = 130


def run_to_end(
    config: TrainConfig, folder: RunFolder | None = None, recovery: Recovery | None = None
) -> int:
    """Check, run and report; prints the run folder as the last line on standard output.

    Args:
        folder: a fresh run folder with the configuration; None creates it.
        recovery: continue this run, with its configuration.

    Returns:
        The exit code: 0, or 130 after Ctrl-C.

    Raises:
        ConfigError: in one line, before any process starts.
        Exception: whatever ended the run early.
    """
    problems = prepare(config) if recovery is None else prepare_recovery(recovery)
    state, stop = RunState(), StopSignal()

    async def until_done(display: Display) -> RunResult:
        _stop_on_interrupt(stop)
        return await run(
            config,
            problems,
            on_step=lambda _: None,
            display=display,
            stop=stop,
            state=state,
            folder=folder,
            recovery=recovery,
        )

    try:
        with terminal_display(lambda: state.waiting_for, lambda: state.counts) as display:
            result = asyncio.run(until_done(display))
    except asyncio.CancelledError:
        saved = state.performer.last_checkpoint if state.performer is not None else None
        what = "nothing was saved" if saved is None else f"version {saved} is saved"
        Console(stderr=True).print(f"stopped at once, as requested; {what}", style="red")
        return INTERRUPTED
    console = Console()
    console.print(summary_table(result.summary))
    console.print(f"pictures, trace and weights are in {result.folder}", soft_wrap=True)
    print(result.folder)
    return INTERRUPTED if stop.requested else 0


def _stop_on_interrupt(stop: StopSignal) -> None:
    """The first Ctrl-C requests an orderly end, the second cancels the run."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "called from a coroutine"

    def interrupt() -> None:
        if stop.requested:
            task.cancel()
        stop.request()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)


def summary_table(summary: dict[str, Any]) -> Table:
    """The results of a run as a table for people."""
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_column(style="dim", justify="right")
    table.add_column()
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
        f"eta {_etas(summary)}; token lag mean {lag['mean']:.2f}, max {lag['max']:.0f} versions",
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
    # Where versions changed, 0 mismatches is a result worth showing.
    if summary["version_mismatches"] or summary["interruptions"] or summary["steps"]:
        table.add_row("version mismatches", _mismatches(summary["version_mismatches"]))
    add_watching_rows(table, summary)
    table.add_row("groups", _groups(summary))
    for name, use in summary["processes"].items():
        table.add_row(name, f"busy {use['busy_share']:.0%} of the time")
    return table


def add_watching_rows(table: Table, summary: Mapping[str, Any]) -> None:
    """The alarms of a run, and what its sinks got."""
    for alarm in summary.get("alarms") or ():
        ended = alarm["ended_step"]
        until = "to the end" if ended is None else f"to {ended}"
        name = alarm["name"].replace("_", " ")
        said = f"{name}, step {alarm['since_step']} {until}: {alarm['what']}"
        table.add_row("alarm", Text(said), style="red")
    for name, sink in (summary.get("sinks") or {}).items():
        problems = [
            *([f"{sink['missing_points']} points missing"] if sink["missing_points"] else []),
            *([f"{sink['failures']} failures, first {sink['error']}"] if sink["failures"] else []),
        ]
        got = f"{sink['points']} points; {sink['where']}" if sink["where"] else "not opened"
        table.add_row(name, Text(printable("; ".join([got, *problems]))))


def _evaluations(evaluations: Mapping[str, Any]) -> str:
    """Versions that were measured on held-out problems, and steps that were not."""
    text = f"{len(evaluations['versions'])} versions on held-out problems"
    if mixed := evaluations["mixed"]:
        text += f"; interrupted by weight updates: steps {', '.join(map(str, mixed))}"
    if missed := evaluations["missed"]:
        text += f"; not evaluated: steps {', '.join(map(str, missed))}"
    return text


def _groups(summary: Mapping[str, Any]) -> str:
    """Groups that were not trained on, and batches that they left smaller."""
    text = f"{summary['dropped']} dropped, {summary['filtered']} filtered"
    if reasons := summary["filtered_by_reason"]:
        text += f" ({', '.join(f'{count} {why}' for why, count in sorted(reasons.items()))})"
    if smaller := summary["smaller_batches"]:
        text += f"; {smaller} smaller batch{'es' if smaller > 1 else ''}"
    return text


def _etas(summary: dict[str, Any]) -> str:
    """The staleness bound at the start, and what it was changed to."""
    changes = [eta for _, eta in summary["eta_changes"]]
    return ", then ".join(f"{float(eta):g}" for eta in (summary["eta"], *changes))


def _mismatches(count: int) -> str:
    """Servers that reported another version than that of the weights they were sent."""
    return f"{count}; tokens of unknown versions were discarded" if count else "0"


def _discarded(tokens: int) -> str:
    """Tokens that were generated and not used."""
    return f"; {tokens:,} tokens discarded" if tokens else ""


def interval_text(reward: dict[str, Any] | None) -> str:
    """A mean with its confidence interval, or that it was not measured."""
    if reward is None:
        return "not measured"
    ci95 = "" if reward["ci95"] is None else f" +- {reward['ci95']:.3f} (95 %)"
    return f"{reward['mean']:.3f}{ci95} over {reward['n']} problems"
