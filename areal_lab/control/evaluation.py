"""Selection of versions to evaluate on held-out problems during training, and of the best one.

    engines change from version 18 to 20, every 10 steps --is_due--> measure version 20
    scores of versions, checkpoints on disk --best_checkpoint--> the one to keep
                                            --to_measure_again-> the one whose score is a mixture

A measurement takes longer than a step, so newer weights reach the engines before it ends. Its later
tokens then belong to later versions, and its score is not exactly the score of its version.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from areal_lab.control.events import Version


@dataclass(frozen=True, slots=True)
class Score:
    """The held-out reward of one version."""

    reward: float
    exact: bool = True
    """True if all tokens were sampled with the weights of this version."""


def is_due(version: Version, held: Version, *, every: int, last: Version) -> bool:
    """Return whether engines that change from `held` to `version` start a measurement.

    Engines skip versions if a push takes longer than a step; then the next one that they load is
    measured. The last version is measured after training, when nothing else runs.

    Args:
        every: steps between two measurements; 0 is never.
    """
    return every > 0 and version < last and version // every > held // every


def missed(measured: Collection[Version], *, every: int, until: Version) -> tuple[Version, ...]:
    """Multiples of `every` below `until` without a measurement before the next multiple."""
    if every <= 0:
        return ()
    covered = {version // every for version in measured}
    return tuple(step for step in range(every, until, every) if step // every not in covered)


def best_checkpoint(
    scores: Mapping[Version, Score], saved: Collection[Version], *, exact: bool = False
) -> Version | None:
    """The saved version with the highest score, the earliest of equal ones; None without any."""
    known = {
        version: scores[version].reward
        for version in saved
        if version in scores and (scores[version].exact or not exact)
    }
    return max(known, key=lambda version: (known[version], -version), default=None)


def to_measure_again(scores: Mapping[Version, Score], saved: Collection[Version]) -> Version | None:
    """The best checkpoint, if its score is a mixture; None if its score is exact.

    Repeated until this is None, the best checkpoint is chosen by a score of its weights alone.
    """
    best = best_checkpoint(scores, saved)
    return None if best is None or scores[best].exact else best
