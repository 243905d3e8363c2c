"""A shell whose world does whatever a seed says, and which checks each decision as it is made.

It keeps its own account of what runs where and compares it with what the coordinator orders:

    safety        eq. 3 at each start; no lag above the order's bound; one trainer, one push;
                  no more samples than the slots of the engines
                  the parts of a batch one after another, before its weights;
                  one checkpoint, and no step while its state is copied;
                  a paused run starts nothing and resumes when asked, not before
    conservation  a group starts once and ends once: trained, filtered or dropped; a recycled one
                  starts again with the engines' version, oldest first, and before any new one
    liveness      while the run continues something runs, and no permitted slot stays idle
    order         Drop < Interrupt < Save, Train < PushWeights < Resume < StartGroup < Finish
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from areal_lab.control import events as ev
from areal_lab.control.coordinator import TOO_FEW_GROUPS, Coordinator, Limits
from areal_lab.control.drift import NOT_MEASURED
from areal_lab.control.frontier import Frontier
from areal_lab.control.schedule import OnNewWeights, lag_bound
from tests.reference.order import batch

RANK = {
    ev.Drop: 0,
    ev.Interrupt: 1,
    ev.Save: 2,
    ev.Train: 2,
    ev.PushWeights: 3,
    ev.Resume: 4,
    ev.StartGroup: 5,
}
RANK |= {ev.Finish: 6}
DRIFTS = (0.0, 0.02, NOT_MEASURED, 0.05, 0.5, 0.01, math.nan, 0.08, 0.03, 0.0, 0.2)
"""In nats, around `schedule.MAX_DRIFT`."""
ETAS = [0, 0.25, 0.5, 1, 1.3, 2, 4, math.inf]


class Shell:
    """Events and actions of one run so far, and the world they happen in."""

    def __init__(
        self,
        limits: Limits,
        *,
        engines: int = 2,
        version: ev.Version = 0,
        next_group: ev.GroupId = 0,
        started: ev.RunStarted | None = None,
        unfit: Callable[[ev.GroupId], bool] = lambda _: False,
    ) -> None:
        self.limits = limits
        self.coordinator = Coordinator(limits)
        self.events: list[ev.Event] = []
        self.actions: list[ev.Action] = []
        self.engines: set[ev.EngineId] = set(range(engines))
        self.awaited: set[ev.EngineId] = set()
        self.last_engine: ev.EngineId = -1
        self.running: dict[ev.GroupId, tuple[ev.EngineId, ev.Version]] = {}
        self.homeless: dict[ev.GroupId, ev.Version | None] = {}
        self.ended: Counter[ev.GroupId] = Counter()
        """Samples of open groups that ended, if each has its slot."""
        self.finished: dict[ev.GroupId, ev.Version] = {}
        self.fate: dict[ev.GroupId, str] = {}
        self.recycled: list[ev.GroupId] = []
        """Groups that were dropped and start again, in this order."""
        self.attempts: Counter[ev.GroupId] = Counter()
        """Times that each group was recycled."""
        self.lags: list[int] = []
        self.batches: list[tuple[ev.GroupId, ...]] = []
        """The last one may have parts that are still to come."""
        self.rest = limits.batch_groups
        """Groups that this batch, or the next one, lacks."""
        self.first_group = self.next_group = next_group
        self.first_version = self.trained = self.pushed = version
        self.training = self.copying = self.paused = False
        self.away: set[ev.EngineId] = set()
        """Hybrid engines whose devices train, or load weights after it."""
        self.saving: ev.Version | None = None
        self.pushing: ev.Version | None = None
        self.stopping = self.asked = self.held = self.eta_fell = False
        self.over: str | None = None
        self.promised: dict[ev.GroupId, float] = {}
        """Lag bound of each group in start order: that of the eta under which it started."""
        self.unfit = unfit
        """Whether a filter rejects a group, which depends on its prompt alone."""
        self.before: Counter[str] = Counter()
        """Ends of groups before a recovery."""
        self.filtered_since = 0
        """The last batch."""
        self.unfilled = 0
        self.newest_save: Frontier | None = None
        """As a checkpoint has it."""
        if started is not None:
            self._recover(started)
        self.tell(started or ev.RunStarted(tuple(range(engines)), version, next_group))

    def _recover(self, started: ev.RunStarted) -> None:
        self.engines = set(started.engines)
        self.first_version = self.trained = self.pushed = started.version
        self.next_group = started.next_group
        if started.train_steps:
            self.limits = replace(self.limits, train_steps=started.train_steps)
        for group, version in zip(started.open_groups, started.open_versions, strict=True):
            self.homeless[group] = None if version == ev.STARTS_OVER else version
            # It was admitted by eq. 3 at an earlier version, or this one.
            self.promised[group] = lag_bound(self.limits.schedule)
        # Under a bound on drift, these may have started under a higher eta than this life's.
        self.eta_fell = self.limits.schedule.bound is not None
        self.first_group = started.next_group - len(started.open_groups)
        self.before.update(filtered=started.filtered, dropped=started.dropped)
        self.unfilled = started.unfilled

    @property
    def started(self) -> int:
        """N_r of eq. 3 by the shell's own account."""
        places = (self.first_version + len(self.batches)) * self.limits.batch_groups
        places -= self.rest if self.between else 0
        return len(self.running) + len(self.homeless) + len(self.finished) + places

    @property
    def exhausted(self) -> bool:
        """Whether no group may start until the next batch."""
        sampling = self.limits.sampling
        if sampling is None or self.filtered_since < sampling.max_filtered:
            return False
        return len(self.finished) < self.rest

    @property
    def between(self) -> bool:
        """Whether the trainer has some parts of a batch, but not the last one."""
        return self.rest < self.limits.batch_groups

    @property
    def whole_batches(self) -> list[tuple[ev.GroupId, ...]]:
        """Without one of which parts are still to come."""
        return self.batches[:-1] if self.between else self.batches

    def slots_of(self, group: ev.GroupId) -> int:
        """Slots that the group takes on an engine."""
        return self.limits.group_slots - self.ended[group]

    @property
    def taken(self) -> int:
        """Slots in use."""
        return sum(map(self.slots_of, self.running))

    @property
    def slots(self) -> int:
        """Slots of all engines."""
        return self.limits.max_in_flight * self.limits.group_slots

    def tell(self, event: ev.Event) -> tuple[ev.Action, ...]:
        """Let `event` happen, perform what follows, and check it."""
        self._note(event)
        self.events.append(event)
        actions = self.coordinator.handle(event)
        if isinstance(event, ev.TrainStepDone):
            self._follow_eta()
        if self.coordinator.ending == TOO_FEW_GROUPS and not self.stopping:
            self._check_too_few()
            self.stopping = True
        self.actions.extend(actions)
        ranks = [RANK[type(action)] for action in actions]
        assert ranks == sorted(ranks), actions
        for action in actions:
            self._perform(action)
        self._check_state()
        if any(isinstance(action, ev.Save) for action in actions):
            self.newest_save = self.coordinator.frontier()
        return actions

    def _follow_eta(self) -> None:
        """Take the eta that the schedule has set, if it is one that does."""
        was, now = self.limits.schedule, self.coordinator.limits.schedule
        if was.bound is None:
            assert now == was
            return
        assert was.bound.min_eta <= now.eta <= was.bound.max_eta
        self.eta_fell |= now.eta < was.eta
        self.limits = replace(self.limits, schedule=now)

    def possible(self) -> list[ev.Event]:
        """What may happen next by itself."""
        events: list[ev.Event] = []
        if not self.paused:
            runs = {g: v for g, (engine, v) in self.running.items() if engine not in self.away}
            by_sample = self.limits.group_slots > 1
            # Scored after its last sample; of some groups the shell reports no sample.
            events += [
                ev.GroupFiltered(g, "unfit")
                if self.unfit(g)
                else ev.GroupFinished(g, v, self.pushed)
                for g, v in runs.items()
                if not by_sample or g % 3 == 0 or not self.slots_of(g)
            ]
            events += [
                ev.SamplesEnded(g, 1 + g % 2 * (self.slots_of(g) > 1))
                for g in runs
                if by_sample and self.slots_of(g)
            ]
        if self.training:
            version = self.trained + 1
            # Any drift, and at times none: a function of the version, as of a run's own weights.
            drift = DRIFTS[version * 7 % len(DRIFTS)]
            part = ev.TrainPartDone(version)
            events.append(part if self.between else ev.TrainStepDone(version, drift))
        if self.saving is not None:
            events.append(ev.CheckpointDone(self.saving))
            # Whether it comes depends on the version, so that runs with and without both occur.
            if self.copying and self.saving % 2:
                events.append(ev.CheckpointCopied(self.saving))
        if self.pushing is not None:
            events.append(ev.WeightsPushed(self.pushing))
        events += [ev.EngineJoined(engine) for engine in self.awaited]
        if self.held:
            events.append(ev.ResumeRequested())
        return events

    def run(self, random: Random, *, events: int, disturb: float = 0.0, ask: float = 0.0) -> None:
        """Let at most `events` more happen.

        Args:
            disturb: share of unpleasant ones.
            ask: share of the others that a person asks for.
        """
        for _ in range(events):
            if self.over is not None:
                return
            if random.random() < disturb:
                self.tell(self._disturbance(random))
            elif random.random() < ask:
                self.ask(request(random))
            else:
                self.tell(random.choice(self.possible()))

    def ask(self, request: ev.Request) -> str | None:
        """Let `request` happen, unless it is refused for a good reason; returns the reason."""
        reason = self.coordinator.refusal(request)
        if reason is None:
            self.tell(request)
            return None
        assert self._may_refuse(request), reason
        before = self.coordinator.counts, self.coordinator.limits, self.coordinator.waiting_for()
        with pytest.raises(ValueError, match="cannot be done"):
            self.coordinator.handle(request)
        after = self.coordinator.counts, self.coordinator.limits, self.coordinator.waiting_for()
        assert before == after
        return reason

    def _may_refuse(self, request: ev.Request) -> bool:
        if not isinstance(request, ev.EtaRequested) or self.stopping:
            return self.stopping and not isinstance(request, ev.StopRequested)
        order = self.limits.order
        blocks = not order.drops_late and order.max_lag < request.eta
        fixed = ("synchronous", "one_step_overlap", "bounded_drift")
        return blocks or self.limits.schedule.name in fixed

    def _disturbance(self, random: Random) -> ev.Event:
        newest = max(self.engines | self.awaited)
        choices: list[Callable[[], ev.Event]] = [lambda: ev.EngineJoined(newest + 1)]
        if self.engines:
            lost, kept = random.choice(sorted(self.engines)), random.random() < 0.5
            returns = len(self.engines) == 1 or random.random() < 0.5
            choices.append(lambda: ev.EngineLost(lost, tokens_kept=kept, returns=returns))
            if len(self.engines) > 1:
                choices.append(lambda: ev.EngineRetired(lost))
        if self.awaited and self.engines:
            choices.append(lambda: ev.EngineLost(random.choice(sorted(self.awaited))))
        # Generated before its engine was lost, and scored afterwards.
        kept_groups = [(g, began) for g, began in self.homeless.items() if began is not None]
        choices += [lambda g=g, b=b: ev.GroupFinished(g, b, self.pushed) for g, b in kept_groups]
        choices += [lambda g=g: ev.GroupFiltered(g, "no signal") for g, _ in kept_groups]
        if self.limits.group_slots > 1:  # generated before that, or before the pause
            known = [*self.running, *(group for group, _ in kept_groups)]
            choices += [
                lambda g=g: ev.SamplesEnded(g, self.slots_of(g)) for g in known if self.slots_of(g)
            ]
        if self.running:
            # Also while paused: the message may have been on its way.
            choices += [
                lambda: ev.GroupFiltered(random.choice(sorted(self.running)), "no signal")
            ] * 6
        return random.choice(choices)()

    def _note(self, event: ev.Event) -> None:
        match event:
            case ev.GroupFinished(group):
                self.finished[group] = self._leave(group)
            case ev.SamplesEnded(group, samples):
                self.ended[group] += samples
            case ev.GroupFiltered(group):
                self._leave(group)
                self._end(group, "filtered")
                self.filtered_since += 1
            case ev.TrainPartDone(version) | ev.TrainStepDone(version):
                self.training = False
                self.trained = version - isinstance(event, ev.TrainPartDone)
            case ev.WeightsPushed(version):
                self.pushing, self.pushed = None, version
                self.away.clear()
            case ev.CheckpointCopied():
                self.copying = False
            case ev.CheckpointDone():
                self.saving, self.copying = None, False
            case ev.EngineRetired(engine):
                self._note_lost(ev.EngineLost(engine, tokens_kept=True))
            case ev.EngineLost():
                self._note_lost(event)
            case ev.EngineJoined(engine):
                self._note_joined(engine)
            case ev.RunStarted():
                pass
            case _:
                self._note_request(event)

    def _note_lost(self, event: ev.EngineLost) -> None:
        engine = event.engine
        assert engine in self.engines | self.awaited
        self.engines.discard(engine)
        self.away.discard(engine)
        lost = {group for group, (home, _) in self.running.items() if home == engine}
        for group in lost:
            began = self.running.pop(group)[1]
            self.homeless[group] = began if event.tokens_kept else None
            if not event.tokens_kept:
                del self.ended[group]
        (self.awaited.add if event.returns else self.awaited.discard)(engine)
        if not self.engines and not self.awaited:
            self.pushing, self.paused, self.stopping = None, False, True
            self.held = False

    def _note_joined(self, engine: ev.EngineId) -> None:
        self.awaited.discard(engine)
        self.engines.add(engine)
        if engine < self.limits.hybrid_engines and (self.training or self.trained > self.pushed):
            self.away.add(engine)

    def _note_request(self, request: ev.Request) -> None:
        match request:
            case ev.StopRequested():
                self.held = False
                # A run that has trained everything ends by itself.
                steps = self.limits.train_steps
                if self.training or steps is None or self.trained < steps:
                    self.asked = not self.stopping or self.asked
                    self.stopping = True
            case ev.PauseRequested():
                self.held = True
            case ev.ResumeRequested():
                self.held = False
            case ev.EtaRequested(eta):
                self.eta_fell |= eta < self.limits.schedule.eta
                schedule = replace(self.limits.schedule, eta=eta)
                self.limits = replace(self.limits, schedule=schedule)

    def _perform(self, action: ev.Action) -> None:
        assert self.over is None, f"{action} after Finish"
        match action:
            case ev.StartGroup():
                self._start(action)
            case ev.Interrupt(by_hand):
                assert by_hand == self.held
                assert self.running
                assert not self.paused
                self.paused = True
            case ev.Resume():
                assert not self.held
                assert self.paused
                self.paused = False
            case ev.Train(version, groups, rest):
                self._train(version, groups, rest)
            case ev.PushWeights(version):
                assert self.pushing is None
                assert self.paused or not self.running
                assert version == self.trained > self.pushed
                self.pushing = version
            case ev.Drop(group, reason):
                start = self._untrained()[group]
                late = start < self.trained - self.limits.order.max_lag
                assert reason in ("run ended", "no engine left") or late
                assert late or reason != ev.RECYCLED
                self.finished.pop(group, None)
                if group in self.running or group in self.homeless:
                    self._leave(group)
                if reason == ev.RECYCLED:
                    assert self.limits.order.on_late == "recycle"
                    assert group not in self.recycled
                    self.recycled.append(group)
                    self.attempts[group] += 1
                else:
                    self._end(group, "dropped")
            case ev.Save(version):
                assert self.saving is None, "one checkpoint at a time"
                assert not self.training
                assert version == self.trained
                self.saving, self.copying = version, True
            case ev.Finish(reason):
                assert not any((self.running, self.homeless, self.finished))
                assert not any((self.training, self.paused, self.pushing))
                assert self.saving is None
                assert not self.held
                self.over = reason

    def _start(self, action: ev.StartGroup) -> None:
        assert not self.paused
        assert not self.held
        assert self.pushing is None
        if self.stopping:  # for the step that runs
            assert self.asked
            assert self.between
            open_groups = len(self.running) + len(self.homeless) + len(self.finished)
            assert open_groups < self.rest or action.group in self.homeless
        assert action.engine == self._engine_by_the_rule()
        self.last_engine = action.engine
        if action.group in self.homeless:
            began = self.homeless.pop(action.group)
            assert action.version == (self.pushed if began is None else began)
        else:
            assert action.version == self.pushed
            if self.recycled:
                assert action.group == self.recycled.pop(0)
            else:
                assert action.group == self.next_group
                self.next_group += 1
            # Eq. 3 before this start, in its own words for whole eta: floor((N_r - 1) / B).
            assert not self.exhausted
            n, size, eta = self.started + 1, self.limits.batch_groups, self.limits.schedule.eta
            assert n <= (self.pushed + 1 + eta) * size + 1e-9
            if float(eta).is_integer():
                assert (n - 1) // size <= self.pushed + eta
            steps = self.limits.train_steps
            assert steps is None or n <= steps * size
            assert not self.homeless
            self.promised[action.group] = lag_bound(self.limits.schedule)
        self.running[action.group] = (action.engine, action.version)
        assert self.taken <= self.slots

    def _engine_by_the_rule(self) -> ev.EngineId:
        """A group asks once per engine that it has, so `sticky` is `least_loaded` here."""
        load = dict.fromkeys(self.engines - self.away, 0)
        for group, (engine, _) in self.running.items():
            if engine not in self.away:
                load[engine] += self.slots_of(group)
        if self.limits.routing.name == "round_robin":
            return min(load, key=lambda engine: (engine <= self.last_engine, engine))
        return min(load, key=lambda engine: (load[engine], engine))

    def _leave(self, group: ev.GroupId) -> ev.Version | None:
        """The group ended, where it ran or where it waited for an engine; since which version."""
        del self.ended[group]
        if group in self.running:
            return self.running.pop(group)[1]
        return self.homeless.pop(group)

    def _train(self, version: ev.Version, groups: tuple[ev.GroupId, ...], rest: int) -> None:
        assert not self.training
        assert not self.copying
        assert not self.held
        assert version == self.trained
        hybrid = self.limits.hybrid_engines
        if hybrid:
            assert self.trained == self.pushed, "hybrid devices have loaded"
            self.away = {engine for engine in self.engines if engine < hybrid}
        assert groups == (self._batch_by_the_rule() or self._smaller_batch())
        self.unfilled += self.limits.part_groups - len(groups)
        self.rest -= self.limits.part_groups
        assert rest == self.rest
        if not rest:
            self.rest = self.limits.batch_groups
            self.filtered_since = 0
        for group in groups:
            self.lags.append(version - self.finished.pop(group))
            self._end(group, "trained")
            if self.limits.order.name == "strict_start_order":
                assert self.lags[-1] <= self.promised[group]
        self.training = True
        if self.batches and len(self.batches) > self.trained - self.first_version:
            self.batches[-1] += groups
        else:
            self.batches.append(groups)
        assert max(self.lags) <= self.limits.order.max_lag

    def _batch_by_the_rule(self) -> tuple[ev.GroupId, ...] | None:
        untrained = self._untrained()
        return batch(
            self.limits.order,
            self.finished,
            {group: untrained[group] for group in untrained.keys() - self.finished},
            trained=self.trained,
            batch_groups=self.limits.batch_groups,
            part=self.limits.part_groups,
            rest=self.rest - self.limits.part_groups,
        )

    def _smaller_batch(self) -> tuple[ev.GroupId, ...] | None:
        """All that finished, oldest first, if nothing else can come."""
        sampling = self.limits.sampling
        if not self.exhausted or self.running or self.homeless:
            return None
        if sampling is None or len(self.finished) < (sampling.smallest_batch or math.inf):
            return None
        if self.limits.order.name == "strict_start_order":
            return tuple(sorted(self.finished))
        return tuple(sorted(self.finished, key=lambda group: (self.finished[group], group)))

    def _check_too_few(self) -> None:
        """Before its actions, the first of which may drop late groups."""
        oldest = self.trained - self.limits.order.max_lag
        untrained = {group for group, start in self._untrained().items() if start >= oldest}
        sampling = self.limits.sampling
        assert sampling is not None
        assert self.filtered_since >= sampling.max_filtered
        assert untrained <= self.finished.keys()
        assert len(untrained) < (sampling.smallest_batch or self.rest)
        assert not any((self.training, self.copying, self.held))
        assert str(self.filtered_since) in self.coordinator.failure

    def _untrained(self) -> dict[ev.GroupId, ev.Version]:
        """Start versions; a group that lost its tokens counts from what the engines hold."""
        running = {group: version for group, (_, version) in self.running.items()}
        waiting = {g: self.pushed if b is None else b for g, b in self.homeless.items()}
        return running | waiting | self.finished

    def _end(self, group: ev.GroupId, fate: str) -> None:
        assert group not in self.fate, f"group {group} was {self.fate[group]} and now {fate}"
        self.fate[group] = fate

    def _check_state(self) -> None:
        counts = self.coordinator.counts
        assert counts.started == self.started
        assert counts.in_flight == len(self.running) + len(self.homeless)
        assert counts.finished == len(self.finished)
        ended = counts.trained + counts.unfilled
        assert counts.started == counts.in_flight + counts.finished + ended
        assert counts.unfilled == self.unfilled
        fates = list(self.fate.values())
        assert counts.filtered == fates.count("filtered") + self.before["filtered"]
        dropped = fates.count("dropped") + self.attempts.total()
        assert counts.dropped == dropped + self.before["dropped"]
        assert (counts.trained_version, counts.pushed_version) == (self.trained, self.pushed)
        alive = len(self.running) + len(self.homeless) + len(self.finished) + len(self.recycled)
        assert len(self.fate) + alive == self.next_group - self.first_group
        assert self.coordinator.waiting_for()
        assert self.coordinator.limits == self.limits
        assert self.coordinator.paused == self.held
        if self.over is None:
            assert self.possible(), f"nothing runs; waits for {self.coordinator.waiting_for()}"
            if not self.stopping:
                oldest = self.trained - self.limits.order.max_lag
                assert all(start >= oldest for start in self._untrained().values())
                self._check_nobody_is_idle_for_no_reason()

    @property
    def _next_save_waits(self) -> bool:
        """Whether the newest version is to be saved, and the one before it is not saved yet."""
        every, steps = self.limits.save_every_steps, self.limits.train_steps
        due = (every > 0 and self.trained % every == 0) or (steps or math.inf) <= self.trained
        return due and self.saving is not None and self.saving < self.trained

    def _check_nobody_is_idle_for_no_reason(self) -> None:
        schedule = self.limits.schedule
        if self.held:
            assert self.paused or not self.running
            if schedule.on_new_weights is OnNewWeights.INTERRUPT:
                assert self.pushing is not None or self.trained == self.pushed
            return
        loads = self.limits.hybrid_engines > 0 and self.trained > self.pushed
        if not (self.training or self.copying or self._next_save_waits or loads):
            assert self._batch_by_the_rule() is None
            assert self._smaller_batch() is None
        held = self.pushing is not None or (schedule.carry_over and self.training)
        held = held or not self.engines - self.away
        if held:
            return
        assert not self.paused
        # Only after a recovery may more groups wait than the engines run at once.
        oldest = min(self.homeless, default=None)
        assert oldest is None or self.taken + self.slots_of(oldest) > self.slots
        if self.trained > self.pushed:
            assert schedule.on_new_weights is not OnNewWeights.INTERRUPT
            assert self.running
            return
        if self.homeless:
            return
        if self.exhausted:
            assert self.running or self.training or self.saving is not None
            return
        limit = (self.pushed + 1) * self.limits.batch_groups
        limit += (
            math.inf
            if math.isinf(schedule.eta)
            else int(schedule.eta * self.limits.batch_groups + 1e-9)
        )
        if self.limits.train_steps is not None:
            limit = min(limit, self.limits.train_steps * self.limits.batch_groups)
        if self.taken + self.limits.group_slots <= self.slots:
            # More than the limit were only started under a higher eta.
            assert self.started >= limit if self.eta_fell else self.started == limit


def request(random: Random) -> ev.Request:
    """Anything that a person may ask, except to stop."""
    return random.choice(
        [
            ev.PauseRequested(),
            ev.PauseRequested(),
            ev.ResumeRequested(),
            ev.EtaRequested(random.choice(ETAS)),
        ]
    )
