"""Which versions are measured on held-out problems while training continues, and which is best.

    engines change from version 18 to 20, every 10 steps --is_due--> measure version 20
    scores of versions, checkpoints on disk --best_checkpoint--> the one to keep
                                            --to_measure_again-> the one whose score is a mixture

A measurement takes longer than a step, so newer weights reach the engines before it is over: its
later tokens are of later versions, and its score is not exactly that of the version it is for.
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
    """Whether all tokens were sampled with the weights of this version."""


def is_due(version: Version, held: Version, *, every: int, last: Version) -> bool:
    """Whether engines that change from `held` to `version` start a measurement.

    They skip versions if a push takes longer than a step; then the next one that they hold is
    measured. The last version is measured after training, when nothing else runs.

    Args:
        every: steps between two measurements; 0 is never.
        last: the last version of the run.
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
    """The saved version with the highest score, the earliest of equal ones; None without any.

    Args:
        scores: by version; versions that were not saved do not count.
        exact: compare exact scores only.
    """
    known = {
        version: scores[version].reward
        for version in saved
        if version in scores and (scores[version].exact or not exact)
    }
    return max(known, key=lambda version: (known[version], -version), default=None)


def to_measure_again(scores: Mapping[Version, Score], saved: Collection[Version]) -> Version | None:
    """The best checkpoint, if its score is a mixture; None if its score is exact.

    Measured again until this is None, the best checkpoint is chosen by a score of its own weights.
    """
    best = best_checkpoint(scores, saved)
    return None if best is None or scores[best].exact else best
