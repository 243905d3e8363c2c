"""Several programs instead of one controller (SPMD): each decides for its share of a run.

    event of group g, engine e --> the coordinator of its rank
    other events               --> all coordinators
    Train of every rank        --> one Train: the barrier at which ranks wait for the slowest

Rank r has the groups r, r + R, r + 2R, ..., the engines of the r-th of R equal blocks, and its
share of every batch; none of these moves to another rank. A step starts when each rank has its part
of the batch. Until then ranks that have theirs start the groups that eq. 3 admits.
Versions, pushes and checkpoints are the same for all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from itertools import chain
from typing import TypeAlias, assert_never

from areal_lab.control import events as ev
from areal_lab.control.coordinator import Coordinator, Counts
from areal_lab.control.limits import Limits

_VERSIONS = ("trained_version", "pushed_version")
"""Fields of `Counts` that all ranks share; the others are summed."""


class RankedCoordinator:
    """One coordinator per rank, and the barrier between them; used like one `Coordinator`."""

    def __init__(self, limits: Limits) -> None:
        """Divide the batch and the groups in flight among the ranks."""
        self.limits = limits
        self._size = limits.ranks
        own = replace(
            limits,
            ranks=1,
            batch_groups=limits.batch_groups // limits.ranks,
            max_in_flight=limits.max_in_flight // limits.ranks,
        )
        self._ranks = [Coordinator(own) for _ in range(limits.ranks)]
        self._rank_engines = 1
        self._ready: dict[int, ev.Train] = {}
        """Ranks that have their part of the next batch."""
        self._training = False
        self._stop_due = False

    def handle(self, event: ev.Event) -> tuple[ev.Action, ...]:
        """Handle an event as `Coordinator.handle` does."""
        match event:
            case ev.GroupFinished(group, head, tail):
                own: ev.Event = ev.GroupFinished(group // self._size, head, tail)
                return self._handled([(group % self._size, own)])
            case ev.GroupFiltered(group) | ev.SamplesEnded(group):
                own = replace(event, group=group // self._size)
                return self._handled([(group % self._size, own)])
            case ev.RunStarted():
                return self._handled(enumerate(self._split(event)))
            case ev.TrainStepDone():
                if not self._training:
                    raise ValueError(f"{event}: no step is running; none was expected")
                self._training = False
            case ev.StopRequested():
                if self._ready:  # the step that some ranks have begun ends first
                    self._stop_due = True
                    return ()
            case ev.EtaRequested(eta):
                if (refused := self.refusal(event)) is not None:
                    raise ValueError(f"{event} cannot be done: {refused}")
                schedule = replace(self.limits.schedule, eta=eta)
                self.limits = replace(self.limits, schedule=schedule)
            case ev.WeightsPushed() | ev.CheckpointCopied() | ev.CheckpointDone():
                pass
            case (
                ev.EngineLost()
                | ev.EngineJoined()
                | ev.EngineRetired()
                | ev.TrainPartDone()
                | ev.BatchReturned()
                | ev.WeightsOffered()
                | ev.PauseRequested()
                | ev.ResumeRequested()
            ):
                raise ValueError(f"{event} cannot happen with {self._size} ranks")
            case _ as never:
                assert_never(never)
        return self._handled((rank, event) for rank in range(self._size))

    @property
    def waiting(self) -> frozenset[int]:
        """Return ranks that have their part of the batch while others do not."""
        return frozenset(self._ready)

    def rank_of(self, engine: ev.EngineId) -> int:
        """Return the rank of an engine."""
        return engine // self._rank_engines

    @property
    def started(self) -> int:
        """Same as `Coordinator.started`, of all ranks."""
        return sum(rank.started for rank in self._ranks)

    @property
    def counts(self) -> Counts:
        """Return the sums of all ranks."""
        each = [rank.counts for rank in self._ranks]
        return replace(
            each[0],
            **{
                one.name: sum(getattr(counts, one.name) for counts in each)
                for one in fields(Counts)
                if one.name not in _VERSIONS
            },
        )

    @property
    def engine_loads(self) -> dict[ev.EngineId, int]:
        """Slots in use on each engine."""
        return {engine: load for rank in self._ranks for engine, load in rank.engine_loads.items()}

    @property
    def paused(self) -> bool:
        """False: `refusal` refuses a pause."""
        return False

    @property
    def ending(self) -> str | None:
        """Same as `Coordinator.ending`."""
        return self._ranks[0].ending

    @property
    def failure(self) -> str:
        """Failure of the first rank that has one; else empty."""
        return next((rank.failure for rank in self._ranks if rank.failure), "")

    def refusal(self, request: ev.Request) -> str | None:
        """Refuse as `Coordinator.refusal` does; a run of several ranks cannot be paused either."""
        if isinstance(request, ev.PauseRequested | ev.ResumeRequested):
            return f"{self._size} ranks without a controller stop only at a step; stop the run"
        return self._ranks[0].refusal(request)

    def waiting_for(self) -> str:
        """Same as `Coordinator.waiting_for`."""
        if self._ready:
            return f"{self._size - len(self._ready)} of {self._size} ranks to have their batches"
        return self._ranks[0].waiting_for()

    def _split(self, event: ev.RunStarted) -> list[ev.Event]:
        engines = event.engines
        if event != ev.RunStarted(engines):
            raise ValueError(f"{event}: a run of {self._size} ranks starts from its first step")
        if not engines or len(engines) % self._size or engines != tuple(range(len(engines))):
            raise ValueError(
                f"{event} needs engines 0 to n - 1, and n must be a multiple of {self._size}, the "
                "ranks"
            )
        share = self._rank_engines = len(engines) // self._size
        return [
            ev.RunStarted(engines[first : first + share]) for first in range(0, len(engines), share)
        ]

    def _handled(self, events: Iterable[tuple[int, ev.Event]]) -> tuple[ev.Action, ...]:
        """Actions of the ranks for their events, in the order of `Coordinator.handle`."""
        drops: list[ev.Action] = []
        starts: list[ev.Action] = []
        shared: dict[type[ev.Action], ev.Action] = {}
        for rank, event in events:
            for action in self._ranks[rank].handle(event):
                match action:
                    case ev.StartGroup(group, engine, version):
                        starts.append(ev.StartGroup(self._everywhere(rank, group), engine, version))
                    case ev.Drop(group, reason):
                        drops.append(ev.Drop(self._everywhere(rank, group), reason))
                    case ev.Train():
                        self._ready[rank] = action
                    case ev.Interrupt() | ev.PushWeights() | ev.Resume() | ev.Save() | ev.Finish():
                        shared[type(action)] = action
                    case _ as never:
                        assert_never(never)
        if len(self._ready) == self._size:
            shared[ev.Train] = self._begin_step()
        order = (ev.Interrupt, ev.Save, ev.Train, ev.PushWeights, ev.Resume)
        before = [shared[kind] for kind in order if kind in shared]
        end = [shared[ev.Finish]] if ev.Finish in shared else []
        return (*drops, *before, *starts, *end)

    def _everywhere(self, rank: int, group: ev.GroupId) -> ev.GroupId:
        """Global id of the group that is number `group` of its rank."""
        return group * self._size + rank

    def _begin_step(self) -> ev.Train:
        """Train on the parts of all ranks, one rank after the other."""
        parts = [
            [self._everywhere(rank, group) for group in self._ready[rank].groups]
            for rank in range(self._size)
        ]
        version = self._ready[0].version
        self._ready.clear()
        self._training = True
        if self._stop_due:
            self._stop_due = False
            for rank in self._ranks:
                rank.handle(ev.StopRequested())  # nothing follows while the step runs
        return ev.Train(version, tuple(chain.from_iterable(parts)))


AnyCoordinator: TypeAlias = Coordinator | RankedCoordinator


def coordinator_of(limits: Limits) -> AnyCoordinator:
    """Create one coordinator, or one per rank."""
    return Coordinator(limits) if limits.ranks == 1 else RankedCoordinator(limits)
