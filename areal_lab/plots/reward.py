"""reward.png: the reward on training and held-out problems, step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from areal_lab.plots.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    NARROW,
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

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from areal_lab.plots.picture import Picture

_RUNNING_MEAN_STEPS = 5
_LABEL_INCHES = 0.5
"""Least distance between two numbers of seconds."""
_WITH_CAPS = 25
"""Most measurements whose intervals have caps."""
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

    Args:
        metrics: one object per step, with `step`, `reward_mean` and `time_s`.
        summary: `reward_before` and `reward_after`, if they were measured, and `best`.
        measured: held-out rewards by version; those of several versions are drawn at the mean
            version of their tokens, with a line from the first to the last.
        width: in inches.
        title: in place of the picture's own.
    """
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
        figure, title or "Reward of each training step", alt=_said(rewards, summary, between)
    )


def _said(rewards: Sequence[float], summary: Mapping[str, Any], between: Sequence[Measured]) -> str:
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
    """Where a measurement stands: at the mean version of its tokens."""
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
    """Round numbers of seconds that are far enough apart where they stand, above their steps.

    Steps take different times, the first one often the longest, so round numbers may crowd.

    Args:
        seconds: at the end of each step; increasing.
        steps: the same ones, as the axis has them.
        least: distance between two ticks, as a share of the axis.
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
