r"""Explain a ratio: the factor of each switch, on average over all orders of switching.

    value of every set of switches --waterfall--> factors that multiply from the first to the last

How much a switch changes depends on the others that are already on: without long responses there is
nothing to interrupt. The factor of a switch is therefore the geometric mean over all orders, which
is the Shapley value of ln(value); or that of one order, if one is given.

$$ \ln f_i = \frac{1}{n!} \sum_{orders} \ln v(before \cup i) - \ln v(before), \quad
\prod_i f_i = v(all) / v(none) $$
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import TypeAlias

from simulator.stats.statistics import Estimate, estimate

Switches: TypeAlias = frozenset[str]
Values: TypeAlias = Mapping[Switches, Sequence[float]]
"""Positive numbers, one per seed, of every set of switches that are on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """Factor of one switch."""

    name: str
    factor: Estimate
    """Geometric mean over seeds and orders; the interval is over seeds."""
    least: float
    """Factor in the order in which it matters least."""
    most: float
    """Factor in the order in which it matters most."""
    start: float
    """Value before it, in a waterfall."""
    end: float
    """Value after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waterfall:
    """A value and what it is made of."""

    first: Estimate
    """Value with all switches off."""
    factors: tuple[Factor, ...]
    """Factors in the order of the waterfall."""
    last: Estimate
    """Value with all switches on."""


def waterfall(
    values: Values, switches: Sequence[str], *, order: Sequence[str] | None = None
) -> Waterfall:
    """Factors of some switches; those that are not named stay off.

    Args:
        values: of all sets of these switches, and maybe of others.
        switches: those that are on at the end, in the order to show them.
        order: the one order to switch them on in; None averages over all of them.
    """
    names = list(switches)
    if order is not None:
        if sorted(order) != sorted(names):
            raise ValueError(f"order is {list(order)}, but must have each of {names} once")
        names = list(order)
    logs = _logs(values, names)
    orders = [tuple(names)] if order is not None else list(permutations(names))
    place, factors = logs[frozenset()], []
    for name in names:
        per_seed = [_mean_change(logs, name, orders, seed) for seed in range(len(place))]
        changes = [_change(logs, name, one) for one in permutations(names)]
        after = [before + change for before, change in zip(place, per_seed, strict=True)]
        factors.append(
            Factor(
                name=name,
                factor=_geometric(per_seed),
                least=math.exp(min(changes)),
                most=math.exp(max(changes)),
                start=_geometric(place).mean,
                end=_geometric(after).mean,
            )
        )
        place = after
    return Waterfall(
        first=_geometric(logs[frozenset()]),
        factors=tuple(factors),
        last=_geometric(logs[frozenset(names)]),
    )


def all_sets(switches: Sequence[str]) -> list[Switches]:
    """All sets of switches, the smaller ones first."""
    return [
        frozenset(chosen) for n in range(len(switches) + 1) for chosen in combinations(switches, n)
    ]


def _logs(values: Values, names: Sequence[str]) -> dict[Switches, list[float]]:
    found: dict[Switches, list[float]] = {}
    for chosen in all_sets(names):
        if chosen not in values:
            raise ValueError(f"there is no value for the switches {sorted(chosen)}")
        if min(values[chosen]) <= 0:
            raise ValueError(f"the value of {sorted(chosen)} is not positive: {values[chosen]}")
        found[chosen] = [math.log(value) for value in values[chosen]]
    if len({len(one) for one in found.values()}) > 1:
        raise ValueError("every set of switches needs the same seeds")
    return found


def _mean_change(
    logs: Mapping[Switches, list[float]], name: str, orders: Sequence[tuple[str, ...]], seed: int
) -> float:
    changes = (_difference(logs, *_around(order, name), seed) for order in orders)
    return math.fsum(changes) / len(orders)


def _change(logs: Mapping[Switches, list[float]], name: str, order: tuple[str, ...]) -> float:
    before, after = _around(order, name)
    seeds = len(logs[before])
    return math.fsum(_difference(logs, before, after, seed) for seed in range(seeds)) / seeds


def _around(order: tuple[str, ...], name: str) -> tuple[Switches, Switches]:
    place = order.index(name)
    return frozenset(order[:place]), frozenset(order[: place + 1])


def _difference(
    logs: Mapping[Switches, list[float]], before: Switches, after: Switches, seed: int
) -> float:
    return logs[after][seed] - logs[before][seed]


def _geometric(logs: Sequence[float]) -> Estimate:
    found = estimate(logs)
    high = math.exp(found.high) if math.isfinite(found.high) else math.inf
    return Estimate(math.exp(found.mean), math.exp(found.low), high)
