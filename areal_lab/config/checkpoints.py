"""Settings of checkpoints: what is saved beside the model, and how many are kept."""

from __future__ import annotations

from typing import Final, Literal

from areal_lab.config.record import Record, Whole

RESUMABLE: Final = 2
"""Newest checkpoints that a run can continue from: the last one, and one in case it is damaged."""


class CheckpointConfig(Record):
    """Checkpoints, from which `areal-lab train --resume` continues."""

    resumable: bool = True
    """Also save what a run needs to continue: optimizer state, groups that were started and not
    trained on. Takes three times the model's float32 size, in the newest two checkpoints."""
    keep: Whole = 0
    """Newest checkpoints to keep, and the one with the best held-out reward; 0 keeps all."""
    asynchronous: bool = False
    """Train on while a checkpoint is written. It is written from a copy in main memory (of the
    model in float32, and of what `resumable` adds), one at a time: the next one, and the end of the
    run, wait for it."""
    open_groups: Literal["restart", "finished", "tokens"] = "restart"
    """What is saved of groups that were started and not trained on. `restart`: nothing, they start
    over from their prompts, with the same random numbers. `finished`: tokens and rewards of those
    that wait for training. `tokens`: also the tokens so far of those that run."""
