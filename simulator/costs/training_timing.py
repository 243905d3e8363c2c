"""Duration of a training step by part, of a pipeline, and of the work outside the step.

Duration of a pipeline with micro-batches of unequal length: 1F1B, and forward only.

    stage 0   F0 F1 F2 .. B0 F3 B1 ..       each stage has the same number of layers, so a
    stage 1      F0 F1 .. B0 F2 B1 ..       micro-batch takes equally long on every stage;
    ...                                     F_i waits for the stage before, B_i for the one after

Axes: R independent pipelines, M micro-batches in their order.
Source: 1F1B, PipeDream-flush (arXiv:2006.09503), as in Megatron-LM (arXiv:2104.04473).

Work outside the step:

    rewards --> data, advantages, logs --> training step --> validation, checkpoint every n steps

Only colocated GPUs get a time that was not given: there it was published, and nothing hides it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from simulator import fast
from simulator.catalogue.transformer import ModelShape
from simulator.config.schema import OutsideConfig, TrainerConfig
from simulator.costs.host_copies import relative_fit, rows_of
from simulator.costs.training_speed import forward_flops

FORWARD_BACKWARD = "forward/backward"
PADDING = "padding"
BUBBLE = "pipeline bubble"
SLOWEST_RANK = "waiting for the slowest rank"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer"
PROXIMAL = "proximal log-probs"
REFERENCE = "reference log-probs"
CRITIC = "critic"
MEASURED = "train"
FIXED = "fixed time"

Sizes: TypeAlias = Sequence[int] | NDArray[np.int64]
"""Tokens of prompt and response of each sequence, in batch order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainTiming:
    """One training step."""

    seconds: float
    parts: Mapping[str, float]
    """Seconds by part; their sum is `seconds`."""
    micro_batches: int
    """Micro-batches of all ranks and minibatches."""
    tokens: int
    flops: float
    """FLOPs of the model: forward and backward passes, and the forward passes of log-probs, without
    recomputation and padding."""

    def __post_init__(self) -> None:
        if self.seconds != sum(self.parts.values()):
            raise ValueError(f"parts {dict(self.parts)} do not sum to {self.seconds} seconds")


class Training(Protocol):
    """Anything that gives the duration of a training step."""

    def step(self, lengths: Sizes, *, minibatches: int) -> TrainTiming:
        """One training step on sequences of these lengths (prompt and response), in batch order."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTraining:
    """A step of measured duration: constant, or growing with the tokens of the batch."""

    seconds: float
    token_s: float = 0.0
    """Seconds per token of prompt and response."""
    model: ModelShape

    def __post_init__(self) -> None:
        if not math.isfinite(self.seconds) or self.seconds <= 0:
            raise ValueError(f"trainer.step_s is {self.seconds}, but must be > 0 and finite")
        if not math.isfinite(self.token_s) or self.token_s < 0:
            raise ValueError(f"trainer.token_s is {self.token_s}, but must be >= 0 and finite")

    def step(self, lengths: Sizes, *, minibatches: int) -> TrainTiming:
        """The measured time, with the FLOPs of these sequences."""
        sizes = np.asarray(lengths, np.float64)
        pairs = float((sizes * (sizes + 1) / 2).sum())
        seconds = self.seconds + self.token_s * float(sizes.sum())
        return TrainTiming(
            seconds=seconds,
            parts={MEASURED: seconds},
            micro_batches=minibatches,
            tokens=int(sizes.sum()),
            flops=3 * float(forward_flops(float(sizes.sum()), pairs, self.model)),
        )


Values = NDArray[np.float64]
_NEVER = -np.inf
"""Arrival time of a message that does not exist."""


def one_forward_one_backward_s(
    forward_s: Values, backward_s: Values, present: NDArray[np.bool_], *, stages: int, hop_s: Values
) -> Values:
    """Seconds until the last backward pass is done, [R].

    Stage s runs `stages - s` micro-batches forward before the first one comes back, then
    alternates. M equal micro-batches take (M + stages - 1) (forward + backward): a bubble of
    (stages - 1) / M. Unequal ones also make neighbors wait for each other.

    The code gives each pass one slot: 2 i + s to F_i of stage s, and 2 i + 2 stages - 1 - s to B_i.
    A pass depends on a neighbor's previous slot and on earlier slots of its stage, so all stages
    and pipelines are computed together, slot by slot.

    Args:
        forward_s: seconds of a micro-batch on one stage, [R, M].
        backward_s: the same, including recomputation.
        present: which micro-batches exist; those of a pipeline come first, [R, M].
        stages: number of stages; 1 has no bubble.
        hop_s: seconds to send a micro-batch to the next stage, or its gradient back, [R, M].
    """
    there = present.T
    forward, backward = (np.where(there, one.T, 0.0) for one in (forward_s, backward_s))
    if stages == 1:
        return np.asarray((forward + backward).sum(axis=0))
    if fast.in_use():
        from simulator.costs import packing_kernel

        forward, backward = np.ascontiguousarray(forward), np.ascontiguousarray(backward)
        hops, there = np.ascontiguousarray(hop_s.T), np.ascontiguousarray(there)
        ends = packing_kernel.one_forward_one_backward_s(forward, backward, hops, there, stages)
        return np.asarray(ends)
    count, pipelines = there.shape
    slot, stage = np.ogrid[: 2 * count + 2 * stages - 2, :stages]
    is_forward = (slot - stage) % 2 == 0
    batch = np.where(is_forward, slot - stage, slot + stage + 1 - 2 * stages) // 2
    # Passes of micro-batches that do not exist take no time and send no message.
    batch = np.where((batch >= 0) & (batch < count), batch, count)
    nothing = np.zeros((1, pipelines))
    hop = np.concatenate([np.where(there, hop_s.T, _NEVER), nothing + _NEVER])[batch]
    work = np.concatenate([forward, nothing, backward, nothing])
    work = work[np.where(is_forward, batch, batch + count + 1)]
    free = np.zeros((stages, pipelines))
    # When the output of a stage reaches its neighbors; row s + 1 is for stage s. The next slot
    # waits for it: at the following stage after a forward pass, else at the preceding one.
    reached = np.full((stages + 2, pipelines), _NEVER)
    neighbors = [
        ((free[one::2], reached[one:stages:2]), (free[1 - one :: 2], reached[3 - one :: 2]))
        for one in (0, 1)
    ]
    for number in range(len(work)):
        for waits, message in neighbors[number % 2]:
            np.maximum(waits, message, out=waits)
        free += work[number]
        np.add(free, hop[number], out=reached[1:-1])
    return np.asarray(free.max(axis=0))


def forward_only_s(
    forward_s: Values, present: NDArray[np.bool_], *, stages: int, hop_s: Values
) -> Values:
    """Seconds until the last stage has finished the last micro-batch, [R].

    All stages take the same time for one micro-batch, so the others queue behind the longest: the
    sum of all, plus (stages - 1) times the longest with its hops.
    """
    work = np.where(present, forward_s, 0.0)
    longest = np.where(present, forward_s + hop_s, 0.0).max(axis=1, initial=0.0)
    return np.asarray(work.sum(axis=1) + (stages - 1) * longest)


BATCH: Final = "data, advantages, logs"
VALIDATION: Final = "validation"
CHECKPOINT: Final = "checkpoint"
FETCH: Final = "fetching responses"
OUTSIDE: Final = frozenset({BATCH, FETCH, VALIDATION, CHECKPOINT})


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideCost:
    """Seconds of a step outside generation, training and weights."""

    batch_s: float = 0.0
    sample_s: float = 0.0
    """Seconds per response of the batch."""
    config: OutsideConfig
    error: float | None = 0.0
    """Error of the batch's seconds; 0 if given, None if unknown."""
    provenance: str = ""

    def before_training(self, samples: int, /) -> Mapping[str, float]:
        """Seconds between the last reward and the training step."""
        return {BATCH: self.batch_s + self.sample_s * samples}

    def after_training(self, step: int, /) -> Mapping[str, float]:
        """Seconds after training step number `step`, the first of which is 1."""
        return {
            name: seconds
            for name, seconds, every in (
                (VALIDATION, self.config.validation_s, self.config.validation_steps),
                (CHECKPOINT, self.config.checkpoint_s, self.config.checkpoint_steps),
            )
            if every and step % every == 0
        }


