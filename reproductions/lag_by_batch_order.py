"""Lag of trained data by batch order. The paper does not print this result.

Eq. 3 bounds the number of started trajectories, floor((N - 1) / B) <= version + eta, not the age of
each. How old each is when it is trained on depends on which finished groups make a batch:

    oldest_finished_first         as in the released system: overtakes groups that still run
    bounded_lag                   waits for groups that would exceed the bound otherwise
    bounded_lag, dropping         drops them instead
    strict_start_order            in the order of starting: waits for every straggler

The system is that of Table 1 (1.5B, 96 + 32 GPUs) with an eighth of its batch, 64 x 16 responses,
so that the longest response lasts several training steps; running prompts are only limited by eq. 3
and the engines.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from areal_lab.plots.style import BLUE, VERMILION, finished, new_figure, whole_numbers
from benchmarks.harness import Arguments
from reproductions.calibration import CALIBRATED
from reproductions.report.harness import length, main, run
from reproductions.report.records import Reproduction, Row
from simulator.run.result import Replicated

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from areal_lab.plots.picture import Picture

ETAS = (1, 2, 4, 8)
DRAWN_ETA = 4
ORDERS: Mapping[str, tuple[str, ...]] = {
    "oldest finished first": ("schedule.batch_order=oldest_finished_first",),
    "bounded lag": ("schedule.batch_order=bounded_lag",),
    "bounded lag, dropping": ("schedule.batch_order=bounded_lag", "schedule.on_late=drop"),
    "strict start order": ("schedule.batch_order=strict_start_order",),
}
FIRST = next(iter(ORDERS))
SYSTEM = ("workload.prompts_per_batch=64", "schedule.max_concurrent_prompts=0")
WHY = (
    "A batch is complete as soon as enough groups are finished, whatever their age. A batch of "
    "the oldest finished groups overtakes all running groups. These are the long groups, and they "
    "become older with every batch. The largest lag is the time of the longest response divided "
    "by that of a step.",
    "The bound can be kept by waiting or by dropping. Waiting costs time: the trainer is idle "
    "until stragglers end, and the rest of the batch becomes as old as they are. Dropping costs "
    "the tokens of the dropped groups, and the trained responses become shorter than the sampled "
    "ones.",
    "Strict order waits even if no group is too old yet. If eq. 3 is the limit, as here, the "
    "bound itself requires this wait.",
    "With the batch of Table 1 a step lasts half as long as the longest response, and the "
    "released limit of one batch of running prompts keeps lags near 1 or 2 for any eta "
    "(`areal-lab simulate --preset table_1_1.5b_asynchronous`). If training is the bottleneck, "
    "the buffer is full and every sample has lag eta in any order.",
)

Runs: TypeAlias = Mapping[tuple[str, int], Replicated]
"""By order and eta."""


def reproduce(arguments: Arguments) -> Reproduction:
    """Simulate every order at every eta; `--quick` only one eta."""
    etas = (DRAWN_ETA,) if arguments.quick else ETAS
    runs = {
        (order, eta): _run(settings, eta, arguments)
        for eta in etas
        for order, settings in ORDERS.items()
    }
    return Reproduction(
        name="lag_by_batch_order",
        claim=(
            "Eq. 3 bounds the number of started trajectories, not the age of each: the lag depends "
            "on the batch order. Not in the paper."
        ),
        rows=[row for (order, eta) in runs for row in _rows(order, eta, runs)],
        parameters=CALIBRATED,
        why=WHY,
        findings=[finding(order, runs) for order in ORDERS],
        sensitivity=[_distribution(order, eta, runs) for order, eta in runs],
        figure=lambda: draw(runs),
        title=title(runs),
    )


def _run(settings: tuple[str, ...], eta: int, arguments: Arguments) -> Replicated:
    sizes = length(arguments, steps=80, warmup=25, quick=(30, 14))
    preset = "table_1_1.5b_asynchronous"
    return run(preset, CALIBRATED, *SYSTEM, *settings, f"eta={eta}", *sizes, arguments=arguments)


def shares(runs: Replicated, kind: str) -> dict[int, float]:
    """Share of samples (or tokens) by lag, over all seeds; `kind` as in `SimulationResult.lags`."""
    total: Counter[int] = Counter()
    for result in runs.results:
        total.update(result.lags(kind))
    everything = total.total()
    return {lag: total[lag] / everything for lag in range(max(total) + 1)}


def beyond(distribution: Mapping[int, float], eta: int) -> float:
    """Share of lags above eta."""
    return sum(share for lag, share in distribution.items() if lag > eta)


def _largest(runs: Replicated) -> int:
    return max(max(result.head_lags) for result in runs.results)


def _waiting(runs: Replicated) -> float:
    """Share of a step in which the trainer waits."""
    return runs.estimate(lambda result: result.mean("wait_s") / result.step_s).mean


def _rows(order: str, eta: int, runs: Runs) -> list[Row]:
    own = runs[order, eta]
    name = f"{order}, eta {eta}"
    return [
        Row(
            name=f"{name}: largest lag of a first token",
            paper=None,
            ours=own.estimate(lambda result: float(max(result.head_lags))),
            unit="versions",
        ),
        Row(
            name=f"{name}: samples older than eta",
            paper=None,
            ours=own.estimate(lambda result: _late(result.head_lags, eta)),
            unit="share",
            points=True,
        ),
        Row(
            name=f"{name}: mean lag of a token",
            paper=None,
            ours=own.estimate(lambda result: _mean(result.token_lags)),
            unit="versions",
        ),
        Row(
            name=f"{name}: throughput",
            paper=None,
            ours=own.ratio(runs[FIRST, eta], lambda result: result.tokens_per_s),
            unit=f"times that of {FIRST}",
        ),
    ]


def _late(lags: Mapping[int, int], eta: int) -> float:
    return sum(times for lag, times in lags.items() if lag > eta) / sum(lags.values())


def _mean(lags: Mapping[int, int]) -> float:
    return sum(lag * times for lag, times in lags.items()) / sum(lags.values())


def _distribution(order: str, eta: int, runs: Runs) -> dict[str, str]:
    """Details for the table of other assumptions."""
    own = runs[order, eta]
    dropped = sum(result.counts.dropped for result in own.results)
    trained = sum(result.counts.trained for result in own.results)
    return {
        "order": order,
        "eta": str(eta),
        "first tokens by lag, %": _in_words(shares(own, "head")),
        "tokens by lag, %": _in_words(shares(own, "token")),
        "trainer waits": f"{_waiting(own):.1%}",
        "groups dropped": f"{dropped / (dropped + trained):.1%}",
    }


def _in_words(distribution: Mapping[int, float]) -> str:
    return ", ".join(f"{lag}: {100 * share:.1f}" for lag, share in distribution.items())


def finding(order: str, runs: Runs) -> str:
    """Lags in this order, and their cost."""
    eta = DRAWN_ETA
    own = runs[order, eta]
    late, largest = beyond(shares(own, "head"), eta), _largest(own)
    age = (
        f"{late:.0%} of the samples begin more than {eta} versions back, the oldest {largest}"
        if late
        else f"no sample begins more than {largest} versions back"
    )
    ratio = own.ratio(runs[FIRST, eta], lambda result: result.tokens_per_s).mean
    more_or_less = "less" if ratio < 1 else "more"
    cost = f"; {abs(1 - ratio):.0%} {more_or_less} throughput than {FIRST}"
    if order == FIRST:
        cost = ""
    return f"{order}, eta {eta}: {age}; the trainer waits {_waiting(own):.0%} of the time{cost}."


def title(runs: Runs) -> str:
    """The finding in one line."""
    own = runs[FIRST, DRAWN_ETA]
    late = beyond(shares(own, "head"), DRAWN_ETA)
    return (
        f"eta = {DRAWN_ETA} bounds how many are started, not their age: in the usual order "
        f"{late:.0%} of the samples are older, up to {_largest(own)} versions"
    )


@finished
def draw(runs: Runs) -> Picture:
    """Lags by order, with lags above eta in red, and throughput."""
    figure = new_figure(10, 1.2 + 1.25 * len(ORDERS))
    panels = figure.subplots(len(ORDERS), 2, sharex="col", width_ratios=(3, 1.3), squeeze=False)
    last = max(_largest(runs[order, DRAWN_ETA]) for order in ORDERS)
    for row, order in enumerate(ORDERS):
        own = runs[order, DRAWN_ETA]
        _draw_lags(panels[row][0], order, own, last)
        _draw_cost(panels[row][1], own, runs[FIRST, DRAWN_ETA])
    panels[-1][0].set_xlabel("lag of a sample's first token, versions")
    panels[-1][1].set_xlabel("throughput, times that of the first")
    return figure


def _draw_lags(axes: Axes, order: str, own: Replicated, last: int) -> None:
    heads = shares(own, "head")
    colors = [VERMILION if lag > DRAWN_ETA else BLUE for lag in heads]
    bars = axes.bar(list(heads), [100 * share for share in heads.values()], 0.8, color=colors)
    labels = [f"{100 * share:.1f} %" if share >= 0.0005 else "" for share in heads.values()]
    axes.bar_label(bars, labels, fontsize=7.5, padding=1)
    axes.axvline(DRAWN_ETA + 0.5, color=VERMILION, linewidth=1, linestyle="--")
    late = beyond(heads, DRAWN_ETA)
    says = f"older than eta: {late:.0%}" if late else "none older than eta"
    axes.text(DRAWN_ETA + 0.62, 88, says, color=VERMILION, fontsize=9)
    axes.set(xlim=(-0.6, max(last, DRAWN_ETA + 2) + 0.6), ylim=(0, 118))
    axes.set_ylabel(f"{order}\n% of samples", fontsize=8)
    whole_numbers(axes)
    axes.grid(visible=False, axis="x")


def _draw_cost(axes: Axes, own: Replicated, first: Replicated) -> None:
    ratio = own.ratio(first, lambda result: result.tokens_per_s)
    axes.barh(0, ratio.mean, 0.5, color=BLUE)
    if 0 < ratio.half_width < math.inf:
        axes.errorbar(ratio.mean, 0, xerr=ratio.half_width, color="black", capsize=3)
    axes.text(
        0.03,
        0,
        f"{ratio.mean:.2f}; trainer waits {_waiting(own):.0%}",
        color="white",
        va="center",
        fontsize=8.5,
    )
    axes.set(yticks=(), xlim=(0, 1.15), ylim=(-0.6, 0.6))


if __name__ == "__main__":
    main(reproduce, __doc__)
