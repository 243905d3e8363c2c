"""Where asynchrony stops paying: a map over split, length tail and batch. Not in the paper.

    panel                              across                            up
    against taking turns               GPUs that generate, of 16         spread of the lengths
    against one-step overlap           the same                          the same
    against taking turns, by batch     prompts per batch, 12 + 4 GPUs    the same

Few GPUs that generate make a run generation-bound, many make it train-bound. Taking turns means
colocated: all GPUs generate, then all train, so it has no split. The system is an eighth of that of
Table 1 (1.5B, 64 x 16 responses of 9,277 tokens on average, at most 27,648, eta 4).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from areal_lab.plots.style import finished, new_figure
from benchmarks.harness import Arguments
from reproductions.calibration import CALIBRATED, GROUP_CORRELATION
from reproductions.report.harness import configured, length, main, run
from reproductions.report.records import Reproduction, Row
from simulator.run.pools import PoolShares
from simulator.run.result import Replicated
from simulator.stats.statistics import Estimate
from simulator.workload.lengths import lengths_from
from simulator.workload.randomness import LENGTHS, stream

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from areal_lab.plots.picture import Picture

GPUS = 16
SPLITS, QUICK_SPLITS = (2, 4, 6, 8, 10, 12, 14), (4, 12)
SIGMAS, QUICK_SIGMAS = (0.05, 0.3, 0.5, 0.684, 1.0), (0.05, 0.684)
BATCHES, QUICK_BATCHES = (16, 32, 64, 128, 192), (32, 128)
PROMPTS, SPLIT = 64, 12
PRESET = "table_1_1.5b_asynchronous"
COLOCATED = ("cluster.placement=colocated", "schedule.name=synchronous")
WHY = (
    "Asynchrony avoids waiting for the longest response. If responses have nearly equal lengths "
    "there is nothing to avoid, and only its costs remain: each GPU has one of two jobs, weights "
    "are transferred, and interrupted contexts are prefilled again.",
    "A split that fits neither job leaves one side idle, which cannot happen when taking turns. "
    "With few GPUs for generation, or few for training, taking turns is faster for any tail.",
    "A large batch hides its tail: while the longest response is generated, every GPU has other "
    "work.",
    "One-step overlap runs one batch ahead and waits for whole batches. It also needs the split. "
    "Asynchrony is faster than one-step overlap if generation is the bottleneck, and equal if "
    "training is.",
)

Cell: TypeAlias = tuple[int, float]
"""GPUs that generate or prompts per batch, and the spread of ln(tokens)."""


@dataclass(frozen=True, slots=True)
class Maps:
    """Speed-ups by cell; above 1 asynchrony is faster."""

    over_turns: Mapping[Cell, Estimate]
    over_one_step: Mapping[Cell, Estimate]
    over_turns_by_batch: Mapping[Cell, Estimate]
    generation_bound: Mapping[Cell, float]
    """Idle share of the trainer minus that of the engines, in the asynchronous run."""
    tails: Mapping[float, float]
    """Longest response of a batch divided by the mean response, by spread."""


def reproduce(arguments: Arguments) -> Reproduction:
    """Simulate all cells; `--quick` only the corners."""
    maps = _simulate(arguments)
    return Reproduction(
        name="where_asynchrony_pays",
        claim=(
            "Asynchrony pays if response lengths differ much, the batch is small for the GPUs, and "
            "the split between generation and training fits. Otherwise it costs throughput. Not in "
            "the paper."
        ),
        rows=[
            *_rows("against taking turns", "of 16 GPUs generate", maps.over_turns),
            *_rows("against one-step overlap", "of 16 GPUs generate", maps.over_one_step),
            *_rows("against taking turns", "prompts a batch", maps.over_turns_by_batch),
        ],
        parameters=CALIBRATED,
        why=WHY,
        findings=findings(maps),
        figure=lambda: draw(maps),
        title="Blue: asynchronous is faster. Red, hatched: it is not",
    )


def _simulate(arguments: Arguments) -> Maps:
    quick = arguments.quick
    splits, sigmas = (QUICK_SPLITS, QUICK_SIGMAS) if quick else (SPLITS, SIGMAS)
    batches = QUICK_BATCHES if quick else BATCHES

    @cache
    def simulated(sigma: float, prompts: int, *settings: str) -> Replicated:
        sizes = length(arguments, steps=22, warmup=10, quick=(8, 3))
        common = (
            f"workload.prompts_per_batch={prompts}",
            f"workload.answers.sigma={sigma}",
            f"gpus={GPUS}",
            "schedule.max_concurrent_prompts=0",
        )
        return run(PRESET, CALIBRATED, *common, *sizes, *settings, arguments=arguments)

    def asynchronous(split: int, sigma: float, prompts: int = PROMPTS) -> Replicated:
        return simulated(sigma, prompts, f"rollout_gpus={split}")

    def one_step(split: int, sigma: float) -> Replicated:
        return simulated(sigma, PROMPTS, f"rollout_gpus={split}", "schedule.name=one_step_overlap")

    def in_turn(sigma: float, prompts: int = PROMPTS) -> Replicated:
        return simulated(sigma, prompts, *COLOCATED)

    cells = [(split, sigma) for split in splits for sigma in sigmas]
    return Maps(
        over_turns={
            (split, sigma): _ratio(asynchronous(split, sigma), in_turn(sigma))
            for split, sigma in cells
        },
        over_one_step={
            (split, sigma): _ratio(asynchronous(split, sigma), one_step(split, sigma))
            for split, sigma in cells
        },
        over_turns_by_batch={
            (prompts, sigma): _ratio(asynchronous(SPLIT, sigma, prompts), in_turn(sigma, prompts))
            for prompts in batches
            for sigma in sigmas
        },
        generation_bound={cell: _imbalance(asynchronous(*cell)) for cell in cells},
        tails={sigma: _tail(sigma, arguments) for sigma in sigmas},
    )


def _ratio(one: Replicated, other: Replicated) -> Estimate:
    return one.ratio(other, lambda result: result.tokens_per_s)


def _imbalance(own: Replicated) -> float:
    def idle(pool: PoolShares) -> float:
        return sum(pool.idle.values())

    return own.estimate(
        lambda result: idle(result.pools["training"]) - idle(result.pools["rollout"])
    ).mean


def _tail(sigma: float, arguments: Arguments) -> float:
    """Longest response of a batch divided by the mean response, averaged over many batches."""
    setting = f"workload.answers.sigma={sigma}"
    config = configured(PRESET, [GROUP_CORRELATION], setting, arguments=arguments)
    lengths, samples = lengths_from(config.workload.answers), config.workload.samples_per_prompt
    batches = [lengths.draw(stream(seed, LENGTHS, 0), PROMPTS, samples) for seed in range(64)]
    return float(np.mean([batch.max() for batch in batches])) / lengths.mean_tokens()


def _rows(against: str, what: str, cells: Mapping[Cell, Estimate]) -> list[Row]:
    return [
        Row(
            name=f"{against}: {across} {what}, sigma {sigma:g}", paper=None, ours=ours, unit="times"
        )
        for (across, sigma), ours in cells.items()
    ]


def findings(maps: Maps) -> list[str]:
    """The best split of each spread, and the number of cells without a gain."""
    splits = sorted({split for split, _ in maps.over_turns})
    found = []
    for sigma, tail in maps.tails.items():
        best = max(splits, key=lambda split: maps.over_turns[split, sigma].mean)
        pays = [split for split in splits if maps.over_turns[split, sigma].mean > 1]
        where = (
            f"and pays with {pays[0]} to {pays[-1]} GPUs that generate"
            if pays
            else "and pays with no split"
        )
        found.append(
            f"sigma {sigma:g} (the longest of {PROMPTS * 16} responses is {tail:.1f} times the "
            f"mean): against taking turns asynchrony gives at best "
            f"{maps.over_turns[best, sigma].mean:.2f} times the throughput, with {best} of {GPUS} "
            f"GPUs generating, {where}; there it gives "
            f"{maps.over_one_step[best, sigma].mean:.2f} times that of one-step overlap."
        )
    lost = {
        "taking turns": maps.over_turns,
        "one-step overlap": maps.over_one_step,
        f"taking turns, by batch at {SPLIT} + {GPUS - SPLIT}": maps.over_turns_by_batch,
    }
    for name, cells in lost.items():
        count = sum(cell.mean <= 1 for cell in cells.values())
        found.append(f"Against {name}: not faster in {count} of {len(cells)} cells.")
    return found


@finished
def draw(maps: Maps) -> Picture:
    """Three maps; solid line at equal speed, dashed line where both sides are equally idle."""
    figure = new_figure(13.5, 4.9)
    panels = figure.subplots(1, 3, width_ratios=(7, 7, 5.6))
    split_label = f"GPUs that generate, of {GPUS}\n<- generation-bound        train-bound ->"
    _panel(panels[0], maps.over_turns, "against taking turns (colocated)", split_label)
    _balance(panels[0], maps)
    _panel(panels[1], maps.over_one_step, "against one-step overlap, same split", split_label)
    _balance(panels[1], maps)
    batch_label = f"prompts per batch (16 responses each)\non {SPLIT} + {GPUS - SPLIT} GPUs"
    _panel(panels[2], maps.over_turns_by_batch, "against taking turns, by batch", batch_label)
    panels[0].set_ylabel("spread of ln(tokens), sigma")
    right = panels[2].secondary_yaxis("right")
    right.set_yticks(range(len(maps.tails)), [f"{tail:.1f}" for tail in maps.tails.values()])
    right.set_ylabel("longest of 1,024 responses / mean")
    handles, labels = _legend()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return figure


def _legend() -> tuple[list[Any], list[str]]:
    """Legend of numbers, colors and lines."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    told = {
        "number: throughput of asynchronous training over the other's": Line2D(
            [], [], linewidth=0, marker="$1.75$", markersize=20, color="black"
        ),
        "1 or less: asynchronous is not faster": Patch(
            facecolor="#F4A582", hatch="///", edgecolor="#777777", linewidth=0
        ),
        "equal speed": Line2D([], [], color="black", linewidth=2),
        "trainer and engines are equally idle": Line2D(
            [], [], color="black", linestyle="dashed", linewidth=1.2
        ),
    }
    return list(told.values()), list(told)


