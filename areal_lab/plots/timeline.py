"""timeline.png: the activity of each process, and the weights that generated each group.

Idle time is gray or has a pattern, not a color; time outside training is blank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from areal_lab.control.events import Interrupt, Resume, WeightsPushed
from areal_lab.plots.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    YELLOW,
    entitle,
    finished,
    new_figure,
    nothing_yet,
)
from areal_lab.runlog.activity import (
    AFTER,
    BEFORE,
    LOST,
    NOT_JOINED,
    NOTHING_ADMITTED,
    NOTHING_LEFT,
    NOTHING_TO_SCORE,
    ON_ITS_WAY,
    PAUSED,
    PAUSED_BY_HAND,
    PAUSED_FOR_TRAINING,
    TRAIN_ON_ITS_WAY,
    WAIT_BATCH,
    WAIT_EVENTS,
    WAIT_REWARDS,
    WAIT_WEIGHTS,
    Stretch,
    activity,
    label,
    training_window,
)
from areal_lab.runlog.records import GroupRecord, Log, engine_process

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from areal_lab.plots.picture import Picture

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
_OTHER_COLORS = ("#999933", "#882255", "#B15928", "#AA4499", "#661100")
IDLE_LOOKS = {  # face, pattern
    WAIT_BATCH: ("#DDDDDD", ""),
    NOTHING_ADMITTED: ("#FFFFFF", "...."),
    WAIT_WEIGHTS: ("#FFFFFF", "////"),
    PAUSED: ("#FFFFFF", "xxxx"),
    PAUSED_FOR_TRAINING: ("#DDDDDD", "xx"),
    PAUSED_BY_HAND: ("#DDDDDD", "oo"),
    WAIT_REWARDS: ("#FFFFFF", "\\\\\\\\"),
    ON_ITS_WAY: ("#AAAAAA", ""),
    TRAIN_ON_ITS_WAY: ("#AAAAAA", ""),
    NOTHING_LEFT: ("#FFFFFF", "----"),
    LOST: ("#FFFFFF", "||||"),
    NOT_JOINED: ("#F2F2F2", ""),
}
"""Face color and pattern of each idle cause, also for pictures of simulations."""
OTHER_IDLE = ("#FFFFFF", "++")
_BLANK = frozenset({BEFORE, AFTER, NOTHING_TO_SCORE, WAIT_EVENTS})
"""Idle time that is not a loss: nothing is drawn."""
_VERSION_COLORS = ("#332288", "#88CCEE", "#CC6677", "#DDCC77", "#117733", "#AA4499")
"""Tol's muted scheme, distinct from the colors of activities."""
_MAX_SLOTS = 64
_LEGEND_COLUMNS = 5
_MIN_SHARE = 0.001
"""Share of the run below which an activity is drawn without an entry in the legend."""
_LABEL_SHARE = 0.025
"""Smallest distance of version labels, as a share of the window; closer ones are omitted."""


