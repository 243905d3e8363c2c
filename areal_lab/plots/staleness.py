"""staleness.png: the lag of trained tokens and samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from areal_lab.plots.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    NARROW,
    ORANGE,
    entitle,
    finished,
    new_figure,
    nothing_yet,
    whole_numbers,
)
from areal_lab.runlog.by_hand import eta_changes
from areal_lab.runlog.lags import mean_lag, total, trained_batches
from areal_lab.runlog.records import Log, Scalar

if TYPE_CHECKING:
    from areal_lab.plots.picture import Picture


@finished
def draw_staleness(log: Log, *, width: float = 10.0, title: str | None = None) -> Picture:
    """Draw the lags of trained tokens and samples: over the whole run, and step by step.

    Args:
        log: the log of a run, real or simulated.
        width: in inches; a narrow picture has one panel above the other.
        title: in place of the picture's own.
    """
    narrow = width < NARROW
    figure = new_figure(width, 6.4 if narrow else 4)
    share, steps = figure.subplots(2, 1) if narrow else figure.subplots(1, 2)
    batches = list(trained_batches(log))
    kinds = (
        ("token: all tokens", BLUE, total(b.token_lags for b in batches)),
        ("head: first token of each sample", ORANGE, total(b.head_lags for b in batches)),
        ("tail: last token of each sample", GREEN, total(b.tail_lags for b in batches)),
    )
    width = 0.27
    for position, (label, color, lags) in enumerate(kinds):
        count = sum(lags.values())
        if count:
            xs = [lag + (position - 1) * width for lag in lags]
            heights = [100 * times / count for times in lags.values()]
            name = f"{label} (mean {mean_lag(lags):.2f}, max {max(lags)})"
            share.bar(xs, heights, width=width, color=color, label=name)
    share.set(xlabel="lag (versions)", ylabel="share (%)", title="lag over the whole run")
    whole_numbers(share)
    numbers = [batch.version for batch in batches]
    for name, color in (("head", ORANGE), ("token", BLUE), ("tail", GREEN)):
        means = [mean_lag(getattr(batch, f"{name}_lags")) for batch in batches]
        steps.plot(numbers, means, color=color, linewidth=1.8, label=f"{name}, mean")
    # The oldest token of a batch is the first token of a sample, so this is also its largest lag.
    largest = [max(batch.head_lags, default=0) for batch in batches]
    steps.plot(numbers, largest, ".", color=BLACK, markersize=4, label="head, largest")
    eta, changes = log.header.limits.get("eta"), eta_changes(log)
    if batches and changes:
        etas = [_eta_at(batch.begun_s, eta, changes) for batch in batches]
        steps.step(numbers, etas, "--", where="mid", color=GREY, linewidth=1, label="eta")
    elif batches and isinstance(eta, int | float) and math.isfinite(eta):
        steps.axhline(eta, color=GREY, linestyle="--", linewidth=1, label=f"eta = {eta:g}")
    steps.set(xlabel="training step", ylabel="lag (versions)", title="lag of each batch")
    whole_numbers(steps)
    for axes in (share, steps):
        if batches:
            # Leave room for the legend above the data.
            axes.set_ylim(0, 1.38 * max(axes.get_ylim()[1], 1))
            axes.legend(loc="upper left", ncols=1 if axes is share else 2)
        else:
            nothing_yet(axes, "no training step finished")
    said = "Lags of trained tokens; no training step finished."
    if batches:
        tokens = kinds[0][2]
        said = (
            f"Lags of the tokens of {len(batches)} training steps: mean {mean_lag(tokens):.2f} "
            f"versions, largest {max(tokens, default=0)}."
        )
    return entitle(figure, title or "Lag of the trained tokens and samples", alt=said)


def _eta_at(t_s: float, first: Scalar, changes: Sequence[tuple[float, float]]) -> float:
    """The staleness bound in force at a time; nan, which is not drawn, if it is infinite."""
    eta = next((eta for since_s, eta in reversed(changes) if since_s <= t_s), first)
    return eta if isinstance(eta, int | float) and math.isfinite(eta) else math.nan
