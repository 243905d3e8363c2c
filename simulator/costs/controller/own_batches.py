"""Training step of ranks that keep the sequences they generated (SPMD).

Sequences are not exchanged, so ranks get unequal numbers of tokens, and all wait for the rank with
the most: the step takes as long as if every rank had its sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from simulator.costs.training_timing import SLOWEST_RANK, Sizes, Training, TrainTiming


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnBatches:
    """Steps of `ranks` programs, each with its own sequences."""

    training: Training
    """Divides the sequences of a step evenly among its ranks."""
    ranks: int

    def step(self, lengths: Sizes, *, minibatches: int) -> TrainTiming:
        """One step.

        Args:
            lengths: tokens of each sequence, rank by rank, as many sequences of each.
            minibatches: optimizer steps; each rank cuts its own sequences into them.
        """
        sizes = np.asarray(lengths, np.int64)
        own = sizes.reshape(self.ranks, -1)
        slowest = np.tile(own[int(own.sum(axis=1).argmax())], self.ranks)
        even = self.training.step(sizes, minibatches=minibatches)
        slow_s = self.training.step(slowest, minibatches=minibatches).seconds
        # Even shares of the batch may need a micro-batch more.
        waits_s = max(0.0, slow_s - even.seconds)
        if not waits_s:
            return even
        parts = {**even.parts, SLOWEST_RANK: even.parts.get(SLOWEST_RANK, 0.0) + waits_s}
        return replace(even, seconds=sum(parts.values()), parts=parts)