HANDED_S: Final = 2.7e-3
"""Seconds per response that verl's disaggregated trainers wait while one process reads the batch.

A trainer waits 20 to 25 s for 8,192 responses even if it is the slower side, and 45 s, 28 of them
for generation and weights, for 6,144 (verl, Qwen2.5-Math-7B on H20: three runs in 4 to 16 parts of
a batch, and one with one-step overlap): 2.4, 2.5, 3.1 and 2.8 ms. Responses are padded to the cap,
and pass one by one through a queue."""
HANDED_ERROR: Final = 0.12
"""Mean of |ln| of each of the four by the mean of the others; all of one system."""


def outside_from(
    config: OutsideConfig, *, colocated: bool, trainer: TrainerConfig | None = None
) -> OutsideCost | None:
    """The cost of a config; None if it takes no time.

    Args:
        trainer: only verl's (`fsdp2`) was measured to wait for the hand-over of a batch, and a
            measured step includes it.
    """
    batch_s, sample_s, error, source = 0.0, 0.0, 0.0, "outside.*, given"
    if config.batch_s is not None:
        batch_s = config.batch_s
    elif colocated:
        batch_s, sample_s = batch_seconds()
        error = math.nan
        source = (
            f"{1e3 * batch_s:.0f} ms and {1e3 * sample_s:.2f} ms per response, as one system "
            "takes (vime issue 442, 2026-09); outside.batch_s replaces it"
        )
    elif trainer is not None and trainer.kind == "fsdp2" and trainer.step_s is None:
        sample_s, error = HANDED_S, HANDED_ERROR
        source = (
            f"{1e3 * HANDED_S:.2g} ms per response, which one process hands over, as verl's "
            "trainers wait (2026, four runs); outside.batch_s replaces it"
        )
    cost = OutsideCost(
        batch_s=batch_s,
        sample_s=sample_s,
        config=config,
        error=None if math.isnan(error) else error,
        provenance=source,
    )
    takes = batch_s + sample_s
    takes += config.validation_s * config.validation_steps
    takes += config.checkpoint_s * config.checkpoint_steps
    return cost if takes > 0 else None


@cache
def batch_seconds() -> tuple[float, float]:
    """Seconds per step and per response, from two published batches."""
    rows = rows_of("batch")
    (step_s, sample_s), _ = relative_fit(
        [[1.0] * len(rows), [row.bytes for row in rows]], [row.seconds for row in rows]
    )
    return float(step_s), float(sample_s)
