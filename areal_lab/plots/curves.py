"""Pictures of a run step by step: reward.png, loss.png and staleness.png."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from areal_lab.control.ledger import mean_lag
from areal_lab.plots.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    NARROW,
    ORANGE,
    SKY,
    VERMILION,
    entitle,
    finished,
    new_figure,
    nothing_yet,
    whole_numbers,
)
from areal_lab.runlog.held_out import Measured
from areal_lab.runlog.intervals import running_mean
from areal_lab.runlog.lags import total, trained_batches
from areal_lab.runlog.records import Log, Scalar
from areal_lab.runlog.replay import eta_changes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from areal_lab.plots.picture import Picture


_RUNNING_MEAN_STEPS = 5
_LABEL_INCHES = 0.5
"""Minimum distance between two numbers of seconds."""
_WITH_CAPS = 25
"""Maximum number of measurements whose intervals have caps."""
_BEFORE, _AFTER = "reward_before", "reward_after"


@finished
def draw_reward(
    metrics: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
    measured: Sequence[Measured] = (),
    *,
    width: float = 8.0,
    title: str | None = None,
) -> Picture:
    """Draw the training reward per step, its running mean, and the held-out rewards.

    `summary` may have `reward_before`, `reward_after` and `best`. Held-out rewards `measured` on
    several versions are drawn at the mean version of their tokens, with a line from the first to
    the last.
    """
    metrics = [line for line in metrics if line.keys() >= {"step", "reward_mean", "time_s"}]
    steps = [int(line["step"]) for line in metrics]
    rewards = [float(line["reward_mean"]) for line in metrics]
    first, last = (steps[0] - 1, steps[-1]) if steps else (0, 1)
    ends = {at for key, at in ((_BEFORE, first), (_AFTER, last)) if summary.get(key)}
    between = [one for one in measured if one.version not in ends]
    figure = new_figure(width, 4.9 if between else 4.2)  # the legend is longer
    axes: Axes = figure.subplots()
    if steps:
        axes.plot(steps, rewards, "o", color=SKY, markersize=4, label="training batch")
    if len(steps) >= _RUNNING_MEAN_STEPS:
        means = running_mean(rewards, _RUNNING_MEAN_STEPS)
        label = f"mean of the last {_RUNNING_MEAN_STEPS} steps"
        axes.plot(steps, means, color=BLUE, linewidth=2, label=label)
    _held_out_line(axes, between)
    beside = 0.015 * (last - first)  # right of the last batch's point
    for key, step, label, color in (
        (_BEFORE, float(first), "held-out before training", GREY),
        (_AFTER, last + beside, "held-out after training", VERMILION),
    ):
        held_out = summary.get(key)
        if held_out:
            _held_out_point(axes, held_out, step, label, color)
    if best := summary.get("best"):
        after = best["version"] == last and last in ends
        _best(axes, best, best["version"] + beside * after)
    axes.set(xlabel="training step", ylabel="mean reward")
    axes.set_xlim(first - 0.02 * (last - first) - 0.2, last + 0.03 * (last - first) + 0.2)
    whole_numbers(axes)
    _reward_limits(axes, rewards, summary, between)
    if len(steps) > 1:
        _wall_seconds_on_top(axes, steps, [float(line["time_s"]) for line in metrics], first)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=1 if width < NARROW else 2)
    if not steps:
        nothing_yet(axes, "no training step finished")
    return entitle(
        figure,
        title or "Reward of each training step",
        alt=_rewards_in_words(rewards, summary, between),
    )


def _rewards_in_words(
    rewards: Sequence[float], summary: Mapping[str, Any], between: Sequence[Measured]
) -> str:
    if not rewards:
        return "Axes for the reward of each training step; no training step finished."
    first, last = rewards[:_RUNNING_MEAN_STEPS], rewards[-_RUNNING_MEAN_STEPS:]
    said = (
        f"Mean reward of {len(rewards)} training steps: {sum(first) / len(first):.3f} in the first "
        f"{len(first)}, {sum(last) / len(last):.3f} in the last {len(last)}."
    )
    for key, when in ((_BEFORE, "before"), (_AFTER, "after")):
        if held_out := summary.get(key):
            said += f" On held-out problems {float(held_out['mean']):.3f} {when} training."
    if between:
        one_or_more = "measurement" if len(between) == 1 else "measurements"
        said += f" {len(between)} {one_or_more} on held-out problems during training"
        said += f", the last one {between[-1].reward:.3f}."
    if best := summary.get("best"):
        said += f" The best checkpoint is that of step {best['version']}."
    return said


def _held_out_line(axes: Axes, measured: Sequence[Measured]) -> None:
    """Measurements during training: filled if they are of one version, else hollow."""
    for exact in (True, False):
        chosen = [one for one in measured if one.exact is exact]
        if not chosen:
            continue
        at = [_step_of(one) for one in chosen]
        ranges = [one.versions or (one.version, one.version) for one in chosen]
        label = "held-out problems" if exact else "held-out problems, tokens of several versions"
        axes.errorbar(
            at,
            [one.reward for one in chosen],
            yerr=[one.ci95 or 0.0 for one in chosen],
            xerr=None
            if exact
            else [
                [max(0.0, x - low) for x, (low, _) in zip(at, ranges, strict=True)],
                [max(0.0, high - x) for x, (_, high) in zip(at, ranges, strict=True)],
            ],
            fmt="D",
            color=GREEN,
            markerfacecolor=GREEN if exact else "white",
            markersize=5,
            capsize=2 if len(chosen) <= _WITH_CAPS else 0,
            linewidth=1.2,
            zorder=4,
            label=label,
        )
    in_order = sorted(measured, key=_step_of)
    axes.plot(
        [_step_of(one) for one in in_order],
        [one.reward for one in in_order],
        color=GREEN,
        linewidth=1,
        alpha=0.6,
    )


def _step_of(one: Measured) -> float:
    """Position of a measurement: the mean version of its tokens."""
    exact = one.exact or one.mean_version is None
    return float(one.version) if exact else float(one.mean_version or 0.0)


def _best(axes: Axes, best: Mapping[str, Any], step: float) -> None:
    axes.plot(
        [step],
        [best["reward"]],
        "o",
        markersize=13,
        markerfacecolor="none",
        markeredgecolor=BLACK,
        markeredgewidth=1.2,
        zorder=6,
        clip_on=False,
        label=f"best checkpoint: step {best['version']}, {best['reward']:.3f}",
    )


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


def _reward_limits(
    axes: Axes,
    rewards: Sequence[float],
    summary: Mapping[str, Any],
    between: Sequence[Measured],
) -> None:
    points = list(rewards)
    for one in between:
        points += [one.reward - (one.ci95 or 0.0), one.reward + (one.ci95 or 0.0)]
    for key in (_BEFORE, _AFTER):
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
    margin = known_steps[-1] - known_steps[0] + 1  # extrapolate beyond both ends
    known_steps = np.concatenate(([first - margin], known_steps, [steps[-1] + margin]))
    known_s = np.concatenate(([-margin * slope], known_s, [known_s[-1] + margin * slope]))
    top = axes.secondary_xaxis(
        "top",
        functions=(
            lambda step: np.interp(np.asarray(step, float), known_steps, known_s),
            lambda second: np.interp(np.asarray(second, float), known_s, known_steps),
        ),
    )
    top.set_xlabel("seconds since the start of training")
    figure = axes.get_figure(root=True)
    across = 0.0 if figure is None else _LABEL_INCHES / figure.get_figwidth()
    top.set_ticks(_spaced_seconds(known_s[1:-1].tolist(), known_steps[1:-1].tolist(), across))


def _spaced_seconds(
    seconds: Sequence[float], steps: Sequence[float], least: float
) -> Sequence[float]:
    """Round numbers of seconds above their steps, at least `least` apart.

    Steps take different times, the first one often the longest, so round numbers may crowd.
    """
    import numpy as np
    from matplotlib.ticker import MaxNLocator

    kept: list[float] = []
    wide = least * (steps[-1] - steps[0])
    for tick in MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(0.0, seconds[-1]):
        place, before = np.interp([tick, kept[-1] if kept else 0.0], seconds, steps)
        if tick <= seconds[-1] and (not kept or place - before >= wide):
            kept.append(float(tick))
    return kept


_MEAN_STEPS = 20


@finished
def draw_loss(
    metrics: Sequence[Mapping[str, Any]], *, width: float = 8.0, title: str | None = None
) -> Picture:
    """Draw the loss of each step and on held-out rows; for pairs also the share in the right order.

    `metrics` has one object per step, with `step`, `loss` and others as in metrics.jsonl.
    """
    pairs = any("accuracy" in line for line in metrics)
    figure = new_figure(width, 4.2)
    panels = figure.subplots(1, 2 if pairs else 1, squeeze=False)[0]
    _draw(panels[0], metrics, "loss")
    if pairs:
        _draw(panels[1], metrics, "accuracy")
        panels[1].set_ylim(0, 1.04)
    if panels[0].get_legend_handles_labels()[0]:
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return entitle(figure, title or "Loss of each training step", alt=_losses_in_words(metrics))


def _draw(axes: Axes, metrics: Sequence[Mapping[str, Any]], name: str) -> None:
    trained = [line for line in metrics if name in line]
    held_out = [line for line in metrics if f"held_out_{name}" in line]
    steps = [int(line["step"]) for line in trained]
    values = [float(line[name]) for line in trained]
    axes.plot(steps, values, "o", color=SKY, markersize=3, label="training batch")
    if len(values) >= _MEAN_STEPS:
        means = running_mean(values, _MEAN_STEPS)
        label = f"mean of the last {_MEAN_STEPS} steps"
        axes.plot(steps, means, color=BLUE, linewidth=2, label=label)
    axes.plot(
        [int(line["step"]) for line in held_out],
        [float(line[f"held_out_{name}"]) for line in held_out],
        "D-",
        color=VERMILION,
        markersize=5,
        label="held out",
    )
    axes.set(xlabel="training step", ylabel=name)
    whole_numbers(axes)
    if not trained:
        nothing_yet(axes, "no training step finished")


def _losses_in_words(metrics: Sequence[Mapping[str, Any]]) -> str:
    held_out = [float(line["held_out_loss"]) for line in metrics if "held_out_loss" in line]
    steps = sum("loss" in line for line in metrics)
    said = f"Loss of {steps} training steps."
    if held_out:
        said += f" On held-out rows it goes from {held_out[0]:.3f} to {held_out[-1]:.3f}."
    return said


@finished
def draw_staleness(log: Log, *, width: float = 10.0, title: str | None = None) -> Picture:
    """Draw the lags of trained tokens and samples: over the whole run, and step by step."""
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
    before = [batch.parts.means["before_queue"] for batch in batches]
    steps.plot(numbers, before, ":", color=ORANGE, linewidth=1.4, label="head, before the queue")
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
    if batches:
        # No tick beside the legend: a share is at most 100 %.
        share.set_yticks([tick for tick in share.get_yticks() if tick <= 100])
        share.set_xlim(-0.6, max(*largest, 1) + 0.6)
    said = "Lags of trained tokens; no training step finished."
    if batches:
        tokens = kinds[0][2]
        said = (
            f"Lags of the tokens of {len(batches)} training steps: mean {mean_lag(tokens):.2f} "
            f"versions, largest {max(tokens, default=0)}."
        )
    return entitle(figure, title or "Lag of the trained tokens and samples", alt=said)


def _eta_at(t_s: float, first: Scalar, changes: Sequence[tuple[float, float]]) -> float:
    """Staleness bound at a time; nan, which is not drawn, if it is infinite."""
    eta = next((eta for since_s, eta in reversed(changes) if since_s <= t_s), first)
    return eta if isinstance(eta, int | float) and math.isfinite(eta) else math.nan
