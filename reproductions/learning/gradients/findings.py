"""What gradients by lag say, in sentences with their numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from statistics import fmean
from types import MappingProxyType
from typing import Final

from reproductions.learning.gradients.bias_and_variance import FIRST, LAST, Point
from reproductions.learning.gradients.per_sample import ANCHOR, DECOUPLED, NAIVE
from reproductions.learning.gradients.pooled import (
    Points,
    cosine,
    gap,
    mean_of,
    minibatch_cosine_value,
)
from simulator.stats.statistics import Estimate

LAG: Final = 8
"""Of the table, and of the sentence about the weight."""


def findings(study: Points) -> list[str]:
    """What the numbers explain, and what they cannot tell apart."""
    return [_explanation(study), _weight(study), _verdict(study)]


def differences(study: Points) -> Iterator[tuple[str, Estimate]]:
    """Naive minus decoupled, averaged over the lags above 0, with names."""
    for (lr, place), (name, (value, _)) in product(_cells(study), _COMPARED.items()):
        cell = f"learning rate {lr:g}, before the {place}"
        yield f"{cell}: {name}", gap(study, (lr, place), (NAIVE, DECOUPLED), value)


def _weight(study: Points) -> str:
    """What the weight pi_prox / pi_behav does."""
    told = []
    for lr in study.rates:
        own, full = (study.of(lr, FIRST, LAG, loss) for loss in (ANCHOR, DECOUPLED))
        bias = mean_of(own, lambda one: one.squared_bias)
        told.append(
            f"at learning rate {lr:g} the cosine is {shown(cosine(own))} instead of "
            f"{shown(cosine(full))}, and the squared bias {shown(bias)}"
        )
    return (
        "Without the weight pi_prox / pi_behav the decoupled loss follows another gradient, before "
        f"the {FIRST} at lag {LAG}: {'; '.join(told)}."
    )


def _verdict(study: Points) -> str:
    """In which quantities naive and decoupled can be told apart, over all lags."""
    cells = _cells(study)
    worse, better = [], []
    for name, (value, direction) in _COMPARED.items():
        signs = [direction * _sign(gap(study, cell, (NAIVE, DECOUPLED), value)) for cell in cells]
        counts = f"{name} ({{}} of {len(cells)})"
        if 1 in signs:
            worse.append(counts.format(signs.count(1)))
        if -1 in signs:
            better.append(counts.format(signs.count(-1)))
    return (
        "Averaged over the lags above 0, naive is worse than decoupled beyond the intervals in "
        f"{_listed(worse)}, and better in {_listed(better)}."
    )


def _explanation(study: Points) -> str:
    """Why naive loses, as far as gradients at given weights say so."""
    cells = _cells(study)

    def worse_in(name: str, within: Sequence[tuple[float, str]]) -> bool:
        value, direction = _COMPARED[name]
        gaps = [gap(study, cell, (NAIVE, DECOUPLED), value) for cell in within]
        return all(direction * _sign(one) > 0 for one in gaps)

    first = [cell for cell in cells if cell[1] == FIRST]
    bias = (
        f"Before the {FIRST} naive has the larger bias at every learning rate, since it clips what "
        "has moved since the samples and decoupled clips only what moves in the step; a bias is "
        "the same in every step and can add up, where noise averages out: that fits naive's loss."
        if worse_in("squared bias", first)
        else f"Before the {FIRST} a larger bias of naive is not beyond the intervals everywhere."
    )
    value, _ = _COMPARED["squared bias"]
    reversed_at = [
        f"{lr:g}"
        for lr, place in cells
        if place == LAST and _sign(gap(study, (lr, place), (NAIVE, DECOUPLED), value)) < 0
    ]
    late = (
        f" Before the {LAST} it is the other way round at learning rate {', '.join(reversed_at)}: "
        "there decoupled clips the movement of the step, as it does on policy."
        if reversed_at
        else ""
    )
    farther = sum(worse_in("minibatch cosine", [cell]) for cell in cells)
    whole = (
        "One minibatch's gradient is farther from the on-policy one, too, in all cells."
        if farther == len(cells)
        else "But with its noise, one minibatch's gradient of naive is farther from the on-policy "
        f"one than that of decoupled in {farther} of {len(cells)} cells only. So gradients at "
        "given weights do not explain how much naive loses: that needs what they do to weights "
        "over many steps, which is not measured here."
    )
    return f"{bias}{late} {whole}"


_COMPARED: Final[Mapping[str, tuple[Callable[[Sequence[Point]], float], int]]] = MappingProxyType(
    {
        "squared bias": (lambda own: fmean(one.squared_bias for one in own), 1),
        "part removed by the clip": (lambda own: fmean(one.squared_cut for one in own), 1),
        "variance": (lambda own: fmean(one.variance for one in own), 1),
        "minibatch cosine": (minibatch_cosine_value, -1),
    }
)
"""Values of points, and 1 if more is worse."""


def _cells(study: Points) -> list[tuple[float, str]]:
    """Learning rates and places."""
    return list(product(study.rates, (FIRST, LAST)))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"


def shown(value: Estimate) -> str:
    """A mean with its interval, if it has one."""
    half = value.half_width
    # Adding 0 makes a negative zero positive.
    return f"{round(value.mean, 2) + 0.0:.2f}" + (f" ± {half:.2f}" if math.isfinite(half) else "")


def _sign(value: Estimate) -> int:
    """1 or -1 if the interval is on one side of 0, or 0."""
    return (value.low > 0) - (value.high < 0)
