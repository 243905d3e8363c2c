"""Pictures of simulations: GPU time by state, token lags, and steps.

    utilization.png   a bar per pool, by activity and by cause of idleness
    lags.png          shares of trained tokens and samples by lag
    steps.png         seconds and throughput of every step, for all seeds; warm-up is grey

Each shows one simulation, or several side by side. Colors are those of
`areal_lab.plots.looks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from areal_lab.control.ledger import mean_lag
from areal_lab.plots.looks import Looks
from areal_lab.plots.style import (
    BLACK,
    BLUE,
    GREEN,
    NARROW,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    entitle,
    finished,
    new_figure,
    save_picture,
    whole_numbers,
)
from areal_lab.runlog.activity import label
from areal_lab.runlog.time_cells import State
from simulator.run.result import Replicated
from simulator.stats.format import number, shown_name
from simulator.stats.statistics import estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from areal_lab.plots.picture import Picture

_LEAST_SHARE: Final = 0.001
"""Smallest share of a pool's time that is drawn."""
_LEGEND_COLUMNS: Final = 3
_LEAST_WRITTEN_IN: Final = 0.6
"""Width of a bar's part in inches below which its share is not written into it."""
_LETTERS: Final = "ABCDEF"
_RUN_COLORS: Final = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)


def write_plots(runs: Sequence[Replicated], folder: Path) -> list[Path]:
    """Draw all pictures of up to six simulations into a folder, which is created."""
    pictures = {"utilization": draw_utilization, "lags": draw_lags, "steps": draw_steps}
    return [
        save_picture(draw(runs, title=_title(runs)), folder / f"{name}.png")
        for name, draw in pictures.items()
    ]


