"""Dynamic sampling: replace groups whose rewards are all equal with groups of other prompts.

    rewards of a group --rejects--> GroupFiltered --> the next prompt takes its place
    max_filtered groups since the last batch --> no group starts any more
                                             --> a smaller batch of what finished, or the end

Such a group has no gradient: its advantages are 0. Source: DAPO (arXiv:2503.14476), section 3.2 and
eq. 11; the paper has no bound, verl's `max_num_gen_batches` is one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from areal_lab.control.events import Version

EQUAL_REWARDS: Final = "all rewards equal"
"""`GroupFiltered.reason` of a group that dynamic sampling replaces."""
ALL_CUT_OFF: Final = "all responses cut off"
"""`GroupFiltered.reason` of a group of which every response is masked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicSampling:
    """Rule of dynamic sampling: filtered groups, their maximum, and the behavior beyond it."""

    max_filtered: int
    """Groups that may be filtered, for any reason, between two batches."""
    smallest_batch: int | None = None
    """Groups that a batch needs once `max_filtered` is reached; None ends the run instead of
    training on fewer groups than usual."""
    tolerance: float = 0.0
    """Largest difference of two rewards that still counts as equal."""

    def __post_init__(self) -> None:
        if self.max_filtered < 1:
            raise ValueError(f"max_filtered is {self.max_filtered}, but must be >= 1 (groups)")
        if self.smallest_batch is not None and self.smallest_batch < 1:
            raise ValueError(f"smallest_batch is {self.smallest_batch}, but must be >= 1 (groups)")
        if not self.tolerance >= 0:
            raise ValueError(f"tolerance is {self.tolerance}, but must be >= 0 (a reward)")

    def rejects(self, rewards: Sequence[float], masked: Collection[int] = ()) -> str | None:
        """Return why a group is replaced, as `GroupFiltered.reason`; None if it is trained on.

        Args:
            rewards: one per sample, as the reward function gave them: penalties on length that the
                trainer subtracts do not count.
            masked: samples without a loss. Their rewards count for the baseline, so they count
                here; but a group without any other sample has no gradient.

        Source: DAPO (arXiv:2503.14476), eq. 11, for rewards of any values.
        """
        if max(rewards) - min(rewards) <= self.tolerance:
            return EQUAL_REWARDS
        return ALL_CUT_OFF if len(masked) == len(rewards) else None


def exhausted_text(
    sampling: DynamicSampling,
    *,
    trained: Version,
    batch_groups: int,
    finished: int,
    filtered: Mapping[str, int],
) -> str:
    """Explain why a run ends: the values, and a remedy.

    Args:
        trained: version of the trainer; the batch that cannot be filled is that of the next step.
    """
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(filtered.items()))
    needed = batch_groups if sampling.smallest_batch is None else sampling.smallest_batch
    fixes = ["train on problems that the model sometimes solves", "raise gconfig.n_samples"]
    if ALL_CUT_OFF in filtered:
        fixes.append("raise gconfig.max_new_tokens")
    fixes.append("raise rollout.dynamic_sampling.max_batches")
    if sampling.smallest_batch is None:
        fixes.append("set rollout.dynamic_sampling.on_exhausted=smaller_batch")
    return (
        f"step {trained + 1} needs {needed} group{'s' if needed > 1 else ''} with different "
        f"rewards, but found {finished}: "
        f"{sum(filtered.values())} groups were filtered since the last batch ({reasons}), and the "
        f"limit is {sampling.max_filtered}; {', '.join(fixes[:-1])}, or {fixes[-1]}"
    )
