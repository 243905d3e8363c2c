"""Report of a run, from the files in its folder: pictures, a trace and text.

    run folder --write_report--> reward.png timeline.png staleness.png trace.json
               --format_run----> text for `areal-lab trace RUN`

The report of a killed run covers what the run had written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from areal_lab.control.events import EngineJoined, EngineLost, EngineRetired
from areal_lab.host.durable import replace_text
from areal_lab.runlog.activity import idle_by_cause, label, training_window
from areal_lab.runlog.chrome_trace import chrome_trace
from areal_lab.runlog.held_out import read_held_out
from areal_lab.runlog.incidents import in_words, incidents, requests
from areal_lab.runlog.lags import ledger_of
from areal_lab.runlog.read_run import RecordedRun, read_run
from areal_lab.runlog.records import IMPORTED, Log
from areal_lab.runlog.replay import check_replay, eta_changes, etas_in_words
from areal_lab.runlog.summary import lag_summary, run_status

_MAX_STEPS = 40
"""Most lines in the table of steps; longer runs show evenly spaced steps."""
_MIN_SHARE = 0.0005
"""Smallest listed share of a process's time: 0.0 % is left out."""
_COLUMNS = (  # title, key in metrics.jsonl, format
    ("step", "step", "{:.0f}"),
    ("time s", "time_s", "{:.1f}"),
    ("reward", "reward_mean", "{:.3f}"),
    ("loss", "loss", "{:+.4f}"),
    ("grad norm", "grad_norm", "{:.3g}"),
    ("entropy", "entropy", "{:.3f}"),
    ("lag mean", "lag_token_mean", "{:.2f}"),
    ("lag max", "lag_token_max", "{:.0f}"),
    ("tokens", "trained_tokens", "{:.0f}"),
    ("tokens/s", "tokens_per_s", "{:.0f}"),
)

_LAGS = {
    "before_queue": "head, before the queue",
    "in_queue": "head, in the queue",
    "offered": "before the queue, all offered",
}
"""Names of the parts of the lag in the table of lags."""


def write_report(run_dir: Path) -> list[Path]:
    """Draw the pictures of a run and export its trace into its folder; returns the paths.

    Raises:
        ValueError: if the folder is not a run folder, or its log is damaged before its end.
    """
    run = read_run(run_dir)
    return [*draw_all(run, run_dir), export_trace(run_dir, run_dir / "trace.json")]


def export_trace(run_dir: Path, out: Path) -> Path:
    """Write the run's Chrome trace to `out`; open it at ui.perfetto.dev or chrome://tracing."""
    trace = chrome_trace(read_run(run_dir).log)
    replace_text(out, json.dumps(trace, allow_nan=False, separators=(",", ":")))
    return out


def format_run(run_dir: Path) -> str:
    """Return the report as text: steps, phases, idle time by cause, lags, check of the log.

    Raises:
        ValueError: if the folder is not a run folder, or its log is damaged before its end.
    """
    run = read_run(run_dir)
    sections = (
        ("", _overview(run)),
        ("Steps", _steps(run)),
        ("Time of each process during training", _processes(run)),
        ("Lag of the trained tokens and samples, in versions", _lags(run)),
        *([("Generated tokens", tokens)] if (tokens := _ledger(run)) else []),
        *([("Held-out problems", measured)] if (measured := _held_out(run)) else []),
        *([("By hand", manual)] if (manual := _requests(run)) else []),
        *([("Incidents", _incidents(run))] if any(asdict(incidents(run.log)).values()) else []),
        ("Log", _log(run)),
    )
    # A name from the log may contain a line end, which would look like another line of the report.
    single_lines = (
        [title] * bool(title) + [" ".join(line.splitlines()) for line in lines]
        for title, lines in sections
    )
    return "\n\n".join("\n".join(lines) for lines in single_lines)


def _overview(run: RecordedRun) -> list[str]:
    log = run.log
    start_s, end_s = training_window(log)
    lines = [
        run.title,
        f"  folder      {run.folder}",
        f"  ended       {run_status(log)}",
        *([] if log.header.mode == IMPORTED else [_schedule(log)]),
        f"  phases      {start_s:.1f} s before training, {end_s - start_s:.1f} s training, "
        f"{log.end_s - end_s:.1f} s after",
    ]
    for key, name in (("reward_before", "before"), ("reward_after", "after")):
        if measured := run.summary.get(key):
            width = measured["ci95"]
            interval = f" ± {width:.3f} (95 %)" if width is not None else ""
            lines.append(
                f"  {name:<10}  held-out reward {measured['mean']:.3f}{interval}, "
                f"{measured['n']} problems"
            )
    if error := run.summary.get("error"):
        lines.append(f"  error       {error}")
    return lines


def _schedule(log: Log) -> str:
    limits = log.header.limits
    etas = etas_in_words(limits.get("eta"), eta_changes(log))
    return (
        f"  schedule    {limits.get('schedule')}, eta {etas}, "
        f"{limits.get('order')}, at most {limits.get('max_in_flight')} groups in flight"
    )


