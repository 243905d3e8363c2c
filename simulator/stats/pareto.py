"""Pareto front of points with time, money and number of GPUs, which are all minimized.

Money is dollars, or GPU-hours of a GPU type if no price is known, which only compare with GPU-hours
of the same type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

DOLLARS = "dollars"


class Point(NamedTuple):
    """Time, money and GPUs of a candidate."""

    hours: float
    money: float
    gpus: int
    unit: str = DOLLARS
    """Unit of money: `dollars`, or the type of GPU whose hours they are."""


Named = TypeVar("Named")


def dominates(one: Point, other: Point, *, slack: float = 0.0) -> bool:
    """Whether one is at least as good as the other in everything, and better in something.

    Args:
        slack: fraction by which the other must be worse in both time and money; with slack, it is
            enough to be equal after that.
    """
    if one.unit != other.unit or one.gpus > other.gpus:
        return False
    longer, dearer = one.hours * (1 + slack), one.money * (1 + slack)
    if longer > other.hours or dearer > other.money:
        return False
    return slack > 0 or (one.hours, one.money, one.gpus) != (other.hours, other.money, other.gpus)


def front(points: Sequence[tuple[Named, Point]], *, slack: float = 0.0) -> list[Named]:
    """Points that no other one dominates, in the given order; with slack also points near them.

    Equal points all stay.
    """
    return [
        name
        for name, point in points
        if not any(dominates(other, point, slack=slack) for _, other in points)
    ]


def most_promising_first(points: Sequence[tuple[Named, Point]]) -> list[Named]:
    """All points, ordered by how many others dominate each: the front comes first."""
    ranks = [sum(dominates(other, point) for _, other in points) for _, point in points]
    order = sorted(range(len(points)), key=lambda place: ranks[place])
    return [points[place][0] for place in order]
