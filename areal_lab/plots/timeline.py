"""timeline.png: the activity of each process, and the weights that generated each group.

Idle time is gray or has a pattern, not a color; time outside training is blank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from areal_lab.control.events import EngineId, Interrupt, Resume, WeightsPushed
from areal_lab.plots.looks import Looks
from areal_lab.plots.style import (
    BLACK,
    GREY,
    NARROW,
    entitle,
    finished,
    new_figure,
    nothing_yet,
)
from areal_lab.runlog.activity import TRAINERS_TURN, Stretch, activity, training_window
from areal_lab.runlog.records import IMPORTED, GroupRecord, Log, engine_process
from areal_lab.runlog.time_cells import State, state_seconds, without_idle_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from areal_lab.plots.picture import Picture

_VERSION_COLORS: Final = ("#332288", "#88CCEE", "#CC6677", "#DDCC77", "#117733", "#AA4499")
"""Tol's muted scheme, distinct from the colors of activities."""
_MAX_SLOTS: Final = 64
_MIN_SHARE: Final = 0.001
"""Share of the run below which an activity has no entry in the legend."""
_LABEL_IN: Final = 0.3
"""Smallest distance of version labels, in inches; closer ones are omitted."""
_FEW_ROWS: Final = 10
"""Rows are lower if there are more."""
_SAID: Final = 4
_STEPS_ZOOMED: Final = 2
"""Steps of an imported log in the enlarged part."""
_LEAST_SHARE: Final = 1e-4
"""Stretches of less than this share of a panel, a tenth of a pixel, are not drawn."""


