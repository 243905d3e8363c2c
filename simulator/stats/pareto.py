"""Which of several points are best in something: time, money and number of GPUs, all to be least.

Money is dollars. Where no price is known it is GPU-hours of the type, which compare with nothing
but GPU-hours of the same type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

DOLLARS = "dollars"


class Point(NamedTuple):
    """What a candidate needs."""

    hours: float
    money: float
    gpus: int
    unit: str = DOLLARS
    """Of the money: `dollars`, or the type whose GPU-hours they are."""


Named = TypeVar("Named")


def dominates(one: Point, other: Point, *, slack: float = 0.0) -> bool:
    """Whether one is nowhere worse than the other and somewhere better.

    Args:
        slack: by how much the other must be worse in both time and money, as a share; with slack,
            being better in one of them is not asked for.
    """
    if one.unit != other.unit or one.gpus > other.gpus:
        return False
    longer, dearer = one.hours * (1 + slack), one.money * (1 + slack)
    if longer > other.hours or dearer > other.money:
        return False
    return slack > 0 or (one.hours, one.money, one.gpus) != (other.hours, other.money, other.gpus)


def front(points: Sequence[tuple[Named, Point]], *, slack: float = 0.0) -> list[Named]:
    """What no other point dominates, in the order given; with slack also what is near to that.

    Of points that are equal all stay.
    """
    return [
        name
        for name, point in points
        if not any(dominates(other, point, slack=slack) for _, other in points)
    ]


def most_promising_first(points: Sequence[tuple[Named, Point]]) -> list[Named]:
    """All of them, by how many others dominate each: the front comes first."""
    ranks = [sum(dominates(other, point) for _, other in points) for _, point in points]
    order = sorted(range(len(points)), key=lambda place: ranks[place])
    return [points[place][0] for place in order]
