"""Pictures of calibrations and replays.

fit.png      measured against predicted milliseconds of each part; held-out points are hollow
replay.png   seconds of each step, and shares of time of engines and trainer, for both
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from areal_lab.plots.looks import Looks
from areal_lab.plots.style import (
    BLUE,
    GREY,
    NARROW,
    VERMILION,
    entitle,
    finished,
    new_figure,
    save_picture,
    whole_numbers,
)
from areal_lab.runlog.time_cells import State
from simulator.calibrate.fit import PartFit
from simulator.calibrate.fit_run import Calibration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from areal_lab.plots.picture import Picture
    from simulator.calibrate.replay import Replay

_IDLE: Final = "idle: "
_LEAST_SHARE: Final = 0.005
_LEAST_PANEL_IN: Final = 3.2
_TRAIN: Final = "train"
_GENERATE: Final = "generate"
_TOGETHER: Final = {
    **dict.fromkeys(("train", "forward/backward", "optimizer", "proximal log-probs"), _TRAIN),
    "advantages and packing": _TRAIN,
    **dict.fromkeys(("prefill", "recompute", "decode", "prefill and decode"), _GENERATE),
}
"""Activities that are drawn as one: a measured training step has no parts, and a pass of the
embedded engine prefills while it decodes."""


def write_fit(calibration: Calibration, path: Path) -> Path:
    """Draw `fit.png`."""
    return save_picture(draw_fit(calibration.parts, title=calibration.about), path)


@finished
def draw_fit(
    parts: Sequence[PartFit], *, width: float | None = None, title: str | None = None
) -> Picture:
    """A panel for each part; predictions of points on the line are exact.

    Args:
        parts: the fitted parts, at least one.
        width: in inches; None gives each panel 4.2. Narrow panels stand above one another.
        title: in place of the picture's own.

    Raises:
        ValueError: if there is no part.
    """
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    if not parts:
        raise ValueError("there is no fitted part to draw; give the `parts` of a calibration")
    width = 4.2 * len(parts) if width is None else width
    columns = min(len(parts), max(1, int(width / _LEAST_PANEL_IN)))
    rows = -(-len(parts) // columns)
    figure = new_figure(width, 4.4 * rows)
    panels = np.ravel(figure.subplots(rows, columns, squeeze=False))
    for axes in panels[len(parts) :]:
        axes.set_axis_off()
    for axes, part in zip(panels, parts, strict=False):
        out = part.held_out
        # Milliseconds per step for stretches of many steps.
        steps = np.array([point.steps for point in part.points]) if part.points else 1.0
        measured, predicted = 1e3 * part.measured_s / steps, 1e3 * part.predicted_s / steps
        ends = np.array(
            [min(measured.min(), predicted.min()), max(measured.max(), predicted.max())]
        )
        axes.plot(ends, ends, color=GREY, linewidth=1)
        axes.loglog(measured[~out], predicted[~out], "o", color=BLUE, label="fitted", ms=5)
        axes.loglog(
            measured[out], predicted[out], "o", color=VERMILION, mfc="none", label="held out", ms=6
        )
        axes.set(
            xlabel="measured (ms per step)",
            ylabel="predicted (ms per step)",
            title=f"{part.name}: held-out error {part.held_out_error:.1%}",
        )
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(FormatStrFormatter("%g"))
            axis.set_minor_formatter(NullFormatter())
        axes.legend(loc="upper left")
    said = ", ".join(f"{part.name} {part.held_out_error:.1%}" for part in parts)
    return entitle(
        figure,
        title or "Measured against predicted time of each part",
        alt=f"Points near the diagonal: predictions close to measurements. Held-out error: {said}.",
    )


def write_replay(replay: Replay, path: Path, costs: str) -> Path:
    """Draw `replay.png`; `costs` names the source of the simulated costs."""
    title = f"{replay.name}: measured, and predicted with the costs of {costs}"
    return save_picture(draw_replay(replay, title=title), path)


@finished
def draw_replay(replay: Replay, *, width: float = 12.0, title: str | None = None) -> Picture:
    """Steps on the left, shares of time on the right; one above the other in a narrow picture.

    Args:
        replay: the measured run and its prediction.
        width: in inches.
        title: in place of the picture's own.
    """
    narrow = width < NARROW
    figure = new_figure(width, 8.0 if narrow else 4.6)
    left, right = (
        figure.subplots(2, 1, height_ratios=(1, 1.2))
        if narrow
        else figure.subplots(1, 2, width_ratios=(1, 1.2))
    )
    numbers = np.arange(1, len(replay.measured_steps_s) + 1)
    left.plot(numbers, replay.measured_steps_s, "o-", color=BLUE, label="measured")
    left.plot(numbers, replay.predicted_steps_s, "s--", color=VERMILION, label="predicted")
    if replay.warmup_steps:
        left.axvspan(0.5, replay.warmup_steps + 0.5, color=GREY, alpha=0.2, label="excluded")
    left.set(xlabel="training step", ylabel="seconds", xlim=(0.5, len(numbers) + 0.5))
    left.set_ylim(bottom=0)
    left.legend()
    whole_numbers(left)
    _draw_use(right, replay, columns=2 if narrow else 3)
    measured, predicted = np.mean(replay.measured_steps_s), np.mean(replay.predicted_steps_s)
    return entitle(
        figure,
        title or f"{replay.name}: measured and predicted",
        alt=f"A line for the measured and one for the predicted seconds of each training step; "
        f"their means are {measured:.3g} and {predicted:.3g} s. Beside it shares of time.",
    )


def _draw_use(axes: Axes, replay: Replay, *, columns: int) -> None:
    """Two bars for each pool, measured and predicted: busy in colors, idle in patterns."""
    bars = [
        (pool, which, use[pool])
        for pool in replay.measured_use
        for which, use in (("measured", replay.measured_use), ("predicted", replay.predicted_use))
        if pool in use
    ]
    shares = [_by_state(use) for _, _, use in bars]
    sizes: dict[State, float] = {}
    for state, share in (item for one in shares for item in one.items()):
        sizes[state] = max(sizes.get(state, 0.0), share)
    looks = Looks({state: share for state, share in sizes.items() if share >= _LEAST_SHARE})
    for row, by_state in enumerate(shares):
        start = 0.0
        for state, look in looks.of.items():
            share = 100 * by_state.get(state, 0.0)
            axes.barh(row, share, 0.7, left=start, **look)
            start += share
    axes.set_yticks(range(len(bars)), [f"{pool}\n{which}" for pool, which, _ in bars])
    axes.invert_yaxis()
    axes.set(xlim=(0, 100), xlabel="share of time (%), without excluded steps")
    axes.grid(visible=False)
    handles, labels = looks.legend()
    axes.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=columns)


def _by_state(use: Mapping[str, float]) -> dict[State, float]:
    """Shares of time by state; activities that are drawn as one are added up."""
    shares: dict[State, float] = {}
    for name, share in use.items():
        busy = not name.startswith(_IDLE)
        shown = _TOGETHER.get(name, name) if busy else name.removeprefix(_IDLE)
        state = State(shown, busy)
        shares[state] = shares.get(state, 0.0) + share
    return shares