@finished
def draw_timeline(
    log: Log, *, zoom_s: float = 20.0, width: float = 12.0, title: str | None = None
) -> Picture:
    """Draw the activity of each process: the whole run, a part of it, and the groups in that part.

    A process without any activity or wait has no row. For more engines than rows fit, use
    `areal_lab.plots.shares`.
    """
    activities = without_idle_rows(activity(log))
    narrow = width < NARROW
    window = (0.0, max(log.end_s, 1.0))
    imported = log.header.mode == IMPORTED
    zoom = _zoom_window(*training_window(log), _STEPS_ZOOMED * _step_s(log) if imported else zoom_s)
    slots = _slots([g for g in log.groups if g.t_s < zoom[1] and g.generated_s > zoom[0]])
    rows = 0.45 + max(1, len(activities)) * (0.5 if len(activities) <= _FEW_ROWS else 0.26)
    shown = min(len(slots), _MAX_SLOTS)
    heights = [rows, rows, max(0.9, 0.4 + (0.16 if shown <= _MAX_SLOTS / 2 else 0.09) * shown)]
    heights = heights[: 2 if narrow or imported else 3]
    seconds = state_seconds(activities)
    looks = Looks(seconds)
    handles, labels = looks.legend(least=_MIN_SHARE * window[1])
    columns = 2 if narrow else 4
    legend_rows = -(-len(labels) // columns)
    figure = new_figure(width, sum(heights) + 0.8 * len(heights) + 0.2 * legend_rows)
    whole, part, *below = figure.subplots(len(heights), 1, height_ratios=heights)
    pushes = [r.t_s for r in log.events if isinstance(r.event, WeightsPushed)]
    _draw_rows(whole, activities, looks, window)
    if pushes:  # an empty line without clipping breaks the layout
        whole.plot(pushes, [-0.62] * len(pushes), "v", color=BLACK, markersize=3.5, clip_on=False)
    weights = "" if imported else "; triangles: new weights are on the engines"
    whole.set_title(f"the whole run{weights}", pad=11)
    _label_time_outside_training(whole, log)
    whole.axvspan(*zoom, ymin=0.01, ymax=0.99, fill=False, edgecolor=BLACK, linewidth=1.4)
    _draw_rows(part, activities, looks, zoom)
    _mark(part, [t_s for t_s in pushes if zoom[0] <= t_s <= zoom[1]])
    length_s = zoom[1] - zoom[0]
    weights = "dashed: new weights are on the engines"
    if imported:
        weights = "the log has the length of each part, and not its place in the step"
    part.set_title(f"{length_s:.0f} s of the run (framed above); {weights}")
    for axes in below:
        _draw_groups(axes, slots, log, zoom, room_s=_LABEL_IN / width * length_s)
    for axes in (whole, part, *below):
        axes.set_xlabel("seconds since the start of the log")
    if labels:
        figure.legend(handles, labels, loc="outside lower center", ncols=columns)
    return entitle(figure, title or "Activity of each process", alt=_said(activities, window[1]))


def _step_s(log: Log) -> float:
    """Mean seconds of the steps of an imported log, of which each has spans."""
    steps = {span.args.get("step") for span in log.spans}
    start_s, end_s = training_window(log)
    return (end_s - start_s) / max(1, len(steps))


def _said(activities: Mapping[str, Sequence[Stretch]], end_s: float) -> str:
    busiest = []
    for process, stretches in activities.items():
        busy_s = sum(one.end_s - one.start_s for one in stretches if one.busy)
        busiest.append(f"{process} busy {busy_s / end_s:.0%}")
    more = f" and {len(busiest) - _SAID} more" if len(busiest) > _SAID else ""
    return (
        f"A row for each of {len(activities)} processes shows what it does over {end_s:,.0f} s: "
        f"{', '.join(busiest[:_SAID])}{more}."
    )


def _draw_rows(
    axes: Axes,
    activities: Mapping[str, Sequence[Stretch]],
    looks: Looks,
    window: tuple[float, float],
) -> None:
    """Draw a row per process; one collection of rectangles per look, whatever their number."""
    from matplotlib.collections import PolyCollection

    names = list(activities)
    start_s, end_s = window
    least_s = _LEAST_SHARE * (end_s - start_s)
    spans: dict[State, list[tuple[float, float, int]]] = {state: [] for state in looks.of}
    for row, name in enumerate(names):
        for one in activities[name]:
            from_s, to_s = max(one.start_s, start_s), min(one.end_s, end_s)
            if (
                to_s - from_s > least_s
                and (found := spans.get(State(one.name, one.busy))) is not None
            ):
                found.append((from_s, to_s, row))
    for state, found in spans.items():
        if found:
            axes.add_collection(
                PolyCollection(_rectangles(found, 0.36), **looks.of[state]), autolim=False
            )
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.set_xlim(window)
    axes.grid(visible=False)
    if not names:
        nothing_yet(axes, "the log has no process")


def _rectangles(spans: Sequence[tuple[float, float, float]], half: float) -> Any:
    """Corners, of shape (spans, 4, 2), of rectangles from one time to another around a row."""
    begin, end, row = np.array(spans, dtype=float).T
    x = np.stack([begin, begin, end, end], axis=1)
    y = np.stack([row - half, row + half, row + half, row - half], axis=1)
    return np.stack([x, y], axis=2)


def _pauses(log: Log) -> list[tuple[float, float]]:
    pauses = []
    begun_s: float | None = None
    for record in log.actions:
        if isinstance(record.action, Interrupt):
            begun_s = record.t_s
        elif isinstance(record.action, Resume) and begun_s is not None:
            pauses.append((begun_s, record.t_s))
            begun_s = None
    return pauses if begun_s is None else [*pauses, (begun_s, log.end_s)]


def _turns(
    log: Log, pauses: Sequence[tuple[float, float]], engines: Sequence[EngineId]
) -> list[tuple[float, float, float]]:
    """Times in which devices of single engines train, outside of pauses of all engines, by row."""
    spans = [span for span in log.spans if span.cause == TRAINERS_TURN]
    return [
        (span.t_s, span.end_s, float(row))
        for span in spans
        if not any(begin_s < span.end_s and span.t_s < end_s for begin_s, end_s in pauses)
        for row, engine in enumerate(engines)
        if engine_process(engine) == span.process
    ]


def _label_time_outside_training(axes: Axes, log: Log) -> None:
    start_s, end_s = training_window(log)
    for begin_s, stop_s, text in (
        (0.0, start_s, "before\ntraining"),
        (end_s, log.end_s, "after\ntraining"),
    ):
        if stop_s - begin_s > 0.08 * log.end_s:
            middle_s = (begin_s + stop_s) / 2
            axes.text(middle_s, 0, text, color="#555555", ha="center", va="center")


def _slots(groups: Sequence[GroupRecord]) -> list[list[GroupRecord]]:
    """Groups in rows without overlap, by engine; each group takes the first free row."""
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
    log: Log,
    window: tuple[float, float],
    *,
    room_s: float,
) -> None:
    """Draw a bar for each group; its color changes with the version that generates it."""
    from matplotlib.collections import LineCollection, PolyCollection

    shown = slots[:_MAX_SLOTS]
    pushes = [(r.t_s, r.event.version) for r in log.events if isinstance(r.event, WeightsPushed)]
    spans: dict[str, list[tuple[float, float, int]]] = {}
    breaks = []
    for row, group in ((row, group) for row, slot in enumerate(shown) for group in slot):
        cuts = [(t_s, v) for t_s, v in pushes if group.t_s < t_s < group.generated_s]
        versions = [v for t_s, v in pushes if t_s <= group.t_s]
        start_s, version = group.t_s, versions[-1] if versions else 0
        for end_s, following in [*cuts, (group.generated_s, version)]:
            color = _VERSION_COLORS[version % len(_VERSION_COLORS)]
            spans.setdefault(color, []).append((start_s, end_s, row))
            start_s, version = end_s, following
        breaks.append([(group.t_s, row - 0.4), (group.t_s, row + 0.4)])
    for color, found in spans.items():
        bars = PolyCollection(_rectangles(found, 0.4), facecolors=color, linewidths=0)
        axes.add_collection(bars, autolim=False)
    # Separates consecutive groups in the same row.
    axes.add_collection(LineCollection(breaks, colors="#FFFFFF", linewidths=1.2), autolim=False)
    pauses = _pauses(log)
    for begin_s, stop_s in pauses:
        if begin_s < window[1] and stop_s > window[0]:
            axes.axvspan(begin_s, stop_s, facecolor="#FFFFFF", alpha=0.65, linewidth=0)
            _mark(axes, [t_s for t_s in (begin_s,) if window[0] <= t_s])
    if turns := _turns(log, pauses, [slot[0].engine for slot in shown]):
        pale = PolyCollection(
            _rectangles(turns, 0.45), facecolors="#FFFFFF", alpha=0.65, linewidths=0
        )
        axes.add_collection(pale, autolim=False)
    _name_versions(axes, pushes, window, room_s)
    left_out = f" (the first {_MAX_SLOTS} of {len(slots)} at once)" if shown != slots else ""
    axes.set_title(
        f"groups being generated{left_out}; colors: versions of the weights; "
        "pale after a dashed line: interrupted",
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
        nothing_yet(axes, "no group was generated in this time")


def _name_versions(
    axes: Axes, pushes: Sequence[tuple[float, int]], window: tuple[float, float], room_s: float
) -> None:
    """Label the version at the left edge and at each push, as far as there is room.

    If a push is close to the left edge, its version is labeled instead of the one before.
    """
    start_s, end_s = window
    before = [version for t_s, version in pushes if t_s <= start_s]
    named = [
        (start_s, before[-1] if before else 0),
        *(push for push in pushes if push[0] > start_s),
    ]
    free_s = start_s
    for (t_s, version), (next_s, _) in pairwise([*named, (math.inf, 0)]):
        crowded = t_s == start_s and next_s < t_s + room_s
        if free_s <= t_s < end_s - room_s and not crowded:
            axes.text(t_s, -0.62, f"v{version}", ha="left", va="bottom")
            free_s = t_s + room_s


def _mark(axes: Axes, times_s: Sequence[float]) -> None:
    for t_s in times_s:
        axes.axvline(t_s, color=BLACK, linewidth=0.7, linestyle=(0, (4, 2)), alpha=0.8)


def _zoom_window(start_s: float, end_s: float, zoom_s: float) -> tuple[float, float]:
    if end_s - start_s <= zoom_s:
        return (start_s, max(end_s, start_s + 1.0))
    middle_s = (start_s + end_s) / 2
    return (middle_s - zoom_s / 2, middle_s + zoom_s / 2)
