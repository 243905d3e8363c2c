"""The coordinator decides what happens next: events in, actions out; no clock, randomness or I/O.

    engines    idle --StartGroup--> running --Interrupt--> paused --Resume--> running
    trainer    free --Train--> training --TrainStepDone--> free --Save--> copying --> free
               a batch in parts: free --Train(rest)--> training --TrainPartDone--> free
    hybrid engines  --Train--> paused, their devices train --WeightsPushed--> as the others
    checkpoint             Save --> written --CheckpointDone--> complete; one at a time
    weights    trained version >= pushed version; PushWeights always takes the newest
               those of a program (`Limits.weights_offered`) wait for WeightsOffered
    run        runs --PauseRequested--> paused --ResumeRequested, StopRequested--> runs, ends
    late group --Drop(RECYCLED)--> waits for a place under eq. 3, before new ones --StartGroup-->

`handle` records the event, then decides everything that the state permits. Actions are returned in
the order in which they must be performed:

    Drop*  Interrupt  Save | Train  PushWeights  Resume  StartGroup*  Finish

While the run is paused by request there is no Train, StartGroup or Resume, and a run whose last
step is done waits with its Finish. Running work ends: the step, its checkpoint, a push of weights.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, NoReturn, assert_never

from areal_lab.capacity import open_slots
from areal_lab.control import events as ev
from areal_lab.control.drift import Measured, next_eta
from areal_lab.control.frontier import Frontier, OpenGroup
from areal_lab.control.limits import Limits
from areal_lab.control.order import Backlog
from areal_lab.control.sampling import exhausted_text
from areal_lab.control.schedule import OnNewWeights, lag_bound, start_limit, whole_batches

__all__ = ["NO_ENGINE_LEFT", "TOO_FEW_GROUPS", "Coordinator", "Counts", "Limits", "replay"]

NO_ENGINE_LEFT = "no engine left"
"""`Finish.reason` of a run whose engines were all lost for good."""
TOO_FEW_GROUPS = "too few groups to train on"
"""`Finish.reason` of a run whose dynamic sampling found too few groups (`Coordinator.failure`)."""
_STOPPED = "stopped"
"""`Finish.reason` of a run that was asked to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Groups and versions at one moment; `started == in_flight + finished + trained + unfilled`."""

    started: int
    """N_r of eq. 3; filtered and dropped groups do not count."""
    in_flight: int
    finished: int
    """Finished and not yet trained on."""
    trained: int
    """Groups given to the trainer, including the running step and the steps before a recovery."""
    unfilled: int
    """Places of smaller batches that no group took; eq. 3 counts them."""
    filtered: int
    dropped: int
    """A recycled group counts each time."""
    trained_version: ev.Version
    pushed_version: ev.Version


class Quiet(NamedTuple):
    """Ends and starts of groups that need no decision, as long as a running group is left."""

    ends: float
    """Groups that may end; may be infinite."""
    start_limit: float
    """Groups that may have been started, of which all that slots are free for start at once."""


class Coordinator:
    """Owner of a run's state. Shells perform the actions that it returns."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._backlog = limits.order.make_backlog(limits.batch_groups)
        self._router = limits.routing.make_router()
        self._awaited: set[ev.EngineId] = set()
        # Groups: running on an engine | waiting for one, because theirs was lost during a pause.
        # The latter have the version they started with, or None: without tokens, a group has the
        # version that the engines hold when it starts over.
        # Those in flight have the version that they started with, too, and their engine.
        self._in_flight: dict[ev.GroupId, ev.Version] = {}
        self._engine_of: dict[ev.GroupId, ev.EngineId] = {}
        self._orphans: dict[ev.GroupId, ev.Version | None] = {}
        self._finished: dict[ev.GroupId, ev.Version] = {}  # not trained on yet, with their start
        self._attempts: dict[ev.GroupId, int] = {}  # of open groups that started over
        self._dropped_running: set[ev.GroupId] = set()
        self._recycled: deque[ev.GroupId] = deque()  # dropped as late; they start before new ones
        self._next_group: ev.GroupId = 0
        self._started = 0
        self._group_slots = limits.group_slots
        self._slots = limits.max_in_flight * limits.group_slots
        self._taken = 0  # slots, by groups in flight
        self._ended_samples: dict[ev.GroupId, int] = {}  # of running groups with several slots
        self._carry_over = limits.schedule.carry_over
        self._weights_offered = limits.weights_offered
        self._hybrid = limits.hybrid_engines
        self._away: set[ev.EngineId] = set()  # hybrid engines whose devices train
        self._last_version = math.inf if limits.train_steps is None else limits.train_steps
        self._places = 0  # of the groups given to the trainer; eq. 3 counts whole batches
        self._part_groups = limits.part_groups
        self._batch_rest = limits.batch_groups  # groups that this batch, or the next one, lacks
        self._batch_lags: list[ev.Version] = []  # of its groups, for a bound on drift
        self._unfilled = 0
        self._filtered = 0
        self._filtered_since: Counter[str] = Counter()  # the last batch, by reason
        self._dropped = 0
        self._restarted = 0
        # Versions: of the trainer | with weights to push, where they are offered | of its newest
        # checkpoint | of the engines | being pushed.
        self._trained: ev.Version = 0
        self._offered: ev.Version = 0
        self._saved: ev.Version = 0
        self._pushed: ev.Version = 0
        self._pushing: ev.Version | None = None
        self._start_limit = 0.0
        self._running = False
        self._training = False
        self._batch: tuple[ev.GroupId, ...] = ()  # given to the trainer last
        self._saving = False  # a checkpoint is being written
        self._copying = False  # and the trainer waits for it
        self._save_due = False
        self._interrupted = False
        self._held = False  # by PauseRequested; engines without a running group are not interrupted
        self._ending: str | None = None
        self._over: str | None = None
        self._failure = ""
        self._leaves_starts = False

    def handle(self, event: ev.Event) -> tuple[ev.Action, ...]:  # noqa: PLR0912 - one case per event
        """Record `event` and return the actions to perform now, in order."""
        if not self._running:
            self._check_may_begin(event)
        if isinstance(event, ev.GroupFinished):  # most of them
            self._group_finished(event)
            return self._decide()
        match event:
            case ev.GroupFiltered():
                self._group_filtered(event)
            case ev.SamplesEnded():
                self._samples_ended(event)
            case ev.TrainPartDone():
                self._train_part_done(event)
            case ev.TrainStepDone():
                return self._train_step_done(event)
            case ev.BatchReturned():
                self._batch_returned(event)
            case ev.WeightsOffered() | ev.WeightsPushed():
                self._weights_progressed(event)
            case ev.CheckpointCopied() | ev.CheckpointDone():
                self._checkpoint_progressed(event)
            case ev.RunStarted():
                self._run_started(event)
            case ev.EngineLost() | ev.EngineRetired():
                return self._engine_lost(event)
            case ev.EngineJoined():
                self._engine_joined(event)
            case (
                ev.StopRequested() | ev.PauseRequested() | ev.ResumeRequested() | ev.EtaRequested()
            ):
                self._requested(event)
            case _ as never:
                assert_never(never)
        return self._decide()

    @property
    def started(self) -> int:
        """`counts.started` alone, for callers at every event."""
        return self._started

    @property
    def counts(self) -> Counts:
        """Return current counts, in O(1)."""
        in_flight = len(self._in_flight) + len(self._orphans)
        return Counts(
            started=self._started,
            in_flight=in_flight,
            finished=self._started - in_flight - self._places,
            trained=self._places - self._unfilled,
            unfilled=self._unfilled,
            filtered=self._filtered,
            dropped=self._dropped,
            trained_version=self._trained,
            pushed_version=self._pushed,
        )

    def frontier(self) -> Frontier:
        """State of the groups for a checkpoint of the trainer's version; O(open groups)."""
        if self._training or self._between_parts:
            raise ValueError(f"step {self._trained + 1} is running; its groups cannot be saved")
        began = dict(self._in_flight)
        for group, version in self._orphans.items():
            began[group] = self._pushed if version is None else version
        began |= dict.fromkeys(self._recycled, self._pushed)
        began |= self._finished
        return Frontier(
            version=self._trained,
            next_group=self._next_group,
            open=tuple(
                OpenGroup(
                    group=group,
                    version=version,
                    attempts=self._attempts.get(group, 1),
                    finished=group in self._finished,
                )
                for group, version in sorted(began.items())
            ),
            eta=self.limits.schedule.eta,
            filtered=self._filtered,
            dropped=self._dropped,
            restarted=self._restarted,
            unfilled=self._unfilled,
        )

    @property
    def paused(self) -> bool:
        """True if the run is paused by request; a running step or push may still end."""
        return self._held

    @property
    def ending(self) -> str | None:
        """Reason why the run ends before its last step, after running work has ended; None if it
        does not.
        """
        return self._ending

    @property
    def failure(self) -> str:
        """Problem and remedy if the reason is `TOO_FEW_GROUPS`; else empty."""
        return self._failure

    def refusal(self, request: ev.Request) -> str | None:
        """Reason why `handle` would refuse this request now, as a sentence without a subject, or
        None.

        Before `RunStarted` this says what will be refused once the run has started. A request that
        changes nothing, such as a second pause, is not refused.
        """
        if self._over is not None:
            return f"the run is over ({self._over})"
        if isinstance(request, ev.StopRequested):
            return None
        if self._ending is not None:
            return f"the run is ending ({self._ending})"
        if isinstance(request, ev.EtaRequested):
            return self._eta_refusal(request.eta)
        return None

    @property
    def engine_loads(self) -> dict[int, int]:
        """Slots in use on each engine, without hybrid engines while their devices train."""
        return self._router.loads()

    @property
    def trainer_waits(self) -> bool:
        """True if the trainer is idle because too few groups have finished."""
        works = self._training or self._copying or self._save_due
        over = self._ending is not None or self._trained >= self._last_version
        return self._running and not (works or self._held or over)

    @property
    def held_back(self) -> bool:
        """True if eq. 3 alone keeps the engines from starting groups."""
        return (
            self._running
            and self._taken + self._group_slots <= self._slots
            and self._started >= self._start_limit
            and self._started < self._last_version * self.limits.batch_groups
        )

    def waiting_for(self) -> str:
        """Reason why the run waits, in a few words for a progress display."""
        if not self._running:
            return "the run to start" if self._over is None else f"nothing ({self._over})"
        if not len(self._router) and not self._away and self._awaited:
            return "an engine to restart; none is left"
        begun = self._begun()
        if self._held:
            return f"{begun}, and is then paused" if begun else "a request to resume"
        if begun:
            return begun
        if self._newest > self._pushed:
            groups = len(self._in_flight)
            plural = "s" if groups > 1 else ""
            return f"{groups} running group{plural} to end before version {self._newest} is loaded"
        return self._waiting_for_groups()

    def _waiting_for_groups(self) -> str:
        if not self._refills_exhausted():
            return self._backlog.waiting_for(self._trained, *self._next_part)
        groups = len(self._in_flight) + len(self._orphans)
        filtered = self._filtered_since.total()
        return f"{groups} running groups to end: {filtered} were filtered for this batch"

    def _begun(self) -> str:
        """Running work that must end first, for a progress display."""
        if self._training:
            return f"the trainer (step {self._trained + 1})"
        if self._saving and self._waits_for_checkpoint():
            return f"the checkpoint of version {self._saved}"
        return "" if self._pushing is None else f"engines to load version {self._pushing}"

    def _waits_for_checkpoint(self) -> bool:
        """Return whether training, the next checkpoint, a pause or the end waits for the running
        checkpoint.
        """
        over = self._ending is not None or self._trained >= self._last_version
        return self._copying or self._save_due or self._held or over

    # --- many groups at once ---------------------------------------------------------------------

    def leave_starts(self) -> None:
        """Leave the starts of new groups to the caller, who performs `open_starts` of them after
        each event, on the least loaded engine, the lowest of equals, and reports them (`follow`).

        Raises:
            ValueError: these limits have starts and ends that only single events tell.
        """
        if why := self.starts_stay(self.limits):
            raise ValueError(f"starts cannot be left to the caller: {why}")
        self._leaves_starts = True

    @staticmethod
    def starts_stay(limits: Limits) -> str:
        """Return the setting for which starts cannot be left to the caller, or nothing."""
        reasons = {
            "routing": limits.routing.name != "least_loaded",
            "order.on_late": limits.order.drops_late,
            "group_slots": limits.group_slots > 1,
            "ranks": limits.ranks > 1,
            "sampling": limits.sampling is not None,
            "weights_offered": limits.weights_offered,
        }
        return ", ".join(name for name, reason in reasons.items() if reason)

    @property
    def open_starts(self) -> int:
        """New groups that may start now."""
        ends = self._ending is not None and not (self._ending == _STOPPED and self._between_parts)
        if not self._running or ends or not self._engines_run():
            return 0
        return self._open_slots()

    def quiet(self) -> Quiet:
        """What may happen before the next other event without a decision: groups end, and the next
        ones start in their places.
        """
        waits = self._interrupted and self._pushing is None
        if not self._running or self._ending is not None or self._held or waits:
            return Quiet(0, 0)
        ends = math.inf
        if not (self._training or self._copying or self._save_due):
            ends = max(0, self._part_groups - len(self._finished) - 1)
        return Quiet(ends, self._limit_now() if self._engines_run() else 0)

    def follow(
        self,
        engines: Sequence[ev.EngineId],
        ended: Sequence[ev.GroupId],
        loads: Mapping[ev.EngineId, int],
    ) -> None:
        """Record starts and ends of groups that `quiet` and `open_starts` permitted.

        Args:
            engines: engines of the next groups, in the order of the groups.
            ended: groups whose samples all ended and were scored.
            loads: running groups of each engine afterwards.
        """
        groups = range(self._next_group, self._next_group + len(engines))
        self._in_flight.update(dict.fromkeys(groups, self._pushed))
        self._engine_of.update(zip(groups, engines, strict=True))
        self._backlog.started_all(groups, self._pushed)
        began = [self._in_flight.pop(group) for group in ended]
        for group in ended:
            del self._engine_of[group]
        self._finished.update(zip(ended, began, strict=True))
        self._backlog.finished_all(ended, began)
        self._started += len(engines)
        self._next_group += len(engines)
        self._taken += len(engines) - len(ended)
        self._router.recount(loads)

    # --- events ----------------------------------------------------------------------------------

    def _check_may_begin(self, event: ev.Event) -> None:
        if self._over is not None:
            raise ValueError(f"{event} came after Finish({self._over!r}); no event was expected")
        if not isinstance(event, ev.RunStarted):
            raise ValueError(f"{event} came before the run began; RunStarted was expected")

    def _run_started(self, event: ev.RunStarted) -> None:
        if self._running:
            raise ValueError(f"{event} came a second time; a run starts once")
        if not event.engines or len(set(event.engines)) != len(event.engines):
            raise ValueError(f"{event} needs at least one engine, each named once")
        if event.version < 0 or event.next_group < 0:
            raise ValueError(f"{event} needs version >= 0 and next_group >= 0")
        lengths = {len(event.open_groups), len(event.open_versions), len(event.open_attempts)}
        if len(lengths) > 1 or any(group >= event.next_group for group in event.open_groups):
            raise ValueError(
                f"{event} needs a version and a number of attempts for each open group, all of "
                "which must be below next_group"
            )
        self._running = True
        for engine in event.engines:
            self._router.add(engine)
        self._next_group = event.next_group
        self._trained = self._offered = self._saved = event.version
        self._started = self._places = event.version * self.limits.batch_groups
        if event.train_steps:
            self.limits = replace(self.limits, train_steps=event.train_steps)
            self._last_version = event.train_steps
        self._recover_groups(event)
        self._engines_hold(event.version)

    def _recover_groups(self, event: ev.RunStarted) -> None:
        """Let the open groups wait for an engine, as those of a lost engine do."""
        opened = zip(event.open_groups, event.open_versions, event.open_attempts, strict=True)
        for group, version, attempts in opened:
            kept = version != ev.STARTS_OVER
            self._backlog.started(group, version if kept else event.version)
            self._orphans[group] = version if kept else None
            if attempts > 1:
                self._attempts[group] = attempts
        self._started += len(event.open_groups)
        self._filtered, self._dropped = event.filtered, event.dropped
        self._restarted, self._unfilled = event.restarted, event.unfilled

    def _samples_ended(self, event: ev.SamplesEnded) -> None:
        group, samples = event.group, event.samples
        engine = self._engine_of.get(group)
        if engine is None and self._orphans.get(group) is None:
            if group not in self._dropped_running:
                self._check_was_dropped(event, group)  # raises
            return
        ended = self._ended_samples.get(group, 0) + samples
        if self._group_slots == 1 or samples < 1 or ended > self._group_slots:
            raise ValueError(
                f"{event}: {self._slots_of(group)} running samples of {self._group_slots} slots "
                "were expected, of a run with `Limits.group_slots` above 1"
            )
        self._ended_samples[group] = ended
        if engine is not None:
            self._taken -= samples
            if engine not in self._away:
                self._router.release(engine, samples)

    def _slots_of(self, group: ev.GroupId) -> int:
        """Slots that a group takes, or will take when it has an engine again."""
        if not self._ended_samples:
            return self._group_slots
        return self._group_slots - self._ended_samples.get(group, 0)

    def _began(self, group: ev.GroupId) -> ev.Version | None:
        """Version with which a group started that is in flight, or waits with its tokens."""
        began = self._in_flight.get(group)
        return self._orphans.get(group) if began is None else began

    def _group_finished(self, event: ev.GroupFinished) -> None:
        began = self._began(event.group)
        if began is None:
            return self._check_was_dropped(event, event.group)
        newest = self._pushed if self._pushing is None else self._pushing
        if not began <= event.head_version <= event.tail_version <= newest:
            raise ValueError(
                f"{event}: group {event.group} started at version {began} and the engines "
                f"have at most {newest}, so start <= head <= tail <= {newest} was expected"
            )
        self._leave(event.group)
        self._finished[event.group] = began
        return self._backlog.finished(event.group, began)

    def _group_filtered(self, event: ev.GroupFiltered) -> None:
        began = self._began(event.group)
        if began is None:
            return self._check_was_dropped(event, event.group)
        self._leave(event.group)
        self._attempts.pop(event.group, None)
        self._started -= 1
        self._filtered += 1
        self._filtered_since[event.reason] += 1
        return self._backlog.removed(event.group, began)

    def _check_was_dropped(self, event: ev.Event, group: ev.GroupId) -> None:
        # It ended while its abort was being sent; it stays dropped.
        if group not in self._dropped_running:
            raise ValueError(f"{event}: group {group} is not running; a running group was expected")
        self._dropped_running.remove(group)

    def _train_part_done(self, event: ev.TrainPartDone) -> None:
        self._check_training(event)
        if not self._between_parts:
            raise ValueError(f"{event}: this was the last part; TrainStepDone was expected")
        self._training = False

    def _check_training(self, event: ev.TrainPartDone | ev.TrainStepDone) -> None:
        if not self._training:
            raise ValueError(f"{event}: no step is running; none was expected")
        if event.version != self._trained + 1:
            raise ValueError(f"{event}: version {self._trained + 1} was expected")

    def _train_step_done(self, event: ev.TrainStepDone) -> tuple[ev.Action, ...]:
        self._check_training(event)
        if self._between_parts:
            raise ValueError(
                f"{event}: {self._batch_rest} groups of the batch are not trained on yet; "
                "TrainPartDone was expected"
            )
        self._training = False
        self._trained = event.version
        every = self.limits.save_every_steps
        due = every > 0 and self._trained % every == 0
        self._save_due = due or self._trained >= self._last_version
        self._bound_drift(event)
        # Also of a run that ends: its checkpoint continues with the groups that are open now.
        late, order = self._backlog.late(self._trained), self.limits.order
        recycle = order.on_late == "recycle"
        drops = self._drop(late, ev.RECYCLED if recycle else f"lag above {order.max_lag}")
        if recycle:
            self._recycled.extend(late)
        return (*drops, *self._decide())

    def _bound_drift(self, event: ev.TrainStepDone) -> None:
        schedule = self.limits.schedule
        if schedule.bound is None or not self._batch_lags:
            return
        lag = sum(self._batch_lags) / len(self._batch_lags)
        self._batch_lags.clear()
        measured = Measured(event.drift, event.weight_deviation, event.effective_share)
        self._set_eta(next_eta(schedule.bound, schedule.eta, lag, measured))

    def _set_eta(self, eta: float) -> None:
        self.limits = replace(self.limits, schedule=replace(self.limits.schedule, eta=eta))
        self._limit_starts()

    def _batch_returned(self, event: ev.BatchReturned) -> None:
        known = self._in_flight.keys() | self._orphans.keys() | self._finished.keys()
        groups, missing = set(event.groups), self.limits.batch_groups - len(event.groups)
        if not self.limits.weights_offered or missing < 0 or not groups or groups & known:
            raise ValueError(f"{event}: these groups are no batch that the trainer has")
        if not groups.issuperset(event.lost) or max(groups) >= self._next_group:
            raise ValueError(
                f"{event}: groups of the batch were expected, the lost ones among them"
            )
        newest = self._training and event.groups == self._batch
        if self._offered >= self._trained + newest:
            raise ValueError(f"{event}: weights of version {self._offered} were offered, with it")
        if newest:
            self._training = False
        else:
            self._trained -= 1
        self._places -= self.limits.batch_groups
        self._unfilled -= missing
        self._started -= missing
        for group in event.groups:
            if group in event.lost:
                self._orphans[group] = None
                self._attempts[group] = self._attempts.get(group, 1) + 1
                self._restarted += 1
            else:
                self._finished[group] = self._pushed
        self._backlog = self._made_backlog()

    def _made_backlog(self) -> Backlog:
        """The backlog of all open groups, as if each had just started or finished."""
        backlog = self.limits.order.make_backlog(self.limits.batch_groups)
        began = dict(self._in_flight)
        for group, version in self._orphans.items():
            began[group] = self._pushed if version is None else version
        for group, version in sorted((began | self._finished).items()):
            backlog.started(group, version)
        for group, version in sorted(self._finished.items()):
            backlog.finished(group, version)
        return backlog

    @property
    def _newest(self) -> ev.Version:
        """The newest version with weights."""
        return min(self._offered, self._trained) if self._weights_offered else self._trained

    def _weights_progressed(self, event: ev.WeightsOffered | ev.WeightsPushed) -> None:
        if isinstance(event, ev.WeightsPushed):
            return self._weights_pushed(event)
        newest = self._trained + self._training
        if not self.limits.weights_offered or not self._offered < event.version <= newest:
            raise ValueError(
                f"{event}: a version above {self._offered} and up to {newest}, that of the newest "
                "batch, was expected, of a run with `Limits.weights_offered`"
            )
        self._offered = event.version
        return None

    def _weights_pushed(self, event: ev.WeightsPushed) -> None:
        if self._pushing is None and self._ending is not None:
            return  # The last engine was lost during the push.
        if event.version != self._pushing:
            expected = "no push" if self._pushing is None else f"version {self._pushing}"
            raise ValueError(f"{event}: {expected} was expected")
        self._pushing = None
        self._hybrid_engines_return()
        for group, began in self._orphans.items():
            if began is None:
                self._backlog.restarted(group, self._pushed, event.version)
        self._engines_hold(event.version)

    def _hybrid_engines_leave(self) -> None:
        """Remove hybrid engines from routing; their groups stay, paused."""
        self._away = {engine for engine in self._router.loads() if engine < self._hybrid}
        for engine in self._away:
            self._router.remove(engine)

    def _hybrid_engines_return(self) -> None:
        for engine in sorted(self._away):
            self._router.add(engine)
        if self._away:
            for group, engine in self._engine_of.items():
                if engine in self._away:
                    self._router.take(engine, self._slots_of(group))
        self._away.clear()

    def _engines_hold(self, version: ev.Version) -> None:
        self._pushed = version
        self._limit_starts()

    def _limit_starts(self) -> None:
        self._start_limit = start_limit(
            self.limits.schedule,
            version=self._pushed,
            batch_groups=self.limits.batch_groups,
            train_steps=self.limits.train_steps,
        )

    def _checkpoint_progressed(self, event: ev.CheckpointCopied | ev.CheckpointDone) -> None:
        done = isinstance(event, ev.CheckpointDone)
        awaited = self._saving if done else self._copying
        if not awaited or event.version != self._saved:
            expected = f"version {self._saved}" if awaited else "no checkpoint"
            raise ValueError(f"{event}: {expected} was expected")
        self._copying = False
        self._saving = not done

    def _engine_lost(self, event: ev.EngineLost | ev.EngineRetired) -> tuple[ev.Action, ...]:
        if isinstance(event, ev.EngineRetired):
            event = ev.EngineLost(event.engine, tokens_kept=True)
        if event.engine in self._router or event.engine in self._away:
            self._orphan_groups_of(event)
        elif event.returns or event.engine not in self._awaited:
            self._refuse_engine(event)
        if event.returns:
            self._awaited.add(event.engine)
        else:
            self._awaited.discard(event.engine)
        if not len(self._router) and not self._away and not self._awaited:
            # No engine is left to finish a push or to resume.
            self._pushing, self._interrupted, self._held = None, False, False
            if self._ending is None:
                self._ending = NO_ENGINE_LEFT
        return self._decide()

    def _orphan_groups_of(self, event: ev.EngineLost) -> None:
        if event.engine in self._away:
            self._away.remove(event.engine)
        else:
            self._router.remove(event.engine)
        lost = [group for group, engine in self._engine_of.items() if engine == event.engine]
        for group in lost:
            began = self._in_flight.pop(group)
            del self._engine_of[group]
            self._taken -= self._slots_of(group)
            self._orphans[group] = began if event.tokens_kept else None
            if not event.tokens_kept:
                self._ended_samples.pop(group, None)
                self._backlog.restarted(group, began, self._pushed)
                self._attempts[group] = self._attempts.get(group, 1) + 1
                self._restarted += 1

    def _engine_joined(self, event: ev.EngineJoined) -> None:
        if event.engine in self._router or event.engine in self._away:
            self._refuse_engine(event)
        self._awaited.discard(event.engine)
        if event.engine < self._hybrid and (self._training or self._trained > self._pushed):
            self._away.add(event.engine)
        else:
            self._router.add(event.engine)

    def _refuse_engine(self, event: ev.EngineLost | ev.EngineJoined) -> NoReturn:
        engines = sorted({*self._router.loads(), *self._away})
        raise ValueError(f"{event} changes nothing: the engines are {engines}")

    def _requested(self, request: ev.Request) -> None:
        if (reason := self.refusal(request)) is not None:
            raise ValueError(f"{request} cannot be done: {reason}")
        match request:
            case ev.StopRequested():
                self._stop_requested()
            case ev.PauseRequested():
                self._held = True
            case ev.ResumeRequested():
                self._held = False
            case ev.EtaRequested(eta):
                self._set_eta(eta)
            case _ as never:
                assert_never(never)

    def _eta_refusal(self, eta: float) -> str | None:
        schedule, order = self.limits.schedule, self.limits.order
        if schedule.eta_is_fixed:
            return (
                f"schedule {schedule.name} is eta {schedule.eta:g}; start a run with schedule "
                "asynchronous, whose eta may change"
            )
        if schedule.bound is not None:
            return (
                f"schedule {schedule.name} sets eta by the measured drift, at most "
                f"{schedule.bound.max_eta:g}; start a run with schedule asynchronous to set it"
            )
        try:
            ahead = lag_bound(replace(schedule, eta=eta))
        except ValueError as error:
            return str(error)
        if not order.drops_late and order.max_lag < ahead:
            return (
                f"eta {eta:g} starts groups up to {ahead:g} versions ahead, but this run waits for "
                f"groups beyond a lag of {order.max_lag:g} (max_lag), which waiting cannot undo; "
                f"eta can be at most {order.max_lag:g}"
            )
        return None

    def _stop_requested(self) -> None:
        self._held = False
        # A run whose last step is done ends by itself, as complete.
        if self._ending is None and (self._training or self._trained < self._last_version):
            self._ending = _STOPPED

    # --- decisions -------------------------------------------------------------------------------

    def _decide(self) -> tuple[ev.Action, ...]:
        # A run that is stopped ends its step first; one that cannot continue ends in the middle.
        if self._ending is not None and not (self._ending == _STOPPED and self._between_parts):
            return self._wind_up(self._ending)
        # Without the property, and below without a pair: this runs at every event.
        newest = self._newest if self._weights_offered else self._trained
        push = newest > self._pushed and self._pushing is None and self._may_push()
        trainer_free = not (self._training or self._copying)
        may_train = trainer_free and not self._save_due and not self._held
        if self._hybrid and self._trained > self._pushed:
            may_train = False  # the devices of hybrid engines load weights
        size, rest = self._part_groups, self._batch_rest
        train = may_train and self._backlog.ready(self._trained, size, rest - size)
        # Running groups may fill the batch; none starts any more, so that they end soon.
        waits = train or self._in_flight or self._orphans
        if may_train and not waits and self._refills_exhausted():
            if self._too_few_groups():
                self._ending = TOO_FEW_GROUPS
                return self._wind_up(self._ending)
            train = True
        actions: list[ev.Action] = []
        pause = self._held or push or (train and self._carry_over)
        if pause and self._in_flight and not self._interrupted:
            self._interrupted = True
            actions.append(ev.Interrupt(by_hand=self._held))
        if self._save_due and trainer_free and not self._saving:
            actions.append(self._save())
        if train:
            self._training = True
            if self._hybrid:
                self._hybrid_engines_leave()
            groups = self._take_part()
            rest = self._batch_rest if self._between_parts else 0
            self._batch = groups
            actions.append(ev.Train(self._trained, groups, rest))
        if push:
            self._pushing = newest
            actions.append(ev.PushWeights(newest))
        # Most events come while eq. 3 admits nothing, so checking before the call saves time.
        to_do = self._started < self._start_limit or self._interrupted or self._orphans
        if to_do and self._engines_run():
            self._generate(actions)
        if self._trained >= self._last_version and self._nothing_runs and not self._held:
            if self._interrupted:  # by a push that no engine was left to end
                actions.append(ev.Resume())
            actions.append(self._finish("complete"))
        return tuple(actions)

    def _engines_run(self) -> bool:
        return (
            self._pushing is None
            and not (self._carry_over and self._training)
            and not self._held
            and len(self._router) > 0
        )

    @property
    def _next_part(self) -> tuple[int, int]:
        """Groups that the trainer takes next, and the number of groups of the same batch after
        them.
        """
        return self._part_groups, self._batch_rest - self._part_groups

    @property
    def _between_parts(self) -> bool:
        """True if a part of a batch was given to the trainer, and another part was not yet."""
        return self._batch_rest < self.limits.batch_groups

    def _refills_exhausted(self) -> bool:
        """Return whether the filtered groups of this batch have used up its refills: no more groups
        start.
        """
        sampling = self.limits.sampling
        return (
            sampling is not None
            and self._filtered_since.total() >= sampling.max_filtered
            and len(self._finished) < self._batch_rest
        )

    def _too_few_groups(self) -> bool:
        """Return whether the finished groups cannot form a batch and the run ends; sets
        `failure`.
        """
        sampling, finished = self.limits.sampling, len(self._finished)
        assert sampling is not None, "refills are exhausted"
        if sampling.smallest_batch is not None and finished >= sampling.smallest_batch:
            return False
        self._failure = exhausted_text(
            sampling,
            trained=self._trained,
            batch_groups=self.limits.batch_groups,
            finished=self.limits.batch_groups - self._batch_rest + finished,
            filtered=self._filtered_since,
        )
        return True

    def _take_part(self) -> tuple[ev.GroupId, ...]:
        finished, size = self._finished, self._part_groups
        groups = self._backlog.take(min(size, len(finished)))
        self._places += size
        self._batch_rest -= size
        if self._batch_rest == 0:
            self._batch_rest = self.limits.batch_groups
            self._filtered_since.clear()
        unfilled = size - len(groups)
        self._unfilled += unfilled
        self._started += unfilled  # eq. 3 counts whole batches
        if self.limits.schedule.bound is not None:
            self._batch_lags += [self._trained - finished[group] for group in groups]
        for group in groups:
            del finished[group]
        if self._attempts:
            for group in groups:
                self._attempts.pop(group, None)
        return groups

    def _may_push(self) -> bool:
        match self.limits.schedule.on_new_weights:
            case OnNewWeights.INTERRUPT:
                return True
            case OnNewWeights.DRAIN:
                return not self._in_flight and not self._orphans
            case OnNewWeights.FINISH_BATCH:
                return not self._in_flight and not self._orphans and not self._open_slots()

    def _generate(self, actions: list[ev.Action]) -> None:
        """Resume the engines and start groups: those of lost engines, recycled ones, new ones."""
        if self._interrupted:
            self._interrupted = False
            actions.append(ev.Resume())
        if self._orphans:
            # After a recovery there may be more of them than the engines run at once.
            for group, began in sorted(self._orphans.items()):
                if self._taken + self._slots_of(group) > self._slots:
                    break  # the next one waits, too, however few it needs
                actions.append(self._start(group, self._pushed if began is None else began))
                del self._orphans[group]
        if self._leaves_starts:
            return
        slots = self._open_slots()
        self._started += slots
        if self._recycled and slots:
            slots = self._start_again(slots, actions)
        for group in range(self._next_group, self._next_group + slots):
            self._backlog.started(group, self._pushed)
            actions.append(self._start(group, self._pushed))
        self._next_group += slots

    def _start_again(self, slots: int, actions: list[ev.Action]) -> int:
        """Start recycled groups, oldest first; returns the slots that are left."""
        while slots and self._recycled:
            group, slots = self._recycled.popleft(), slots - 1
            self._dropped_running.discard(group)  # what it reports from now on is of this attempt
            self._attempts[group] = self._attempts.get(group, 1) + 1
            self._backlog.started(group, self._pushed)
            actions.append(self._start(group, self._pushed))
        return slots

    def _open_slots(self) -> int:
        return open_slots(
            started=self._started,
            in_flight=-(-self._taken // self._group_slots),
            limit=self._limit_now(),
            max_in_flight=self._slots // self._group_slots,
        )

    def _limit_now(self) -> float:
        """Groups that may have been started now: eq. 3, or less."""
        limit = self._start_limit
        if self._refills_exhausted():
            return 0
        if self._ending is not None:  # only what the step that runs still lacks
            limit = min(limit, self._places + (self._batch_rest if self._between_parts else 0))
        if self._newest > self._pushed:
            # Newer weights wait until no group is running.
            if self.limits.schedule.on_new_weights is not OnNewWeights.FINISH_BATCH:
                return 0
            if self._pushed + self.limits.order.max_lag < self._newest:
                return 0  # A new group would exceed the lag bound from the start.
            limit = min(limit, whole_batches(self._started, self.limits.batch_groups))
        return limit

    def _start(self, group: ev.GroupId, version: ev.Version) -> ev.StartGroup:
        slots = self._slots_of(group) if self._ended_samples else self._group_slots
        start = ev.StartGroup(group, self._router.acquire(group, slots), version)
        self._in_flight[group], self._engine_of[group] = version, start.engine
        self._taken += slots
        return start

    def _leave(self, group: ev.GroupId) -> None:
        """Remove a group that ended, on its engine or, with all tokens, waiting for another one."""
        engine = self._engine_of.pop(group, None)
        if engine is None:
            del self._orphans[group]
        else:
            del self._in_flight[group]
            slots = self._group_slots
            if self._ended_samples:
                slots -= self._ended_samples.get(group, 0)
            self._taken -= slots
            if slots and engine not in self._away:
                self._router.release(engine, slots)
        if self._ended_samples:
            self._ended_samples.pop(group, None)
        self._router.forget(group)

    def _save(self) -> ev.Save:
        self._saving = self._copying = True
        self._save_due = False
        self._saved = self._trained
        return ev.Save(self._trained)

    def _drop(self, groups: Iterable[ev.GroupId], reason: str) -> list[ev.Action]:
        drops: list[ev.Action] = []
        for group in groups:
            # A group that waits for an engine without tokens cannot end at the same time.
            if group in self._in_flight or self._orphans.get(group) is not None:
                self._dropped_running.add(group)
            if group in self._in_flight or group in self._orphans:
                self._leave(group)
            self._finished.pop(group, None)
            if reason != ev.RECYCLED:
                self._attempts.pop(group, None)
            self._started -= 1
            self._dropped += 1
            drops.append(ev.Drop(group, reason))
        return drops

    def _drop_everything(self, reason: str) -> list[ev.Action]:
        groups = [*self._in_flight, *self._orphans, *self._finished]
        self._recycled.clear()
        self._backlog = self.limits.order.make_backlog(self.limits.batch_groups)
        return self._drop(sorted(groups), reason)

    def _wind_up(self, reason: str) -> tuple[ev.Action, ...]:
        """Once the trainer is free: save, drop all groups, and finish."""
        if self._training or self._saving:
            return ()
        # In the middle of a step, the trainer's weights are not those of a version any more.
        if self._trained > self._saved and not self._between_parts:
            return (self._save(),)
        if self._pushing is not None:
            return ()
        # After the save: in its frontier these groups are open, so that a run can continue.
        actions = self._drop_everything(reason if reason == NO_ENGINE_LEFT else ev.RUN_ENDED)
        if self._interrupted:
            actions.append(ev.Resume())
        actions.append(self._finish(reason))
        return tuple(actions)

    def _finish(self, reason: str) -> ev.Finish:
        self._running, self._over = False, reason
        return ev.Finish(reason)

    @property
    def _nothing_runs(self) -> bool:
        trainer_busy = self._training or self._saving or self._save_due
        return not trainer_busy and self._pushing is None and self._trained == self._pushed


def replay(limits: Limits, events: Iterable[ev.Event]) -> list[ev.Action]:
    """Return the actions of a coordinator for `events`; a correct log has the same ones."""
    coordinator = Coordinator(limits)
    return [action for event in events for action in coordinator.handle(event)]
