"""Settings of dynamic sampling: groups whose rewards are all equal are replaced."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge

from areal_lab.config.record import About, NonNegative, Record


class DynamicSamplingConfig(Record):
    """Dynamic sampling (DAPO, arXiv:2503.14476, eq. 11): batches of groups with a gradient only."""

    enabled: bool = False
    """Replace groups whose rewards are all equal by groups of further prompts; they are counted as
    filtered. They have no gradient, unless advantages compare them with the batch (REINFORCE++)."""
    tolerance: NonNegative = 0.0
    """Largest difference of two rewards that still counts as equal. Rewards are those of
    `reward.fn`, before the penalty on overlong responses."""
    max_batches: Annotated[int, Ge(1), About(unit="batches")] = 10
    """Groups that may be filtered for one training batch, in batches of `dataset.batch_size`. After
    that no group is started, and what still runs may fill the batch."""
    on_exhausted: Literal["error", "smaller_batch"] = "error"
    """What follows if it does not. `error`: save and end the run, with the counts and what to
    change. `smaller_batch`: train on the groups that there are, at least one per minibatch, or end
    the run if there are fewer."""