def _panel(axes: Axes, cells: Mapping[Cell, Estimate], title: str, label: str) -> None:
    """Throughput of asynchronous divided by the other, a number per cell; contour at 1."""
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    across = sorted({cell[0] for cell in cells})
    up = sorted({cell[1] for cell in cells})
    values = np.array([[cells[one, sigma].mean for one in across] for sigma in up])
    image = axes.imshow(
        values, origin="lower", aspect="auto", cmap="RdBu", norm=LogNorm(vmin=1 / 4, vmax=4)
    )
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            dark = not 0.4 < value < 2.5
            color = "white" if dark else "black"
            shade = image.cmap(image.norm(value))  # lines keep clear of the numbers
            text = axes.text(column, row, f"{value:.2f}", ha="center", va="center", zorder=3)
            text.set(color=color, path_effects=[withStroke(linewidth=2.5, foreground=shade)])
            if value <= 1:
                place = (column - 0.5, row - 0.5)
                axes.add_patch(
                    Rectangle(place, 1, 1, fill=False, hatch="///", linewidth=0, alpha=0.35)
                )
    if values.min() < 1 < values.max():
        axes.contour(np.log(values), levels=[0.0], colors="black", linewidths=2)
    axes.set_xticks(range(len(across)), [str(one) for one in across])
    axes.set_yticks(range(len(up)), [f"{sigma:g}" for sigma in up])
    axes.set_title(title)
    axes.set_xlabel(label)
    axes.grid(visible=False)


def _balance(axes: Axes, maps: Maps) -> None:
    """Draw a dashed line where both sides are equally idle."""
    across = sorted({cell[0] for cell in maps.generation_bound})
    up = sorted({cell[1] for cell in maps.generation_bound})
    values = np.array([[maps.generation_bound[one, sigma] for one in across] for sigma in up])
    if values.min() < 0 < values.max():
        axes.contour(values, levels=[0.0], colors="black", linestyles="dashed", linewidths=1.2)


if __name__ == "__main__":
    main(reproduce, __doc__)
