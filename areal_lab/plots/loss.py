"""loss.png: loss, and accuracy on pairs, of training on fixed data, step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from areal_lab.plots.style import (
    BLUE,
    SKY,
    VERMILION,
    entitle,
    finished,
    new_figure,
    nothing_yet,
    whole_numbers,
)
from areal_lab.runlog.intervals import running_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from areal_lab.plots.picture import Picture

_MEAN_STEPS = 20


@finished
def draw_loss(
    metrics: Sequence[Mapping[str, Any]], *, width: float = 8.0, title: str | None = None
) -> Picture:
    """Draw the loss of each step and on held-out rows; of pairs also the share in right order.

    Args:
        metrics: one object per step, with `step`, `loss` and others as in metrics.jsonl.
        width: in inches.
        title: in place of the picture's own.
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
    return entitle(figure, title or "Loss of each training step", alt=_said(metrics))


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


def _said(metrics: Sequence[Mapping[str, Any]]) -> str:
    held_out = [float(line["held_out_loss"]) for line in metrics if "held_out_loss" in line]
    steps = sum("loss" in line for line in metrics)
    said = f"Loss of {steps} training steps."
    if held_out:
        said += f" On held-out rows it goes from {held_out[0]:.3f} to {held_out[-1]:.3f}."
    return said
