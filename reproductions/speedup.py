"""What the 2.77x of Table 1 is made of: four switches, on and off in all 16 combinations.

    switch         on, as in the paper                          off
    tail           log-normal lengths, cap 27,648 tokens        all responses have the mean, 9,277
    engine CPU     14.25 ms of the engine's CPU a decode step   none: a step takes the GPU's time
    split          the synchronous run has 96 + 32 GPUs, too    its 128 GPUs take turns (colocated)
    interruption   new weights interrupt responses              engines wait until responses end

The value of a combination is the time of a synchronous step over that of an asynchronous one (eta
4). The factor of a switch depends on what else is on; see `simulator.stats.waterfall`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from areal_lab.plots.style import BLUE, GREY, VERMILION, finished, new_figure
from benchmarks.harness import Arguments
from reproductions.calibration import parameters
from reproductions.report.harness import expected, main
from reproductions.report.records import Reproduction, Row
from reproductions.report.results import load
from simulator.assembly.simulate import simulate
from simulator.config.load import load_simulation
from simulator.config.schema import SimulationConfig
from simulator.stats.statistics import Estimate, estimate
from simulator.stats.waterfall import Switches, Waterfall, all_sets, waterfall

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from areal_lab.plots.picture import Picture

Kind: TypeAlias = Literal["synchronous", "asynchronous"]
KINDS: Final[tuple[Kind, ...]] = ("synchronous", "asynchronous")
SWITCHES: Final = ("tail", "engine CPU", "split", "interruption")
ON_OFF: Final[Mapping[str, tuple[str, str]]] = {
    "tail": ("responses differ in length", "all responses have 9,277 tokens"),
    "engine CPU": ("a decode step takes 14 ms of CPU", "decode steps take the GPU's time alone"),
    "split": ("the baseline has 96 + 32 GPUs, too", "the baseline's 128 GPUs take turns"),
    "interruption": ("new weights interrupt responses", "engines wait until responses end"),
}
"""What each switch means, on and off."""
OFF: Final[Mapping[Kind, Mapping[str, Mapping[str, Any]]]] = {
    "synchronous": {
        "tail": {"workload.answers.kind": "constant"},
        "engine CPU": {"rollout.engine_overhead_s": 0.0},
        # Synchronous AReaL has no engines that sleep: training fits beside them, and only the new
        # weights take time.
        "split": {
            "cluster.placement": "colocated",
            "colocation.sleep": "none",
            "colocation.offload": "none",
            "outside.batch_s": 0.0,
        },
    },
    "asynchronous": {
        "tail": {"workload.answers.kind": "constant"},
        "engine CPU": {"rollout.engine_overhead_s": 0.0},
        "interruption": {"schedule.interruptible": False},
    },
}
"""Settings that turn a switch off, for the runs that it concerns."""
LENGTHS: Final[Mapping[Kind, tuple[int, int]]] = {"synchronous": (13, 1), "asynchronous": (32, 8)}
"""Simulated steps and steps left out as warm-up; synchronous steps are independent."""
QUICK: Final[Mapping[Kind, tuple[int, int]]] = {"synchronous": (3, 1), "asynchronous": (10, 4)}
_LEFT, _RIGHT, _ENDS = 0.4, 4.6, ("all on", "paper")
WHY: Final = (
    "With everything off, asynchrony is slower: 32 GPUs train what 128 train in turn. It pays "
    "because it avoids waiting for the longest response and for the other part of the GPUs.",
    "The largest factor is the baseline's. We assume that synchronous AReaL keeps the split of 96 "
    "+ 32 GPUs, because its step in Table 1 equals that of eta 0 in Figure 5c, where only eta "
    "differs; the paper does not print the split. Relative to a synchronous run that uses all "
    "GPUs in turn the ratio is 2.0; the paper's ratio to verl, which uses all GPUs in turn, is "
    "2.27.",
    "Interruption pays only if responses differ in length and decode steps cannot get shorter "
    "than the engine's CPU time. Without one of the two, engines are drained before the trainer "
    "is done. With both, they wait up to 400 s for the longest response of each version. This "
    "gain is larger than the 12 and 17 % of the paper's Figure 6b, which our simulation misses in "
    "the same direction (figure_6b gives possible explanations).",
    "The order matters: the first switch changes little, because the other factors still limit "
    "the step. Averages over all orders are Shapley values of the logarithm.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedup:
    """Seconds per step of all runs, one number per seed."""

    step_s: Mapping[Kind, Mapping[Switches, tuple[float, ...]]]
    """By the switches that concern the run."""
    seeds: int

    def seconds(self, kind: Kind, on: Collection[str]) -> tuple[float, ...]:
        """Seconds per step with these switches on, one number per seed."""
        return self.step_s[kind][_concerned(kind, on)]

    def step(self, kind: Kind, on: Collection[str] = SWITCHES) -> Estimate:
        """Their mean, with the interval over seeds."""
        return estimate(self.seconds(kind, on))

    def ratios(self, on: Collection[str]) -> tuple[float, ...]:
        """Synchronous over asynchronous, seed by seed: both have the same prompts and lengths."""
        pairs = zip(self.seconds("synchronous", on), self.seconds("asynchronous", on), strict=True)
        return tuple(synchronous / asynchronous for synchronous, asynchronous in pairs)

    def ratio(self, on: Collection[str] = SWITCHES) -> Estimate:
        """Its mean, with the interval over seeds."""
        return estimate(self.ratios(on))

    def waterfall(
        self, on: Sequence[str] = SWITCHES, *, order: Sequence[str] | None = None
    ) -> Waterfall:
        """What the ratio with these switches on is made of."""
        values = {chosen: self.ratios(chosen) for chosen in all_sets(on)}
        return waterfall(values, on, order=order)

    def to_json(self) -> dict[str, Any]:
        """As one JSON object; sets of switches are joined by `+`."""
        runs = {
            kind: {"+".join(_ordered(on)): list(values) for on, values in each.items()}
            for kind, each in self.step_s.items()
        }
        return {"switches": list(SWITCHES), "seeds": self.seeds, "step_s": runs}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Speedup:
        """What `to_json` wrote."""
        step_s = {
            kind: {
                frozenset(filter(None, name.split("+"))): tuple(values)
                for name, values in record["step_s"][kind].items()
            }
            for kind in KINDS
        }
        return cls(step_s=step_s, seeds=record["seeds"])


def config_of(
    kind: Kind, on: Collection[str] = SWITCHES, *, steps: int, warmup_steps: int
) -> SimulationConfig:
    """The 1.5B run of Table 1 with some switches on.

    Raises:
        ValueError: an unknown switch.
    """
    if unknown := set(on) - set(SWITCHES):
        raise ValueError(f"unknown switches {sorted(unknown)}; known are {', '.join(SWITCHES)}")
    off = [name for name in OFF[kind] if name not in on]
    settings = {name: value for switch in off for name, value in OFF[kind][switch].items()}
    calibrated = [parameter.override for parameter in parameters("1.5B")]
    config = load_simulation(f"table_1_1.5b_{kind}", calibrated)
    return config.with_settings(
        {"workload.steps": steps, "workload.warmup_steps": warmup_steps, **settings}
    )


def run_speedup(
    *,
    seeds: int,
    lengths: Mapping[Kind, tuple[int, int]] = LENGTHS,
    on_run: Callable[[], object] = lambda: None,
) -> Speedup:
    """Simulate all combinations, one run after the other.

    Args:
        seeds: repetitions; seed k has the same prompts and lengths in every run.
        lengths: steps and warm-up steps.
        on_run: called after each run, of which there are `runs(seeds)`.
    """
    step_s: dict[Kind, dict[Switches, tuple[float, ...]]] = {}
    for kind in KINDS:
        step_s[kind] = {}
        for on in all_sets(tuple(OFF[kind])):
            steps, warmup_steps = lengths[kind]
            config = config_of(kind, on, steps=steps, warmup_steps=warmup_steps)
            found = []
            for seed in range(1, seeds + 1):
                found.append(simulate(config, seed=seed).step_s)
                on_run()
            step_s[kind][on] = tuple(found)
    return Speedup(step_s=step_s, seeds=seeds)


def runs(seeds: int) -> int:
    """Runs of `run_speedup`."""
    return seeds * sum(1 << len(OFF[kind]) for kind in KINDS)


def reproduce(arguments: Arguments) -> Reproduction:
    """Simulate all combinations."""
    lengths = QUICK if arguments.quick else LENGTHS
    return told(run_speedup(seeds=arguments.repeats, lengths=lengths))


def saved() -> Speedup:
    """The packaged runs, from `python -m reproductions.speedup --save`."""
    return Speedup.from_json(load("speedup").data)


def told(found: Speedup) -> Reproduction:
    """The rows and findings of all combinations."""
    printed = expected("table_1")["rows"]["1.5B"]
    whole = found.waterfall()
    rows = [
        Row(
            name="all on",
            paper=printed["synchronous_h"] / printed["asynchronous_h"],
            ours=found.ratio(),
            unit="times",
        ),
        Row(
            name="against a synchronous run on all GPUs in turn (without split)",
            paper=printed["verl_h"] / printed["asynchronous_h"],
            ours=found.ratio(set(SWITCHES) - {"split"}),
            unit="times",
        ),
        *(
            Row(
                name=f"without {name}",
                paper=None,
                ours=found.ratio(set(SWITCHES) - {name}),
                unit="times",
            )
            for name in SWITCHES
            if name != "split"
        ),
        Row(name="all off", paper=None, ours=found.ratio(()), unit="times"),
        *(
            Row(
                name=f"factor of {factor.name}, on average over all orders",
                paper=None,
                ours=factor.factor,
                unit="times",
            )
            for factor in whole.factors
        ),
    ]
    return Reproduction(
        name="speedup",
        claim=(
            "The 2.77x of Table 1 (1.5B) needs responses of different lengths, slow decode steps, "
            "a baseline in which one part of the GPUs waits for the other, and interruption: what "
            "each multiplies it by, in all 16 combinations. Not in the paper."
        ),
        rows=rows,
        parameters=parameters("1.5B"),
        why=WHY,
        findings=findings(found),
        sensitivity=_orders(whole),
        figure=partial(draw, whole, printed["synchronous_h"] / printed["asynchronous_h"]),
        title="What the ratio is made of: average over all orders, lines from least to most",
        data=found.to_json(),
    )


def findings(found: Speedup) -> list[str]:
    """Sentences generated from the numbers."""
    whole = {factor.name: factor for factor in found.waterfall().factors}
    cut = whole["interruption"]
    return [
        f"With all four on, a synchronous step takes {_times(found.ratio())} as long as an "
        f"asynchronous one; with all off {_times(found.ratio(()))}.",
        "On average over the orders of switching, they multiply that by "
        + ", ".join(f"{one.factor.mean:.2f} ({name})" for name, one in whole.items())
        + ".",
        f"Interruption multiplies it by {cut.least:.2f} to {cut.most:.2f}, depending on what else "
        "is on: it needs both the tail and slow decode steps.",
    ]


@finished
def draw(found: Waterfall, paper: float) -> Picture:
    """The waterfall, from the ratio with all off to the paper's."""
    from matplotlib.ticker import FixedLocator, NullFormatter, StrMethodFormatter

    figure = new_figure(8, 3.2)
    axes = figure.subplots()
    axes.set_xscale("log")
    for place, one in enumerate(found.factors, start=1):
        color = BLUE if one.end >= one.start else VERMILION
        axes.barh(place, one.end - one.start, left=one.start, color=color, height=0.6)
        axes.plot([one.start * one.least, one.start * one.most], [place, place], color=GREY)
        _beside(axes, max(one.end, one.start, one.start * one.most), place, one.factor.mean, "x ")
    ends = (found.first.mean, *([math.nan] * len(found.factors)), found.last.mean, paper)
    for place, value in enumerate(ends):
        if math.isfinite(value):
            axes.barh(place, value - _LEFT, left=_LEFT, color=GREY, height=0.6)
            _beside(axes, value, place, value)
    axes.set_yticks(range(len(ends)), ["all off", *(f.name for f in found.factors), *_ENDS])
    axes.invert_yaxis()
    axes.set_xlim(_LEFT, _RIGHT)
    axes.xaxis.set_major_locator(FixedLocator([0.5, 1, 2, 3, 4]))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("synchronous step / asynchronous step; logarithmic")
    return figure


def _beside(axes: Axes, value: float, place: int, number: float, before: str = "") -> None:
    text = f"{before}{number:.2f}"
    axes.annotate(text, (value, place), (5, 0), textcoords="offset points", va="center")


def _orders(whole: Waterfall) -> list[dict[str, Any]]:
    return [
        {
            "switch": one.name,
            "average over orders": f"{one.factor.mean:.2f}",
            "where it matters least": f"{one.least:.2f}",
            "where it matters most": f"{one.most:.2f}",
        }
        for one in whole.factors
    ]


def _concerned(kind: Kind, on: Collection[str]) -> Switches:
    return frozenset(on).intersection(OFF[kind])


def _ordered(on: Collection[str]) -> list[str]:
    return [name for name in SWITCHES if name in on]


def _times(value: Estimate) -> str:
    return f"{value.mean:.2f} times ({value.low:.2f} to {value.high:.2f})"


if __name__ == "__main__":
    main(reproduce, __doc__)
