"""The pictures of a run: reward.png, timeline.png, staleness.png.

Colors are those of Okabe and Ito, which color-blind readers can tell apart; idle time is grey or
has a pattern, never a color, and time outside training is blank.
matplotlib is imported when a picture is drawn, not when the command line starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_lab.control.activity import (
    AFTER,
    BEFORE,
    LOST,
    NOT_JOINED,
    NOTHING_ADMITTED,
    NOTHING_LEFT,
    NOTHING_TO_JUDGE,
    ON_ITS_WAY,
    PAUSED,
    PAUSED_FOR_TRAINING,
    WAIT_BATCH,
    WAIT_EVENTS,
    WAIT_REWARDS,
    WAIT_WEIGHTS,
    Stretch,
    activity,
    training_window,
)
from areal_lab.control.eventlog import GroupRecord, engine_process
from areal_lab.control.events import Interrupt, Resume, WeightsPushed
from areal_lab.control.lags import mean_lag, total
from areal_lab.pipeline.recorded import RecordedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, SKY, GREEN, YELLOW = "#0072B2", "#56B4E9", "#009E73", "#F0E442"
ORANGE, VERMILION, PURPLE, BLACK = "#E69F00", "#D55E00", "#CC79A7", "#000000"
GREY = "#8C8C8C"

_KIND_COLORS = {
    "decode": BLUE,
    "generate": BLUE,
    "prefill and decode": SKY,
    "prefill": "#44AA99",
    "load weights": BLACK,
    "forward/backward": ORANGE,
    "train": ORANGE,
    "proximal log-probs": YELLOW,
    "optimizer": VERMILION,
    "export weights": PURPLE,
    "save": "#6A3D9A",
    "judge": GREEN,
}
_OTHER_COLORS = ("#999933", "#882255", "#44AA99", "#AA4499", "#661100")
_IDLE_LOOKS = {  # face, pattern
    WAIT_BATCH: ("#DDDDDD", ""),
    NOTHING_ADMITTED: ("#FFFFFF", "...."),
    WAIT_WEIGHTS: ("#FFFFFF", "////"),
    PAUSED: ("#FFFFFF", "xxxx"),
    PAUSED_FOR_TRAINING: ("#DDDDDD", "xx"),
    WAIT_REWARDS: ("#FFFFFF", "\\\\\\\\"),
    ON_ITS_WAY: ("#AAAAAA", ""),
    NOTHING_LEFT: ("#FFFFFF", "----"),
    LOST: ("#FFFFFF", "||||"),
    NOT_JOINED: ("#F2F2F2", ""),
}
_OTHER_IDLE = ("#FFFFFF", "++")
_BLANK = frozenset({BEFORE, AFTER, NOTHING_TO_JUDGE, WAIT_EVENTS})
"""Idleness that is no loss: nothing is drawn."""
_VERSION_COLORS = ("#332288", "#88CCEE", "#CC6677", "#DDCC77", "#117733", "#AA4499")
"""Tol's muted scheme: other colors than those of what processes do."""
_ZOOM_S = 20.0
_MOST_SLOTS = 64
_LEGEND_COLUMNS = 5
_LEAST_SHARE = 0.001
"""Of the run: what took less is drawn, but not explained in the legend."""
_RUNNING_MEAN_STEPS = 5

_STYLE: dict[Any, Any] = {
    "figure.dpi": 130,
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "hatch.linewidth": 0.5,
}


def draw_all(run: RecordedRun, folder: Path) -> list[Path]:
    """Draw every picture of a run into `folder`; returns their paths."""
    return [
        _draw(run, folder / "reward.png", draw_reward),
        _draw(run, folder / "timeline.png", draw_timeline),
        _draw(run, folder / "staleness.png", draw_staleness),
    ]


def _draw(run: RecordedRun, path: Path, draw: Callable[[RecordedRun], Figure]) -> Path:
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        figure = draw(run)
        # A bold letter is about two thirds of its size wide: a long title gets smaller ones.
        fitting = 0.98 * 72 * figure.get_figwidth() / (0.67 * len(run.title))
        size = min(10.0, fitting)
        figure.suptitle(run.title, x=0.01, ha="left", fontsize=size, fontweight="bold")
        figure.savefig(path)
    return path


