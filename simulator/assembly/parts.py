"""Costs of a part of a batch, of which the trainer takes several (`schedule.require_batches`).

What is given in seconds per training step is divided among the parts; what grows with tokens or
minibatches divides itself.
"""

from __future__ import annotations

from simulator.config.schema import OutsideConfig, TrainerConfig


def part_trainer(trainer: TrainerConfig, parts: int) -> TrainerConfig:
    """The trainer, with its constant times per part."""
    if parts == 1:
        return trainer
    step_s = None if trainer.step_s is None else trainer.step_s / parts
    return trainer.with_settings({"step_s": step_s, "fixed_s": trainer.fixed_s / parts})


def part_outside(outside: OutsideConfig, parts: int) -> OutsideConfig:
    """Time outside generation and training, with that of data, advantages and logs per part."""
    if parts == 1 or outside.batch_s is None:
        return outside
    return outside.with_settings({"batch_s": outside.batch_s / parts})
