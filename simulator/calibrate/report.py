"""Report a calibration: a table, JSON, pictures, and the YAML file for `areal-lab simulate`.

Pictures of calibrations and replays.

fit.png      measured against predicted milliseconds of each part; held-out points are hollow
replay.png   seconds of each step, and shares of time of engines and trainer, for both
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from areal_lab.host.terminal import printable
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
from areal_lab.runlog.records import finite_json
from areal_lab.runlog.time_cells import State
from simulator.calibrate.advise import Advice
from simulator.calibrate.fit import PartFit
from simulator.calibrate.fit_run import Calibration
from simulator.config.schema import SimulationConfig
from simulator.stats.format import number, short_time
from simulator.workload.recorded_run import Value

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console

    from areal_lab.plots.picture import Picture
    from simulator.calibrate.replay import Replay


_WIDTH = 100


def configuration(calibration: Calibration) -> SimulationConfig:
    """The settings as a simulation config."""
    named = SimulationConfig().with_settings(calibration.settings)
    if named.name == SimulationConfig().name:
        named.name = _title(calibration)
    return named


def to_json(calibration: Calibration) -> dict[str, Any]:
    """The calibration as one JSON object; errors are relative."""
    lengths = calibration.lengths
    told = {
        "source": str(calibration.source),
        "parts": [_part_json(part) for part in calibration.parts],
        "lengths": None
        if lengths is None
        else {
            "settings": lengths.settings(),
            "answers": lengths.answers,
            "held_out_answers": lengths.held_out_answers,
            "held_out_distance": lengths.distance,
        },
        "settings": dict(calibration.settings),
        "notes": list(calibration.notes),
    }
    return dict(finite_json(told))


def show(console: Console, calibration: Calibration) -> None:
    """Print the fits and notes."""
    from rich import box
    from rich.table import Table

    console.print(f"{_title(calibration)}: {calibration.about}", highlight=False)
    console.print()
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False, pad_edge=False)
    table.add_column("part")
    for title in ("fitted", "error", "held out", "error", "bias"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("coefficients", overflow="fold")
    for part in calibration.parts:
        out = int(part.held_out.sum())
        table.add_row(
            part.name,
            str(len(part.places) - out),
            f"{part.fit_error:.1%}",
            str(out),
            f"{part.held_out_error:.1%}",
            f"{part.bias:+.1%}",
            f"{_found(part.settings)}; {part.note}",
        )
    console.print(table)
    for line in (*_more_lines(calibration), *_held_out_lines(calibration)):
        console.print(line, highlight=False)
    for note in calibration.notes:
        console.print(f"note: {note}", style="yellow", highlight=False)


def show_advice(console: Console, advice: Advice) -> None:
    """Print where the time of a logged run goes, and what other schedules would give."""
    from rich import box
    from rich.table import Table

    def table(*titles: str) -> Table:
        found = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False, pad_edge=False)
        found.add_column(titles[0])
        for title in titles[1:]:
            found.add_column(title, justify="right", no_wrap=True)
        return found

    observed = advice.observed
    parts = table(f"{observed.framework}, {observed.steps} steps", "s per step", "share")
    for name, seconds in {**observed.parts, "not in the log": observed.other_s}.items():
        parts.add_row(name, f"{seconds:.4g}", f"{seconds / observed.step_s:.0%}")
    parts.add_row("step", f"{observed.step_s:.4g}", "")
    console.print(parts)
    console.print()
    cluster = advice.fit.config.cluster
    options = table(
        f"on the same {cluster.gpus} {cluster.gpu}", "generate + train", "s per step", "gain", "lag"
    )
    generate = None if cluster.colocated else cluster.rollout_gpus
    options.add_row("as logged", _split(generate, cluster.gpus), f"{observed.step_s:.3g}", "1", "")
    for one in advice.options:
        options.add_row(
            one.name,
            _split(one.settings.get("cluster.rollout_gpus"), cluster.gpus),
            _interval(one.step_s),
            _interval(one.gain),
            f"{one.lag_mean:.1f}",
        )
    console.print(options)
    console.print()
    best = advice.options[0]
    for change in advice.changes:
        console.print(
            f"{best.name}, with {change.name}: samples per hour x{change.gain:.2f}; {change.note}",
            highlight=False,
        )
    for line in (*best.error["says"], *advice.impossible):
        console.print(line, highlight=False, markup=False)
    for line in advice.fit.lines:
        console.print(f"fitted: {line}", highlight=False, markup=False)
    for line in observed.assumed:
        console.print(f"assumed: {line}", style="yellow", highlight=False, markup=False)
    console.print(f"the same by hand: {advice.command(best)}", highlight=False, markup=False)


def _split(generate: Value | None, gpus: int) -> str:
    return "shared" if generate is None else f"{generate} + {gpus - int(generate)}"


def _interval(value: Mapping[str, float | None]) -> str:
    mean, low, high = (value[name] for name in ("mean", "low", "high"))
    if low is None or high is None:
        return f"{mean:.3g}"
    return f"{mean:.3g} ({low:.3g} to {high:.3g})"


def to_yaml(calibration: Calibration) -> str:
    """A file for `areal-lab simulate`: settings, below comments with their source."""
    from omegaconf import OmegaConf

    lines = [f"{_title(calibration)}: {calibration.about}"]
    for part in calibration.parts:
        lines.append(
            f"{part.name}: {part.held_out_error:.1%} error on {int(part.held_out.sum())} held-out "
            f"points; {part.note}"
        )
    lines += [*_more_lines(calibration), *_held_out_lines(calibration), *calibration.notes]
    nested: dict[str, Any] = {}
    for name, value in calibration.settings.items():
        *path, last = name.split(".")
        place = nested
        for one in path:
            place = place.setdefault(one, {})
        place[last] = _rounded(value)
    body = OmegaConf.to_yaml(OmegaConf.create(nested))
    # Names of runs may have line ends, which would end a comment.
    return "".join(f"# {line}\n" for line in _wrapped([printable(line) for line in lines])) + body


def _more_lines(calibration: Calibration) -> Iterator[str]:
    settings, lengths = calibration.settings, calibration.lengths
    if "weights.export_s" in settings:
        yield (
            f"weight update: export {_seconds(settings['weights.export_s'])}, load "
            f"{_seconds(settings.get('weights.load_s', 0.0))}; scoring a group "
            f"{_seconds(settings['workload.reward.mean_s'])}; means over all steps but the first"
        )
    if lengths is not None:
        kind = f"{lengths.kind}, {number(lengths.mean_tokens)} tokens on average"
        if lengths.kind == "lognormal":
            correlation = lengths.group_correlation
            kind += (
                f", sigma {lengths.sigma:.3g}, cut off at {lengths.max_tokens:,}, correlation in a "
                f"group {'unknown' if correlation is None else f'{correlation:.2f}'}"
            )
        yield (
            f"lengths: {kind}; fitted to {lengths.answers} responses; Kolmogorov-Smirnov distance "
            f"to {lengths.held_out_answers} held-out responses {lengths.distance:.0%}"
        )


def _held_out_lines(calibration: Calibration) -> Iterator[str]:
    places = sorted(
        {
            place
            for part in calibration.parts
            for place, out in zip(part.places, part.held_out, strict=True)
            if out
        }
    )
    what = "rows" if calibration.run is None else "training steps"
    shown = ", ".join(map(str, places[:12])) + (", ..." if len(places) > 12 else "")
    yield f"held out: {what} {shown}"


def _part_json(part: PartFit) -> dict[str, Any]:
    out = int(part.held_out.sum())
    return {
        "name": part.name,
        "settings": dict(part.settings),
        "points": len(part.places) - out,
        "error": part.fit_error,
        "held_out": out,
        "held_out_error": part.held_out_error,
        "held_out_bias": part.bias,
        "held_out_places": sorted(
            {p for p, o in zip(part.places, part.held_out, strict=True) if o}
        ),
        "note": part.note,
    }


def _found(settings: Mapping[str, float]) -> str:
    told = []
    for name, value in settings.items():
        leaf = name.rpartition(".")[2]
        if leaf.endswith("knee"):
            told += [f"knee {value:g}"] if value > 1 else []
        elif value:
            told.append(f"{leaf.removesuffix('_s').replace('_', ' ')} {_seconds(value)}")
    return ", ".join(told)


def _seconds(value: Value) -> str:
    return short_time(float(value))


def _rounded(value: Value) -> Value:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _title(calibration: Calibration) -> str:
    source = calibration.source
    if source.name.startswith("events."):
        source = source.resolve().parent
    return printable(source.resolve().name if source.is_dir() else source.stem)


def _wrapped(lines: Sequence[str]) -> Iterator[str]:
    import textwrap

    for line in lines:
        yield from textwrap.wrap(line, _WIDTH - 2, subsequent_indent="  ")


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
    shares: dict[State, float] = {}
    for name, share in use.items():
        busy = not name.startswith(_IDLE)
        shown = _TOGETHER.get(name, name) if busy else name.removeprefix(_IDLE)
        state = State(shown, busy)
        shares[state] = shares.get(state, 0.0) + share
    return shares
