"""Constants of one run, checked so that no combination of them can deadlock.

Only eta may change while a run continues (`EtaRequested`), within the same checks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from areal_lab.control.order import BatchOrder, oldest_finished_first
from areal_lab.control.routing import Routing, least_loaded
from areal_lab.control.sampling import DynamicSampling
from areal_lab.control.schedule import OnNewWeights, Schedule, asynchronous, lag_bound

SlotsName = Literal["groups", "samples"]
SLOTS: Final[tuple[SlotsName, ...]] = get_args(SlotsName)
"""Owners of the engines' slots."""


def group_slots_of(name: SlotsName, samples: int) -> int:
    """Return `Limits.group_slots` for groups of `samples` samples."""
    return samples if name == "samples" else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Constants of one run."""

    batch_groups: int
    """B: groups per training batch."""
    max_in_flight: int
    """Groups the engines may generate at once; with several slots for each group, as many slots as
    these need."""
    group_slots: int = 1
    """Slots of a running group. 1 is free when the group ends, so that a short sample keeps its
    place until the longest of its group has ended and all are scored. With the number of samples,
    each of them frees a slot when it ends (`SamplesEnded`); a group starts when all its slots are
    free."""
    batch_parts: int = 1
    """Number of equal parts of a batch; each is trained on as soon as enough groups finished, and
    new weights follow the last part. 1 waits for the whole batch."""
    hybrid_engines: int = 0
    """Number of engines (the first ones) whose devices also train: they are paused, keeping their
    responses, from `Train` until the weights of that step are loaded, and no step starts before."""
    ranks: int = 1
    """Number of programs that decide independently (SPMD, `control.ranks`): each has an equal share
    of the engines and of each batch, and a step starts when all have their part. 1 is one
    controller, which sends any group to any engine."""
    weights_offered: bool = False
    """Whether the program that trains decides when there are new weights (`WeightsOffered`); it may
    take further batches before that. Otherwise each training step ends with new weights."""
    train_steps: int | None = None
    """Version at which the run is complete; None runs until stopped."""
    save_every_steps: int = 0
    """Versions between checkpoints; 0 saves at the end only."""
    schedule: Schedule = field(default_factory=lambda: asynchronous(4))
    order: BatchOrder = field(default_factory=oldest_finished_first)
    routing: Routing = field(default_factory=least_loaded)
    sampling: DynamicSampling | None = None
    """Dynamic sampling, which replaces groups of equal rewards; None trains on them, and does not
    bound the number of filtered groups."""

    def __post_init__(self) -> None:
        counts = ("batch_groups", "max_in_flight", "group_slots", "batch_parts", "ranks")
        for name in (*counts, "train_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, but must be >= 1")
        if self.save_every_steps < 0:
            raise ValueError(
                f"save_every_steps is {self.save_every_steps}, but must be >= 0 (0: at the end)"
            )
        self._check_parts()
        self._check_hybrid()
        self._check_ranks()
        if self.weights_offered and (self.batch_parts > 1 or self.hybrid_engines or self.ranks > 1):
            raise ValueError(
                "weights_offered is true, so a program takes whole batches and brings weights when "
                "it likes; batch_parts and ranks must be 1, and hybrid_engines 0"
            )
        smallest = 0 if self.sampling is None else self.sampling.smallest_batch or 0
        if smallest > self.batch_groups:
            raise ValueError(
                f"smallest_batch is {smallest}, but must be <= {self.batch_groups}, the batch"
            )
        if self.schedule.carry_over and self.schedule.on_new_weights is not OnNewWeights.INTERRUPT:
            raise ValueError(
                f"schedule {self.schedule.name!r} carries responses over an update and also waits "
                "for them to end before it; use OnNewWeights.INTERRUPT with carry_over"
            )
        if self.schedule.bound is not None and (self.weights_offered or self.ranks > 1):
            raise ValueError(
                f"schedule {self.schedule.name!r} sets eta after each training step of one "
                f"controller that measures it, but ranks is {self.ranks} and weights_offered "
                f"{self.weights_offered}; use schedule asynchronous"
            )
        order, ahead = self.order, lag_bound(self.schedule)
        if not order.drops_late and order.max_lag < ahead:
            raise ValueError(
                f"max_lag is {order.max_lag:g} (whole versions), but eta "
                f"{self.schedule.largest_eta:g} starts groups up to {ahead:g} versions ahead, "
                f"which waiting cannot undo; raise max_lag to {ahead:g}, lower eta, or set "
                "on_late to drop or recycle"
            )

    def _check_parts(self) -> None:
        parts, groups = self.batch_parts, self.batch_groups
        if groups % parts:
            raise ValueError(
                f"batch_parts is {parts}, but must divide batch_groups ({groups}), so that all "
                "parts of a batch have the same number of groups"
            )
        if parts > 1 and self.schedule.carry_over:
            raise ValueError(
                f"batch_parts is {parts}, but schedule {self.schedule.name!r} pauses generation "
                "while it trains, so that no group would finish meanwhile; set it to 1"
            )
        if parts > 1 and self.sampling is not None and self.sampling.smallest_batch is not None:
            raise ValueError(
                f"batch_parts is {parts}, but smallest_batch needs all groups of a batch before "
                "any is trained on; set batch_parts to 1, or smallest_batch to None"
            )

    def _check_hybrid(self) -> None:
        engines, schedule = self.hybrid_engines, self.schedule
        if engines < 0:
            raise ValueError(f"hybrid_engines is {engines}, but must be >= 0")
        if engines and schedule.on_new_weights is not OnNewWeights.INTERRUPT:
            raise ValueError(
                f"hybrid_engines is {engines}, but schedule {schedule.name!r} waits for responses "
                "to end before an update, and those of hybrid engines are paused until it is "
                "over; use OnNewWeights.INTERRUPT"
            )
        if engines and self.batch_parts > 1:
            raise ValueError(
                f"hybrid_engines is {engines}, but batch_parts is {self.batch_parts}: hybrid "
                "engines would be paused from the first part to the last, whose responses they "
                "generate; set one of them to its default"
            )

    def _check_ranks(self) -> None:
        ranks, schedule, sampling = self.ranks, self.schedule, self.sampling
        if ranks == 1:
            return
        if self.batch_groups % ranks or self.max_in_flight < ranks:
            raise ValueError(
                f"ranks is {ranks}, but must divide batch_groups ({self.batch_groups}) and be at "
                f"most max_in_flight ({self.max_in_flight}): each program has an equal share"
            )
        if schedule.on_new_weights is not OnNewWeights.INTERRUPT or schedule.carry_over:
            raise ValueError(
                f"ranks is {ranks}, but under schedule {schedule.name!r} programs would reach "
                "their pauses and updates at different times; use synchronous, or asynchronous "
                "with interruption"
            )
        if self.hybrid_engines or self.batch_parts > 1:
            raise ValueError(
                f"ranks is {ranks}, but hybrid_engines ({self.hybrid_engines}) and batch_parts "
                f"({self.batch_parts}) need one controller; set them to 0 and 1"
            )
        if sampling is not None and sampling.smallest_batch is not None:
            raise ValueError(
                f"ranks is {ranks}, but smallest_batch ({sampling.smallest_batch}) is of a batch "
                "that one controller forms; set it to None"
            )

    @property
    def part_groups(self) -> int:
        """Groups that the trainer takes together."""
        return self.batch_groups // self.batch_parts