def _figure(width: float, height: float) -> Figure:
    # Not pyplot: that keeps figures alive and asks for a display.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height))


# --- reward --------------------------------------------------------------------------------------


def draw_reward(run: RecordedRun) -> Figure:
    """Training reward per step, its running mean, and the held-out reward before and after."""
    figure = _figure(8, 4.2)
    axes: Axes = figure.subplots()
    steps = [int(line["step"]) for line in run.metrics]
    rewards = [float(line["reward_mean"]) for line in run.metrics]
    if steps:
        axes.plot(steps, rewards, "o", color=SKY, markersize=4, label="training batch, sampled")
    if len(steps) >= _RUNNING_MEAN_STEPS:
        means = _running_mean(rewards, _RUNNING_MEAN_STEPS)
        label = f"mean of the last {_RUNNING_MEAN_STEPS} steps"
        axes.plot(steps, means, color=BLUE, linewidth=2, label=label)
    first, last = (steps[0] - 1, steps[-1]) if steps else (0, 1)
    beside = 0.015 * (last - first)  # not on top of the last batch
    for key, step, label, color in (
        ("reward_before", float(first), "held-out, before", GREY),
        ("reward_after", last + beside, "held-out, after", VERMILION),
    ):
        held_out = run.summary.get(key)
        if held_out:
            _held_out_point(axes, held_out, step, label, color)
    axes.set(xlabel="training step", ylabel="mean reward")
    axes.set_xlim(first - 0.02 * (last - first) - 0.2, last + 0.03 * (last - first) + 0.2)
    _whole_numbers(axes)
    _reward_limits(axes, rewards, run.summary)
    if len(steps) > 1:
        _wall_seconds_on_top(axes, steps, [float(line["time_s"]) for line in run.metrics], first)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=2)
    if not steps:
        _nothing_yet(axes, "no training step was finished")
    return figure


def _held_out_point(
    axes: Axes, held_out: Mapping[str, Any], step: float, label: str, color: str
) -> None:
    mean, width = float(held_out["mean"]), held_out["ci95"]
    text = f"{label}: {mean:.3f}" + (f" ± {width:.3f}" if width is not None else "")
    axes.errorbar(
        [step],
        [mean],
        yerr=None if width is None else [width],
        fmt="D",
        color=color,
        markersize=6,
        capsize=5,
        linewidth=1.6,
        zorder=5,
        clip_on=False,
        label=f"{text} (95 %, n = {held_out['n']})",
    )


def _reward_limits(axes: Axes, rewards: Sequence[float], summary: Mapping[str, Any]) -> None:
    points = list(rewards)
    for key in ("reward_before", "reward_after"):
        if held_out := summary.get(key):
            width = held_out["ci95"] or 0.0
            points += [held_out["mean"] - width, held_out["mean"] + width]
    if not points or (min(points) >= 0 and max(points) <= 1.1):
        axes.set_ylim(0, max([1.04, *(point + 0.01 for point in points)]))
        axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])


def _wall_seconds_on_top(
    axes: Axes, steps: Sequence[int], times_s: Sequence[float], first: int
) -> None:
    import numpy as np

    known_steps = np.array([first, *steps], dtype=float)
    known_s = np.array([0.0, *times_s])
    slope = known_s[-1] / max(1.0, known_steps[-1] - known_steps[0])
    margin = known_steps[-1] - known_steps[0] + 1  # straight on beyond both ends
    known_steps = np.concatenate(([first - margin], known_steps, [steps[-1] + margin]))
    known_s = np.concatenate(([-margin * slope], known_s, [known_s[-1] + margin * slope]))
    top = axes.secondary_xaxis(
        "top",
        functions=(
            lambda step: np.interp(np.asarray(step, float), known_steps, known_s),
            lambda second: np.interp(np.asarray(second, float), known_s, known_steps),
        ),
    )
    top.set_xlabel("seconds since training began")


