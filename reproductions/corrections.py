"""What may stand in place of the decoupled objective at a large lag, and at what cost.

Sixteen losses of the functional core and the three batch orders on addition, co-simulated at eta 8
and inf. Runs that sweeps/corrections and sweeps/batch_orders hold are not repeated; all of them
take two CPU hours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from areal_lab.plots.style import BLUE, GREY, VERMILION, finished, new_figure
from benchmarks.harness import Arguments
from reproductions.learning.compare import (
    BySeed,
    chosen,
    covers_zero,
    is_below_zero,
    mean,
    minus,
    written,
)
from reproductions.learning.runs import Data, Run, perform, quick, seeds
from reproductions.report.harness import main
from reproductions.report.records import Reproduction, Row
from reproductions.report.results import load

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from areal_lab.plots.picture import Picture

SEEDS: Final = 5
NAME: Final = "corrections"
NAIVE: Final = "naive"
WHY: Final = (
    "All runs of one seed start with the same weights and see the same problems, so differences "
    "are paired by seed. `Not told apart from the best` means that the interval of the difference "
    "covers zero; such losses are not ranked.",
    "Losses have the numbers of their papers or frameworks, and one learning rate, 3e-4, at which "
    "naive PPO loses most. Another rate or clip may suit some losses better.",
    "GSPO's clip of 3e-4 is meant for the mean over thousands of tokens, which changes little. "
    "Responses have 5 tokens here, and nearly all of them exceed it; with PPO's clip GSPO learns.",
    "CPU seconds are for a whole run, including evaluations, on a machine with other work: "
    "differences below a tenth are not significant. In the recorded runs PPO alone left out "
    "tokens without advantage; today a named loss does so, too.",
)


def reproduce(arguments: Arguments) -> Reproduction:
    """Run what is missing of both studies."""
    return build(measure(arguments))


def recorded(_: Arguments) -> Reproduction:
    """The result that is packaged."""
    saved = load(NAME)
    return build(saved.data, saved.origin)


def measure(arguments: Arguments) -> Data:
    """The runs by study; with `--quick` two short ones of one seed each."""
    if arguments.quick:
        grid = [
            "grid.staleness={'8': {eta: 8}}",
            "grid.correction={naive: {actor.use_decoupled_loss: false}, 'decoupled, cap 5': {}}",
        ]
        found = perform(NAME, [*quick(NAME), *grid, *seeds(arguments)])
        return {NAME: [run.to_json() for run in found], "batch_orders": []}
    return {
        study: [run.to_json() for run in perform(study, seeds(arguments))]
        for study in (NAME, "batch_orders")
    }


def build(data: Data, origin: str = "") -> Reproduction:
    """The reproduction from its runs."""
    runs = [Run.from_json(record) for record in data[NAME]]
    ordered = [Run.from_json(record) for record in data["batch_orders"]]
    etas = list(dict.fromkeys(run.choice["staleness"] for run in runs))
    tables = {
        f"eta {eta}: held-out reward after {runs[0].steps} steps": table(runs, eta) for eta in etas
    }
    if ordered:
        tables["Batch orders, eta 8"] = orders(ordered)
    return Reproduction(
        name=NAME,
        claim=(
            "Which corrections for stale samples learn as well as the decoupled objective. Not in "
            "the paper."
        ),
        rows=[_row(runs, eta, name) for eta in etas for name in losses(runs) if name != NAIVE],
        parameters=(),
        why=WHY,
        findings=[finding(runs, eta) for eta in etas],
        tables=tables,
        figure=lambda: draw(runs),
        title="Held-out reward by correction, minus that of naive PPO, seed by seed",
        data=data,
        origin=origin,
    )


def losses(runs: Sequence[Run]) -> list[str]:
    """Names of the corrections, in the order of the study."""
    return list(dict.fromkeys(run.choice["correction"] for run in runs))


def cells(runs: Sequence[Run], eta: str) -> dict[str, BySeed]:
    """The runs of each correction at one eta, the best mean first."""
    found = {name: chosen(runs, staleness=eta, correction=name) for name in losses(runs)}
    known = {name: own for name, own in found.items() if own}
    return dict(sorted(known.items(), key=lambda one: -mean(one[1]).mean))


def finding(runs: Sequence[Run], eta: str) -> str:
    """What is told apart from the best, and what loses to naive PPO."""
    found = cells(runs, eta)
    best, *others = found
    close = [name for name in others if covers_zero(minus(found[name], found[best]))]
    worse = _told_from_naive(found)
    before = next(iter(found[best].values())).before
    collapsed = [name for name, own in found.items() if mean(own).high < before]
    parts = [
        f"At eta {eta} the best mean is that of {best} ({written(mean(found[best]))}); not told "
        f"apart from it: {_listed(close)}",
        f"worse than naive PPO ({written(mean(found[NAIVE]))}): {_listed(worse)}",
        f"below the {before:.3f} before training: {_listed(collapsed)}",
    ]
    return "; ".join(parts) + "."


def table(runs: Sequence[Run], eta: str) -> list[dict[str, str]]:
    """A line for each correction, the best mean first."""
    found = cells(runs, eta)
    best = next(iter(found))
    return [
        {
            "correction": name,
            "reward": written(mean(own)),
            "minus naive": "" if name == NAIVE else written(minus(own, found[NAIVE]), sign="+"),
            "minus the best": "" if name == best else written(minus(own, found[best]), sign="+"),
            "drift": f"{mean(own, attrgetter('drift')).mean:.3f}",
            "tokens clipped": f"{mean(own, attrgetter('clip_fraction')).mean:.1%}",
            "CPU s": f"{mean(own, attrgetter('cpu_s')).mean:.0f}",
        }
        for name, own in found.items()
    ]


def orders(runs: Sequence[Run]) -> list[dict[str, str]]:
    """A line for each batch order and objective."""
    rows = []
    names = list(dict.fromkeys(run.choice["order"] for run in runs))
    for objective in dict.fromkeys(run.choice["objective"] for run in runs):
        first = chosen(runs, order=names[0], objective=objective)
        for name in names:
            own = chosen(runs, order=name, objective=objective)
            rows.append(
                {
                    "order": name,
                    "objective": objective,
                    "reward": written(mean(own)),
                    f"minus {names[0]}": ""
                    if name == names[0]
                    else written(minus(own, first), sign="+"),
                    "mean lag": f"{mean(own, attrgetter('lag')).mean:.2f}",
                    "hours": f"{mean(own, attrgetter('hours')).mean:.2f}",
                }
            )
    return rows


def _row(runs: Sequence[Run], eta: str, name: str) -> Row:
    found = cells(runs, eta)
    return Row(
        name=f"eta {eta}: {name} minus {NAIVE}",
        paper=None,
        ours=minus(found[name], found[NAIVE]),
        unit="reward",
    )


def _told_from_naive(found: Mapping[str, BySeed]) -> list[str]:
    return [
        name
        for name, own in found.items()
        if name != NAIVE and is_below_zero(minus(own, found[NAIVE]))
    ]


def _listed(names: Sequence[str]) -> str:
    return "; ".join(names) or "none"


@finished
def draw(runs: Sequence[Run]) -> Picture:
    """Differences from naive PPO, a panel for each eta, in the order of the study."""
    etas = list(dict.fromkeys(run.choice["staleness"] for run in runs))
    names = losses(runs)
    figure = new_figure(9, 1.3 + 0.26 * len(names))
    panels = figure.subplots(1, len(etas), sharey=True, squeeze=False)[0]
    for axes, eta in zip(panels, etas, strict=True):
        _draw_eta(axes, cells(runs, eta), names)
        axes.set_title(f"eta {eta}")
    return figure


def _draw_eta(axes: Axes, found: Mapping[str, BySeed], names: Sequence[str]) -> None:
    naive = found[NAIVE]
    for place, name in enumerate(names):
        if name not in found:
            continue
        own = minus(found[name], naive)
        color = GREY if covers_zero(own) else BLUE if own.mean > 0 else VERMILION
        width = 0.0 if own.half_width == float("inf") else own.half_width
        axes.errorbar(own.mean, place, xerr=width, fmt="o", color=color, capsize=3)
    axes.axvline(0, color="black", linewidth=0.8)
    before = next(iter(naive.values())).before - mean(naive).mean
    axes.axvline(before, color=GREY, linewidth=1, linestyle=":")
    axes.text(before, -0.9, "before training", color=GREY, ha="center", fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -1.2)
    axes.set_xlabel("reward minus that of naive PPO")


if __name__ == "__main__":
    main(reproduce, __doc__, seeds=SEEDS)
