"""Training on a batch in parts, one event after another: when each part is taken, and its groups.

Engines have a place for every sample, weights arrive at once, and nothing is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Taken(NamedTuple):
    """A part of a batch that the trainer takes."""

    at_s: float
    groups: tuple[int, ...]


class Streamed(NamedTuple):
    """What happens in a run."""

    parts: list[Taken]
    ends_s: list[float]
    """Of each step."""
    waits_s: list[float]
    """Of the trainer, in each step."""


def streamed(
    lengths_s: Callable[[int], float],
    *,
    batch: int,
    parts: int,
    eta: float,
    steps: int,
    train_s: Callable[[Sequence[int]], float],
    export_s: float,
) -> Streamed:
    """A run from its start.

    Args:
        lengths_s: seconds of a group's longest response.
        batch: groups of a batch.
        parts: of a batch.
        train_s: seconds to train on the groups of a part.
    """
    ends_of: dict[int, float] = {}
    taken: set[int] = set()
    found = Streamed([], [], [])
    now_s = 0.0
    for version in range(steps):
        # Eq. 3, with the weights of this version in the engines.
        while len(ends_of) < (version + 1) * batch + math.floor(eta * batch):
            group = len(ends_of)
            ends_of[group] = now_s + lengths_s(group)
        waited_s = 0.0
        for _ in range(parts):
            left = {group: end_s for group, end_s in ends_of.items() if group not in taken}
            enough_s = sorted(left.values())[batch // parts - 1]
            waited_s += max(0.0, enough_s - now_s)
            now_s = max(now_s, enough_s)
            finished = sorted(group for group, end_s in left.items() if end_s <= now_s)
            groups = tuple(finished[: batch // parts])
            found.parts.append(Taken(now_s, groups))
            taken.update(groups)
            now_s += train_s(groups)
        now_s += export_s
        found.ends_s.append(now_s)
        found.waits_s.append(waited_s)
    return found