def _steps(run: RecordedRun) -> list[str]:
    if not run.metrics:
        return ["  no training step finished"]
    every = -(-len(run.metrics) // _MAX_STEPS)
    last = len(run.metrics) - 1
    shown = [line for i, line in enumerate(run.metrics) if i % every == 0 or i == last]
    columns = [column for column in _COLUMNS if any(column[1] in line for line in shown)]
    rows = [
        [form.format(line[key]) if key in line else "-" for _, key, form in columns]
        for line in shown
    ]
    return _table([title for title, _, _ in columns], rows)


def _held_out(run: RecordedRun) -> list[str]:
    """Lines of the held-out measurements, if some were made during training."""
    measured = read_held_out(run.folder, run.metrics)
    if len(measured) < 3:
        return []
    best = (run.summary.get("best") or {}).get("version")
    ks = sorted({int(k) for one in measured for k in one.pass_at})
    titles = ["step", "reward", "± 95 %", *(f"pass@{k}" for k in ks), ""]
    rows = [
        [
            str(one.version),
            f"{one.reward:.3f}",
            "-" if one.ci95 is None else f"{one.ci95:.3f}",
            *(f"{one.pass_at[str(k)]:.3f}" if str(k) in one.pass_at else "-" for k in ks),
            "; ".join([*(["best checkpoint"] if one.version == best else []), *one.labels()]),
        ]
        for one in measured
    ]
    lines = _table(titles, rows)
    evaluations = run.summary.get("evaluations") or {}
    if missed := evaluations.get("missed"):
        lines.append(f"  not evaluated: steps {', '.join(map(str, missed))}")
    return lines


def _processes(run: RecordedRun) -> list[str]:
    lines = []
    for name, use in idle_by_cause(run.log).items():
        if not use.total_s:
            continue
        lines.append(f"  {name}: busy {use.busy_share:.1%}, idle {use.idle_share:.1%}")
        for kind, seconds_of in (("", use.busy_s), ("idle: ", use.idle_s)):
            lines.extend(
                f"    {seconds:8.1f} s  {seconds / use.total_s:6.1%}  {kind}{label(what)}"
                for what, seconds in seconds_of.items()
                if seconds >= _MIN_SHARE * use.total_s
            )
    return lines or ["  training did not start"]


def _lags(run: RecordedRun) -> list[str]:
    batches = run.batches
    if not batches:
        imported = run.log.header.mode == IMPORTED
        return ["  not by token: see Steps" if imported else "  nothing was trained on"]
    rows = [
        [_LAGS.get(name, name), f"{lag['mean']:.2f}", f"{lag['max']:.0f}"]
        for name, lag in lag_summary(batches).items()
    ]
    samples = sum(batch.samples for batch in batches)
    multi = sum(batch.multi_version_samples for batch in batches)
    share = multi / samples if samples else 0.0
    return [
        *_table(["", "mean", "max"], rows),
        f"  {samples} samples, {share:.1%} of them generated by two or more versions",
    ]


def _ledger(run: RecordedRun) -> list[str]:
    """Lines of what became of the generated tokens; empty if none were reported."""
    tokens = ledger_of(run.log).tokens()
    if not tokens.generated:
        return []
    counts = {
        "generated": tokens.generated,
        "trained on": tokens.trained,
        "waiting for training": tokens.waiting,
        **{f"dropped: {reason}": count for reason, count in sorted(tokens.dropped.items())},
        "generated twice": tokens.generated_twice,
    }
    width = max(map(len, counts))
    return [
        f"  {name:<{width}}  {count:>12,}  {count / tokens.generated:6.1%}"
        for name, count in counts.items()
        if count
    ]


def _requests(run: RecordedRun) -> list[str]:
    """Lines of the requests that users sent to the run, with their times."""
    return [f"  {t_s:8.1f} s  {in_words(request)}" for t_s, request in requests(run.log)]


def _incidents(run: RecordedRun) -> list[str]:
    """Lines of lost and joined engines, and counts of losses and interruptions."""
    lines = []
    for record in run.log.events:
        match record.event:
            case EngineLost(engine=engine, returns=returns):
                after = "restarting" if returns else "for good"
                lines.append(f"  {record.t_s:8.1f} s  engine {engine} was lost ({after})")
            case EngineRetired(engine):
                lines.append(f"  {record.t_s:8.1f} s  engine {engine} was retired")
            case EngineJoined(engine=engine):
                lines.append(f"  {record.t_s:8.1f} s  engine {engine} joined")
            case _:
                pass
    counts = asdict(incidents(run.log))
    words = [f"{name.replace('_', ' ')} {count:,}" for name, count in counts.items() if count]
    return [*lines, f"  {', '.join(words)}"]


def _log(run: RecordedRun) -> list[str]:
    if run.log.header.mode == IMPORTED:
        axis = run.summary.get("time_axis", "unknown")
        return [f"  imported: no events, groups or samples; time axis: {axis}"]
    lines = []
    if run.log.cut:
        lines.append("  the last line is incomplete and was skipped: the run was killed")
    try:
        replay = check_replay(run.log)
    except ValueError as error:
        return [*lines, f"  cannot be replayed: {error}"]
    if replay.agrees:
        lines.append(
            f"  replayed: all {replay.actions} actions follow from the {replay.events} events"
        )
    else:
        lines.append(
            f"  REPLAY DIFFERS after {replay.events} events and {replay.actions} actions: "
            f"{replay.difference}"
        )
    return lines


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table with right-aligned columns, each as wide as its widest cell."""
    cells = [list(titles), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(titles))]
    return [
        "  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    ]


def draw_all(run: RecordedRun, folder: Path) -> list[Path]:
    """Draw all pictures of a run into `folder`; returns their paths."""
    # matplotlib takes half a second to import, which the text report avoids
    from areal_lab.plots.curves import draw_reward, draw_staleness
    from areal_lab.plots.style import save_picture
    from areal_lab.plots.timeline import draw_timeline

    drawn = {
        "reward.png": draw_reward(
            run.metrics,
            run.summary,
            read_held_out(run.folder, run.metrics),
            title=run.title,
        ),
        "timeline.png": draw_timeline(run.log, title=run.title),
        "staleness.png": draw_staleness(run.log, title=run.title),
    }
    return [save_picture(picture, folder / name) for name, picture in drawn.items()]
