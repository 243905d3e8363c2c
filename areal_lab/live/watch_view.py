"""A run in a terminal: rewards, lags, speed, activity of each process, alarms, time left.

run folder --Watched.look--> RecordedRun, Snapshot --view--> rich

Reads only the lines appended since the last look.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Final

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from areal_lab.host.terminal import printable
from areal_lab.live.attach import attach_run
from areal_lab.live.snapshot import Snapshot
from areal_lab.metrics.alarm import Alarm
from areal_lab.models.checkpoint_files import step_of
from areal_lab.runlog.activity import idle_by_cause, label
from areal_lab.runlog.alarm_log import read_alarms
from areal_lab.runlog.held_out import read_held_out
from areal_lab.runlog.read_run import RecordedRun

_BARS: Final = "▁▂▃▄▅▆▇█"
_STEPS_OF_PACE: Final = 20
_PROCESSES_SHOWN: Final = 6
_SHOWN: Final = (
    ("reward_mean", "reward", ".3f"),
    ("lag_token_mean", "lag, versions", ".2f"),
    ("drift", "drift, nats", ".3f"),
    ("ratio_mean", "ratio", ".3f"),
    ("entropy", "entropy, nats", ".3f"),
    ("truncated_share", "cut responses", ".0%"),
    ("tokens_per_s", "tokens/s", ",.0f"),
    ("step_s", "step, s", ".1f"),
)


class Watched:
    """Follow one run folder."""

    def __init__(self, folder: Path) -> None:
        self._run = attach_run(folder)

    def look(self) -> tuple[RecordedRun | None, Snapshot]:
        """Current state of the run; no record before its log begins."""
        snapshot = self._run.snapshot()
        try:
            return self._run.read(), snapshot
        except ValueError:  # the log does not exist yet
            return None, snapshot

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._run.folder


def over(run: RecordedRun | None, snapshot: Snapshot) -> bool:
    """Return whether nothing will be appended any more.

    A co-simulated run has no process.json, so only its summary shows that it has ended.
    """
    if run is not None and run.log.header.mode == "cosim":
        return bool(run.summary)
    return snapshot.alive is False


def view(run: RecordedRun | None, snapshot: Snapshot, folder: Path, width: int) -> RenderableType:
    """Display of a run; `run` is None before its log begins."""
    head = Text(printable(folder.name), style="bold")
    if run is None:
        return Group(head, _plain(str(snapshot)))
    parts: list[RenderableType] = [head, _plain(_state(run, snapshot))]
    parts += [Rule(style="dim"), _curves(run, folder, width), Rule(style="dim"), _processes(run)]
    alarms = read_alarms(folder, run.metrics, run.settings, _eta(run))
    parts += [Rule(style="dim"), *_alarms(alarms)]
    return Group(*parts)


def sparkline(values: Sequence[float], cells: int) -> str:
    """Values as bars between their minimum and maximum; means where there are more than cells.

    Values that are not finite are left out.
    """
    values = [one for one in values if math.isfinite(one)]
    if not values:
        return ""
    count = min(cells, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    least, most = min(means), max(means)
    if most <= least:
        return _BARS[0] * count
    top = len(_BARS) - 1
    return "".join(_BARS[round((one - least) / (most - least) * top)] for one in means)


def time_left_s(run: RecordedRun, total_steps: int | None) -> float | None:
    """Seconds to the last step at the pace of the newest ones; None if unknown."""
    newest = run.metrics[-_STEPS_OF_PACE:]
    pace = [float(line["step_s"]) for line in newest if "step_s" in line]
    done = [int(line["step"]) for line in newest if "step" in line]
    if not pace or not done or total_steps is None:
        return None
    return max(0, total_steps - done[-1]) * median(pace)


def _state(run: RecordedRun, snapshot: Snapshot) -> str:
    simulated = run.log.header.mode == "cosim"
    text = str(snapshot)
    if simulated:
        steps = f"step {snapshot.step} of {snapshot.total_steps}; eta {_eta(run):g}"
        text = f"co-simulated; {'ended' if run.summary else 'running, or killed'}; {steps}"
    left_s = time_left_s(run, snapshot.total_steps)
    if left_s and not over(run, snapshot):
        text += f"; {_duration(left_s)} left" + (" of the simulated cluster" if simulated else "")
    return text


def _curves(run: RecordedRun, folder: Path, width: int) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", style="dim", no_wrap=True)
    cells = max(10, width - 50)

    def row(name: str, values: Sequence[float], form: str) -> None:
        if values:
            span = f"{min(values):{form}} to {max(values):{form}}"
            # Measurements are rarer than steps: each takes as many cells as its steps.
            count = max(len(values), min(cells, len(run.metrics)))
            wide = [values[at * len(values) // count] for at in range(count)]
            table.add_row(name, f"{values[-1]:{form}}", sparkline(wide, cells), span)

    table.add_row("", "now", f"first to newest step ({len(run.metrics)})", "range")
    measured = read_held_out(folder, run.metrics)
    row("held-out reward", [one.reward for one in measured], ".3f")
    if len(measured) > 1:
        newest = measured[-1]
        about = "; ".join([f"step {newest.version}", *newest.labels()])
        table.add_row("", "", f"newest: {about}; best: step {_best(folder) or '?'}")
    for metric, name, form in _SHOWN:
        row(name, [line[metric] for line in run.metrics if metric in line], form)
    return table


def _best(folder: Path) -> int | None:
    """Step of the best checkpoint; None without one."""
    checkpoint = folder / "best"
    if not checkpoint.is_dir():
        return None
    return step_of(checkpoint.resolve().name)


def _processes(run: RecordedRun) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    uses = list(idle_by_cause(run.log).items())
    for name, use in uses[:_PROCESSES_SHOWN]:
        idle = [
            f"{label(cause)} {seconds / use.total_s:.0%}"
            for cause, seconds in list(use.idle_s.items())[:2]
            if use.total_s and seconds / use.total_s >= 0.01
        ]
        table.add_row(_plain(name), f"busy {use.busy_share:.0%}", _plain("; ".join(idle)))
    if len(uses) > _PROCESSES_SHOWN:
        table.add_row("", "", f"and {len(uses) - _PROCESSES_SHOWN} more")
    return table


def _alarms(alarms: Sequence[Alarm]) -> list[RenderableType]:
    lasting = [one for one in alarms if one.ended_step is None]
    lines: list[RenderableType] = [Text(printable(str(one)), style="red") for one in lasting]
    if not lasting:
        lines.append(Text("no alarm", style="dim"))
    past = [
        f"{one.name.replace('_', ' ')} (steps {one.since_step} to {one.ended_step})"
        for one in alarms
        if one.ended_step is not None
    ]
    if past:
        lines.append(Text(printable(f"over: {', '.join(past)}"), style="dim"))
    return lines


def _plain(text: str) -> Text:
    """Text of a log without markup and escape sequences: it may be untrusted."""
    return Text(printable(text))


def _eta(run: RecordedRun) -> float:
    return float(str(run.log.header.limits.get("eta", "inf")))


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