def _running_mean(values: Sequence[float], width: int) -> list[float]:
    windows = [values[max(0, end - width) : end] for end in range(1, len(values) + 1)]
    return [sum(window) / len(window) for window in windows]


# --- timeline ------------------------------------------------------------------------------------


def draw_timeline(run: RecordedRun) -> Figure:
    """What each process did: the whole run, a stretch of it, and the groups in that stretch."""
    activities = activity(run.log)
    window = (0.0, max(run.log.end_s, 1.0))
    zoom = _zoom_window(*training_window(run.log))
    slots = _slots([g for g in run.log.groups if g.t_s < zoom[1] and g.generated_s > zoom[0]])
    rows = 0.5 * max(1, len(activities)) + 0.45
    shown = min(len(slots), _MOST_SLOTS)
    heights = [rows, rows, max(0.9, 0.4 + (0.16 if shown <= _MOST_SLOTS / 2 else 0.09) * shown)]
    looks = _Looks(activities)
    handles, labels = looks.legend(least_s=_LEAST_SHARE * window[1])
    legend_rows = -(-len(labels) // _LEGEND_COLUMNS)
    figure = _figure(12, sum(heights) + 2.0 + 0.2 * legend_rows)
    whole, part, below = figure.subplots(3, 1, height_ratios=heights)
    pushes = [r.t_s for r in run.log.events if isinstance(r.event, WeightsPushed)]
    _draw_rows(whole, activities, looks, window)
    if pushes:  # an empty line without clipping upsets the layout
        whole.plot(pushes, [-0.62] * len(pushes), "v", color=BLACK, markersize=3.5, clip_on=False)
    whole.set_title("the whole run; triangles: the engines have new weights", pad=11)
    _name_what_is_outside(whole, run)
    whole.axvspan(*zoom, ymin=0.01, ymax=0.99, fill=False, edgecolor=BLACK, linewidth=1.4)
    _draw_rows(part, activities, looks, zoom)
    _mark(part, [t_s for t_s in pushes if zoom[0] <= t_s <= zoom[1]])
    length_s = zoom[1] - zoom[0]
    part.set_title(f"{length_s:.0f} s of it (framed above); dashed: the engines have new weights")
    _draw_groups(below, slots, run, zoom)
    below.set_xlabel("seconds since the run's log began")
    if labels:
        figure.legend(handles, labels, loc="outside lower center", ncols=_LEGEND_COLUMNS)
    return figure


class _Looks:
    """A color for everything done, a pattern for every cause of idleness."""

    def __init__(self, activities: Mapping[str, Sequence[Stretch]]) -> None:
        self.seconds: dict[tuple[bool, str], float] = {}
        for stretch in (s for stretches in activities.values() for s in stretches):
            key = (stretch.busy, stretch.name)
            self.seconds[key] = self.seconds.get(key, 0.0) + stretch.end_s - stretch.start_s
        ordered = sorted(self.seconds, key=lambda key: (not key[0], -self.seconds[key]))
        busy = [name for is_busy, name in ordered if is_busy]
        idle = [name for is_busy, name in ordered if not is_busy and name not in _BLANK]
        others = [name for name in busy if name not in _KIND_COLORS]
        colors = {
            **_KIND_COLORS,
            **{n: _OTHER_COLORS[i % len(_OTHER_COLORS)] for i, n in enumerate(others)},
        }
        self.of: dict[tuple[bool, str], dict[str, Any]] = {
            (True, name): {"facecolor": colors[name], "linewidth": 0} for name in busy
        }
        for name in idle:
            face, pattern = _IDLE_LOOKS.get(name, _OTHER_IDLE)
            look = {"facecolor": face, "edgecolor": "#777777", "hatch": pattern, "linewidth": 0}
            self.of[(False, name)] = look

    def legend(self, *, least_s: float) -> tuple[list[Any], list[str]]:
        """Handles and labels, what was done before what was waited for; none of specks."""
        from matplotlib.patches import Patch

        shown = [key for key in self.of if self.seconds[key] >= least_s]
        labels = [name if busy else f"idle: {name}" for busy, name in shown]
        return [Patch(**self.of[key]) for key in shown], labels


def _draw_rows(
    axes: Axes,
    activities: Mapping[str, Sequence[Stretch]],
    looks: _Looks,
    window: tuple[float, float],
) -> None:
    names = list(activities)
    for row, name in enumerate(names):
        pieces: dict[tuple[bool, str], list[tuple[float, float]]] = {}
        for stretch in activities[name]:
            start_s, end_s = max(stretch.start_s, window[0]), min(stretch.end_s, window[1])
            key = (stretch.busy, stretch.name)
            if end_s > start_s and key in looks.of:
                pieces.setdefault(key, []).append((start_s, end_s - start_s))
        for key, ranges in pieces.items():
            axes.broken_barh(ranges, (row - 0.36, 0.72), **looks.of[key])
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.set_xlim(window)
    axes.grid(visible=False)
    if not names:
        _nothing_yet(axes, "the log has no process")


def _pauses(run: RecordedRun) -> list[tuple[float, float]]:
    pauses = []
    begun_s: float | None = None
    for record in run.log.actions:
        if isinstance(record.action, Interrupt):
            begun_s = record.t_s
        elif isinstance(record.action, Resume) and begun_s is not None:
            pauses.append((begun_s, record.t_s))
            begun_s = None
    return pauses if begun_s is None else [*pauses, (begun_s, run.log.end_s)]


def _name_what_is_outside(axes: Axes, run: RecordedRun) -> None:
    start_s, end_s = training_window(run.log)
    for begin_s, stop_s, text in (
        (0.0, start_s, "before\ntraining"),
        (end_s, run.log.end_s, "after\ntraining"),
    ):
        if stop_s - begin_s > 0.04 * run.log.end_s:
            middle_s = (begin_s + stop_s) / 2
            axes.text(middle_s, 0, text, fontsize=7, color="#555555", ha="center", va="center")


def _slots(groups: Sequence[GroupRecord]) -> list[list[GroupRecord]]:
    """Groups in rows without overlap, engine by engine; each takes the first free row."""
    slots: list[list[GroupRecord]] = []
    for group in sorted(groups, key=lambda g: (g.engine, g.t_s, g.group)):
        for slot in slots:
            if slot[-1].engine == group.engine and slot[-1].generated_s <= group.t_s:
                slot.append(group)
                break
        else:
            slots.append([group])
    return slots


def _draw_groups(
    axes: Axes,
    slots: Sequence[Sequence[GroupRecord]],
    run: RecordedRun,
    window: tuple[float, float],
) -> None:
    """A bar for each group; its color changes with the weights it is generated with."""
    shown = slots[:_MOST_SLOTS]
    pushes = [
        (r.t_s, r.event.version) for r in run.log.events if isinstance(r.event, WeightsPushed)
    ]
    for row, group in ((row, group) for row, slot in enumerate(shown) for group in slot):
        cuts = [(t_s, v) for t_s, v in pushes if group.t_s < t_s < group.generated_s]
        versions = [v for t_s, v in pushes if t_s <= group.t_s]
        start_s, version = group.t_s, versions[-1] if versions else 0
        for end_s, following in [*cuts, (group.generated_s, version)]:
            color = _VERSION_COLORS[version % len(_VERSION_COLORS)]
            axes.broken_barh([(start_s, end_s - start_s)], (row - 0.4, 0.8), facecolor=color)
            start_s, version = end_s, following
        # Where one answer ends and the next begins in the same row.
        axes.plot([group.t_s] * 2, [row - 0.4, row + 0.4], color="#FFFFFF", linewidth=1.2)
    for begin_s, stop_s in _pauses(run):
        if begin_s < window[1] and stop_s > window[0]:
            axes.axvspan(begin_s, stop_s, facecolor="#FFFFFF", alpha=0.65, linewidth=0)
            _mark(axes, [t_s for t_s in (begin_s,) if window[0] <= t_s])
    for t_s, version in pushes:
        if window[0] <= t_s < window[1] - 0.02 * (window[1] - window[0]):
            axes.text(t_s, -0.62, f"v{version}", fontsize=7.5, ha="left", va="bottom")
    left_out = f" (the first {_MOST_SLOTS} of {len(slots)} at once)" if shown != slots else ""
    axes.set_title(
        f"groups being generated{left_out}; a new color is a new version of the weights; "
        "pale from a dashed line on: interrupted",
        pad=13,
    )
    engines = [slot[0].engine for slot in shown]
    middles = {e: engines.index(e) + (engines.count(e) - 1) / 2 for e in dict.fromkeys(engines)}
    axes.set_yticks(list(middles.values()), [engine_process(engine) for engine in middles])
    for row in (row for row in range(1, len(engines)) if engines[row] != engines[row - 1]):
        axes.axhline(row - 0.5, color=GREY, linewidth=0.8)
    axes.set_xlim(window)
    axes.set_ylim(max(1, len(shown)) - 0.4, -0.6)
    axes.grid(visible=False)
    if not slots:
        _nothing_yet(axes, "no group was generated in this time")


def _mark(axes: Axes, times_s: Sequence[float]) -> None:
    for t_s in times_s:
        axes.axvline(t_s, color=BLACK, linewidth=0.7, linestyle=(0, (4, 2)), alpha=0.8)


def _zoom_window(start_s: float, end_s: float) -> tuple[float, float]:
    if end_s - start_s <= _ZOOM_S:
        return (start_s, max(end_s, start_s + 1.0))
    middle_s = (start_s + end_s) / 2
    return (middle_s - _ZOOM_S / 2, middle_s + _ZOOM_S / 2)


# --- staleness -----------------------------------------------------------------------------------


def draw_staleness(run: RecordedRun) -> Figure:
    """How old what was trained on was: over the whole run, and step by step."""
    figure = _figure(10, 4)
    share, steps = figure.subplots(1, 2)
    batches = run.batches
    kinds = (
        ("token, per trained token", BLUE, total(b.token_lags for b in batches)),
        ("head, per sample", ORANGE, total(b.head_lags for b in batches)),
        ("tail, per sample", GREEN, total(b.tail_lags for b in batches)),
    )
    width = 0.27
    for position, (label, color, lags) in enumerate(kinds):
        count = sum(lags.values())
        if count:
            xs = [lag + (position - 1) * width for lag in lags]
            heights = [100 * times / count for times in lags.values()]
            name = f"{label} (mean {mean_lag(lags):.2f}, max {max(lags)})"
            share.bar(xs, heights, width=width, color=color, label=name)
    share.set(xlabel="lag (versions)", ylabel="share (%)", title="lag of what was trained on")
    _whole_numbers(share)
    numbers = [batch.version for batch in batches]
    for name, color in (("head", ORANGE), ("token", BLUE), ("tail", GREEN)):
        means = [mean_lag(getattr(batch, f"{name}_lags")) for batch in batches]
        steps.plot(numbers, means, color=color, linewidth=1.8, label=f"{name}, mean")
    # The oldest token of a batch is some sample's head: one row of points says it for both.
    largest = [max(batch.head_lags, default=0) for batch in batches]
    steps.plot(numbers, largest, ".", color=BLACK, markersize=4, label="head, largest")
    eta = run.log.header.limits.get("eta")
    if batches and isinstance(eta, int | float) and math.isfinite(eta):
        steps.axhline(eta, color=GREY, linestyle="--", linewidth=1, label=f"eta = {eta:g}")
    steps.set(xlabel="training step", ylabel="lag (versions)", title="lag of each batch")
    _whole_numbers(steps)
    for axes in (share, steps):
        if batches:
            # Room for the legend above what is drawn.
            axes.set_ylim(0, 1.38 * max(axes.get_ylim()[1], 1))
            axes.legend(loc="upper left", ncols=1 if axes is share else 2)
        else:
            _nothing_yet(axes, "no training step was finished")
    return figure


def _whole_numbers(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _nothing_yet(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=GREY)