@finished
def draw_timeline(
    log: Log, *, zoom_s: float = 20.0, width: float = 12.0, title: str | None = None
) -> Picture:
    """Draw the activity of each process: the whole run, a part of it, and the groups in that part.

    Args:
        log: the log of a run, real or simulated.
        zoom_s: length of the part, from the middle of training.
        width: in inches.
        title: in place of the picture's own.
    """
    activities = activity(log)
    window = (0.0, max(log.end_s, 1.0))
    zoom = _zoom_window(*training_window(log), zoom_s)
    slots = _slots([g for g in log.groups if g.t_s < zoom[1] and g.generated_s > zoom[0]])
    rows = 0.5 * max(1, len(activities)) + 0.45
    shown = min(len(slots), _MAX_SLOTS)
    heights = [rows, rows, max(0.9, 0.4 + (0.16 if shown <= _MAX_SLOTS / 2 else 0.09) * shown)]
    looks = _Looks(activities)
    handles, labels = looks.legend(min_s=_MIN_SHARE * window[1])
    legend_rows = -(-len(labels) // _LEGEND_COLUMNS)
    figure = new_figure(width, sum(heights) + 2.4 + 0.2 * legend_rows)
    whole, part, below = figure.subplots(3, 1, height_ratios=heights)
    pushes = [r.t_s for r in log.events if isinstance(r.event, WeightsPushed)]
    _draw_rows(whole, activities, looks, window)
    if pushes:  # an empty line without clipping breaks the layout
        whole.plot(pushes, [-0.62] * len(pushes), "v", color=BLACK, markersize=3.5, clip_on=False)
    whole.set_title("the whole run; triangles: new weights are on the engines", pad=11)
    _label_time_outside_training(whole, log)
    whole.axvspan(*zoom, ymin=0.01, ymax=0.99, fill=False, edgecolor=BLACK, linewidth=1.4)
    _draw_rows(part, activities, looks, zoom)
    _mark(part, [t_s for t_s in pushes if zoom[0] <= t_s <= zoom[1]])
    length_s = zoom[1] - zoom[0]
    part.set_title(
        f"{length_s:.0f} s of the run (framed above); dashed: new weights are on the engines"
    )
    _draw_groups(below, slots, log, zoom)
    for axes in (whole, part, below):
        axes.set_xlabel("seconds since the start of the log")
    if labels:
        figure.legend(handles, labels, loc="outside lower center", ncols=_LEGEND_COLUMNS)
    said = f"Rows for {len(activities)} processes: what each does over {window[1]:,.0f} s."
    return entitle(figure, title or "Activity of each process", alt=said)


class _Looks:
    """A color for every activity, a pattern for every cause of idleness."""

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
            face, pattern = IDLE_LOOKS.get(name, OTHER_IDLE)
            look = {"facecolor": face, "edgecolor": "#777777", "hatch": pattern, "linewidth": 0}
            self.of[(False, name)] = look

    def legend(self, *, min_s: float) -> tuple[list[Any], list[str]]:
        """Handles and labels, activities before idle causes; short ones are omitted.

        Entries with the same color and pattern are merged.
        """
        from matplotlib.patches import Patch

        alike: dict[tuple[Any, ...], list[tuple[bool, str]]] = {}
        for key, look in self.of.items():
            alike.setdefault(tuple(look.items()), []).append(key)
        shown = [keys for keys in alike.values() if sum(self.seconds[key] for key in keys) >= min_s]
        return [Patch(**self.of[keys[0]]) for keys in shown], [_label(keys) for keys in shown]


def _label(keys: Sequence[tuple[bool, str]]) -> str:
    """Text of a legend entry; a name that is part of another one is omitted."""
    names = [label(name) for _, name in keys]
    kept = [name for name in names if not any(name in other for other in names if other != name)]
    busy, _ = keys[0]
    return " or ".join(kept) if busy else f"idle: {' or '.join(kept)}"


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
        nothing_yet(axes, "the log has no process")


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


def _label_time_outside_training(axes: Axes, log: Log) -> None:
    start_s, end_s = training_window(log)
    for begin_s, stop_s, text in (
        (0.0, start_s, "before\ntraining"),
        (end_s, log.end_s, "after\ntraining"),
    ):
        if stop_s - begin_s > 0.04 * log.end_s:
            middle_s = (begin_s + stop_s) / 2
            axes.text(middle_s, 0, text, fontsize=7, color="#555555", ha="center", va="center")


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
) -> None:
    """Draw a bar for each group; its color changes with the version that generates it."""
    shown = slots[:_MAX_SLOTS]
    pushes = [(r.t_s, r.event.version) for r in log.events if isinstance(r.event, WeightsPushed)]
    for row, group in ((row, group) for row, slot in enumerate(shown) for group in slot):
        cuts = [(t_s, v) for t_s, v in pushes if group.t_s < t_s < group.generated_s]
        versions = [v for t_s, v in pushes if t_s <= group.t_s]
        start_s, version = group.t_s, versions[-1] if versions else 0
        for end_s, following in [*cuts, (group.generated_s, version)]:
            color = _VERSION_COLORS[version % len(_VERSION_COLORS)]
            axes.broken_barh([(start_s, end_s - start_s)], (row - 0.4, 0.8), facecolor=color)
            start_s, version = end_s, following
        # Separates consecutive groups in the same row.
        axes.plot([group.t_s] * 2, [row - 0.4, row + 0.4], color="#FFFFFF", linewidth=1.2)
    for begin_s, stop_s in _pauses(log):
        if begin_s < window[1] and stop_s > window[0]:
            axes.axvspan(begin_s, stop_s, facecolor="#FFFFFF", alpha=0.65, linewidth=0)
            _mark(axes, [t_s for t_s in (begin_s,) if window[0] <= t_s])
    _name_versions(axes, pushes, window)
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
    axes: Axes, pushes: Sequence[tuple[float, int]], window: tuple[float, float]
) -> None:
    """Label the version at the left edge and at each push, as far as there is room.

    If a push is close to the left edge, its version is labeled instead of the one before.
    """
    start_s, end_s = window
    room_s = _LABEL_SHARE * (end_s - start_s)
    before = [version for t_s, version in pushes if t_s <= start_s]
    named = [
        (start_s, before[-1] if before else 0),
        *(push for push in pushes if push[0] > start_s),
    ]
    free_s = start_s
    for (t_s, version), (next_s, _) in pairwise([*named, (math.inf, 0)]):
        crowded = t_s == start_s and next_s < t_s + room_s
        if free_s <= t_s < end_s - room_s and not crowded:
            axes.text(t_s, -0.62, f"v{version}", fontsize=7.5, ha="left", va="bottom")
            free_s = t_s + room_s


def _mark(axes: Axes, times_s: Sequence[float]) -> None:
    for t_s in times_s:
        axes.axvline(t_s, color=BLACK, linewidth=0.7, linestyle=(0, (4, 2)), alpha=0.8)


def _zoom_window(start_s: float, end_s: float, zoom_s: float) -> tuple[float, float]:
    if end_s - start_s <= zoom_s:
        return (start_s, max(end_s, start_s + 1.0))
    middle_s = (start_s + end_s) / 2
    return (middle_s - zoom_s / 2, middle_s + zoom_s / 2)