@finished
def draw_utilization(
    runs: Sequence[Replicated], *, width: float = 10.0, title: str | None = None
) -> Picture:
    """A bar for each pool: activities, then causes of idleness; mean over the seeds.

    Args:
        runs: one simulation, or up to six that are compared.
        width: in inches.
        title: in place of the picture's own.
    """
    _check_count(runs)
    bars = [
        (run, pool, mark)
        for run, mark in zip(runs, _marks(runs), strict=True)
        for pool in run.results[0].pools
    ]
    shares = [_shares(run, pool) for run, pool, _ in bars]
    sizes: dict[State, float] = {}
    for state, share in (item for one in shares for item in one.items()):
        sizes[state] = max(sizes.get(state, 0.0), share)
    looks = Looks(
        {state: share for state, share in sizes.items() if share >= _LEAST_SHARE},
        named=lambda name: label(shown_name(name)),
    )
    handles, labels = looks.legend()
    columns = 2 if width < NARROW else 4
    figure = new_figure(width, 1.35 + 0.62 * len(bars) + 0.2 * -(-len(labels) // columns))
    axes: Axes = figure.subplots()
    for row, by_state in enumerate(shares):
        start = 0.0
        for state, look in looks.of.items():
            share = by_state.get(state, 0.0)
            if share:
                axes.barh(row, 100 * share, 0.72, left=100 * start, **look)
            if share >= _LEAST_WRITTEN_IN / width:
                _write_share(axes, row, start, share, white=looks.text_is_white(state))
            start += share
    axes.set_yticks(range(len(bars)), [_bar_name(*bar) for bar in bars])
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set(xlim=(0, 100), xlabel="share of the pool's GPU time (%), after warm-up")
    axes.grid(visible=False)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)
    busy = [sum(share for state, share in one.items() if state.busy) for one in shares]
    said = "; ".join(
        f"{_bar_name(*bar)}: busy {share:.0%}" for bar, share in zip(bars, busy, strict=True)
    )
    own = "Share of each pool's GPU time"
    return entitle(figure, title or own, alt=f"A bar for each pool of GPUs. {said}.")


@finished
def draw_lags(
    runs: Sequence[Replicated], *, width: float = 11.0, title: str | None = None
) -> Picture:
    """Shares of trained tokens by lag, and of samples by the lag of their first and last token.

    Args:
        runs: one simulation, or up to six that are compared.
        width: in inches; a narrow picture shows the tokens only.
        title: in place of the picture's own.
    """
    _check_count(runs)
    kinds = (
        ("token", "trained tokens"),
        ("head", "samples, by their first token"),
        ("tail", "samples, by their last token"),
    )[: 1 if width < NARROW else 3]
    figure = new_figure(width, 3.6)
    panels = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
    highest = 0
    thickness = 0.8 / len(runs)
    said = []
    for axes, (kind, name) in zip(panels, kinds, strict=True):
        for place, (run, mark) in enumerate(zip(runs, _marks(runs), strict=True)):
            shares, errors = _lag_shares(run, kind)
            highest = max(highest, *shares)
            mean = estimate([mean_lag(result.lags(kind)) for result in run.results]).mean
            places = [lag + (place - (len(runs) - 1) / 2) * thickness for lag in shares]
            entry = f"{mark}mean {mean:.2f}, max {max(shares)}"
            axes.bar(
                places,
                [100 * share for share in shares.values()],
                thickness,
                yerr=errors,
                error_kw={"linewidth": 0.8, "capsize": 2},
                color=_RUN_COLORS[place],
                label=entry,
            )
            if kind == "token":
                said.append(entry)
        axes.set(xlabel="lag (versions)", title=name if len(kinds) > 1 else "")
        whole_numbers(axes)
        axes.set_ylim(0, 108 + 8 * len(runs))  # room for the legend
        axes.set_yticks(range(0, 101, 20))
        axes.legend(loc="upper right")
    for axes in panels:
        axes.set_xlim(-0.6, max(highest, 1) + 0.6)
    panels[0].set_ylabel("share (%)")
    alt = f"Bars: share of the trained tokens by lag in versions; {'; '.join(said)}."
    own = "Lag of the trained tokens" + (" and samples" if len(kinds) > 1 else "")
    return entitle(figure, title or own, alt=alt)


@finished
def draw_steps(
    runs: Sequence[Replicated], *, width: float = 10.0, title: str | None = None
) -> Picture:
    """Seconds and effective throughput of every step; thin lines are seeds, thick ones means.

    Args:
        runs: one simulation, or up to six that are compared.
        width: in inches; a narrow picture shows the seconds only.
        title: in place of the picture's own.
    """
    _check_count(runs)
    names = ("seconds per step", "trained tokens per second")[: 1 if width < NARROW else 2]
    figure = new_figure(width, 0.2 + 2.5 * len(names) + 0.5 * (len(names) == 1))
    panels = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
    columns = 1 if width < NARROW else _LEGEND_COLUMNS
    said = []
    for place, (run, mark) in enumerate(zip(runs, _marks(runs), strict=True)):
        color = _RUN_COLORS[place]
        seconds = np.array([result.columns["step_s"] for result in run.results])
        tokens = np.array([result.columns["tokens"] for result in run.results])
        warmup = run.results[0].warmup_steps
        steps = np.arange(1, seconds.shape[1] + 1)
        for axes, name in zip(panels, names, strict=True):
            in_seconds = name == names[0]
            values = seconds if in_seconds else tokens / seconds
            if len(run.results) > 1:
                for seed, one in enumerate(values):
                    entry = "thin: each seed; thick: their mean" if place == seed == 0 else None
                    axes.plot(steps, one, color=color, linewidth=0.6, alpha=0.35, label=entry)
            average = float(values[:, warmup:].mean())
            if not in_seconds:  # tokens over seconds, not the mean of their quotients
                average = float(tokens[:, warmup:].sum() / seconds[:, warmup:].sum())
            told = f"{mark}{number(average)} {'s' if in_seconds else 'tokens/s'} after warm-up"
            axes.plot(
                *(steps, values.mean(axis=0)),
                **{"color": color, "linewidth": 1.6, "label": f"{told} (dashed)"},
            )
            axes.plot(
                [warmup + 1, steps[-1]], [average] * 2, color=color, linewidth=0.9, dashes=(4, 3)
            )
            said.append(told)
    warmup = max(run.results[0].warmup_steps for run in runs)
    for axes, name in zip(panels, names, strict=True):
        if warmup:
            axes.axvspan(0.5, warmup + 0.5, color="#EEEEEE", zorder=0, label="warm-up, excluded")
        entries = len(axes.get_legend_handles_labels()[1])
        rows = -(-entries // columns)
        axes.set_ylim(0, (1.13 + 0.12 * rows) * axes.get_ylim()[1])
        axes.set_ylabel(name)
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.legend(loc="upper right", ncols=columns)
    panels[-1].set_xlabel("training step")
    panels[-1].set_xlim(0.5, None)
    whole_numbers(panels[-1])
    alt = f"A line for the duration of every training step; {'; '.join(said)}."
    return entitle(figure, title or "Duration of the training steps", alt=alt)


def _check_count(runs: Sequence[Replicated]) -> None:
    if not 1 <= len(runs) <= len(_RUN_COLORS):
        raise ValueError(
            f"got {len(runs)} simulations, but a picture shows 1 to {len(_RUN_COLORS)}; "
            "give a list of them"
        )


def _shares(run: Replicated, pool: str) -> dict[State, float]:
    shares: dict[State, float] = {}
    for kind in ("busy", "idle"):
        uses = [getattr(result.pools[pool], kind) for result in run.results]
        for name in dict.fromkeys(name for use in uses for name in use):
            mean = sum(use.get(name, 0.0) for use in uses) / len(uses)
            shares[State(name, busy=kind == "busy")] = mean
    return shares


def _write_share(axes: Axes, row: int, start: float, share: float, *, white: bool) -> None:
    text = axes.text(
        100 * (start + share / 2),
        row,
        f"{100 * share:.0f} %",
        ha="center",
        va="center",
        color="#FFFFFF" if white else BLACK,
    )
    if not white:  # readable on a pattern
        text.set_bbox({"facecolor": "#FFFFFF", "alpha": 0.85, "linewidth": 0, "pad": 1})


def _lag_shares(run: Replicated, kind: str) -> tuple[dict[int, float], list[list[float]] | None]:
    found = run.lag_shares(kind)
    shares = {lag: one.mean for lag, one in found.items()} or {0: 0.0}
    if len(run.results) == 1:
        return shares, None
    below = [100 * min(one.mean, one.half_width) for one in found.values()]
    above = [100 * one.half_width for one in found.values()]
    return shares, [below, above] if found else None


def _bar_name(run: Replicated, pool: str, mark: str) -> str:
    gpus = run.results[0].pools[pool].gpus
    return f"{mark}{pool}, {gpus} GPUs" if gpus else f"{mark}{pool}"


def _marks(runs: Sequence[Replicated]) -> list[str]:
    """`A: `, `B: `, ... for two or more, nothing for one."""
    return [""] if len(runs) == 1 else [f"{letter}: " for letter in _LETTERS[: len(runs)]]


def _title(runs: Sequence[Replicated]) -> str:
    names = [run.results[0].name for run in runs]
    if len(runs) == 1:
        return names[0]
    return "    ".join(f"{mark}{name}" for mark, name in zip(_marks(runs), names, strict=True))
