"""Perform the coordinator's actions in simulated seconds: simpy where the pipeline has asyncio.

    actions --> engines, trainer and weights --> events --> Coordinator.handle() --> actions

    process           produces                      waits for               unblocked by
    tell              actions                       nothing                 -
    timer of engine   SamplesEnded, GroupFinished,  the engine's next change  time
                      GroupFiltered
    train step        TrainPartDone, TrainStepDone, Train, Save             time, engines that load
                      CheckpointDone
    push              WeightsPushed                 PushWeights             time
    node              EngineLost, EngineJoined      a failure               time
    requests          PauseRequested, ...           their time              time
    reply             GroupFinished, GroupFiltered  the controller          time, earlier replies
    scaling           EngineJoined, EngineRetired   a decision              time, groups that end

Each engine has one timer, set to the next change of its batch: one simpy event per change, none per
token or sample. Engines notice new weights `delay_s` after `PushWeights` and generate until then,
so an `Interrupt` that comes with a push is performed when the engines load. Hybrid engines pause
with `Train`; after it they get ready while the others load, and all continue together.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import assert_never, cast

import numpy as np
import simpy

from areal_lab.control import events as ev
from areal_lab.control.ledger import Ledger
from areal_lab.control.ranks import RankedCoordinator, coordinator_of
from areal_lab.runlog.activity import TRAINERS_TURN
from areal_lab.runlog.lags import DISCARDED_TOKENS, DROPPED_TOKENS
from areal_lab.runlog.records import (
    TRAINER,
    ActionRecord,
    EventRecord,
    engine_process,
)
from simulator.engine.sequences import tally, versions_of
from simulator.run.accounting import Accounting
from simulator.run.availability import ScaledRun, Scaling, node_of_engines
from simulator.run.conversations import Conversations
from simulator.run.flights import Batch, ControllerQueue, Flight, RewardQueue, Slot
from simulator.run.pools import LOAD
from simulator.run.recorder import Recorder, Write
from simulator.run.responses import Draws, Responses
from simulator.run.system import (
    Done,
    Engine,
    Process,
    RevisableEngine,
    SampleEngine,
    System,
)
from simulator.run.trainer import Trainer

_CLOCK_ROUNDING = 1e-12
"""A timer is a difference of times added to a time: rounding may let it fire a little early."""


class EventLoop:
    """Owns all state of a simulated run; see the module docstring."""

    def __init__(
        self,
        system: System,
        seed: int,
        write: Write | None = None,
        responses: Responses | None = None,
    ) -> None:
        self.env = self._environment()
        self.system = system
        self.seed = seed
        self.responses = Draws(system, seed) if responses is None else responses
        self.recorder = None if write is None else Recorder(system, write, self.responses.mode)
        self.coordinator = coordinator = coordinator_of(system.limits)
        self._ranks = coordinator if isinstance(coordinator, RankedCoordinator) else None
        self.ledger = Ledger()
        self._by_sample = system.limits.group_slots > 1
        self.slots = [self._make_slot(number) for number in range(system.most_engines)]
        self.controller = (
            None
            if system.controller is None
            else ControllerQueue(self.env, system.controller, system.most_engines)
        )
        rule = system.scaling
        self.scaling = None if rule is None else Scaling(cast(ScaledRun, self), rule)
        self.accounting = Accounting(system, self.slots, self.controller, self._waited, self.ledger)
        self.trainer = Trainer(self)
        self.rewards = RewardQueue(system.workload.reward_workers)
        self.flights: dict[ev.GroupId, Flight] = {}
        self.kept: dict[ev.GroupId, Flight] = {}
        self.over = self.env.event()
        self.finish: ev.Finish | None = None
        self.version: ev.Version = 0
        """Held by the engines."""
        self.loaded: simpy.Event | None = None
        """Event of a weight update: fires when all engines hold the new version."""
        steps = system.limits.train_steps
        self._last_start = None if steps is None else steps * system.limits.batch_groups
        self.unfinished = 0
        """Groups that the end of the run dropped."""
        self._pause_due = self._paused = self._by_hand = False
        self._dirty: dict[Slot, None] = {}
        self._inbox: deque[ev.Event] = deque()
        self._telling = False

    def _environment(self) -> simpy.Environment:
        return simpy.Environment()

    def run(self) -> ev.Finish:
        """Run from the start to `Finish`."""
        system = self.system
        if system.failures is not None:
            for node in range(0, len(self.slots), system.engines_per_node):
                on_node = self.slots[node : node + system.engines_per_node]
                self.env.process(
                    node_of_engines(self, system.failures, node, on_node, system.nodes_per_engine)
                )
        if system.requests:
            self.env.process(self._request())
        self.tell(ev.RunStarted(tuple(range(system.engines))))
        self._run_until_over()
        assert self.finish is not None
        return self.finish

    def _run_until_over(self) -> None:
        self.env.run(until=self.over)

    def tell(self, event: ev.Event) -> None:
        """Let the coordinator handle `event`, and perform the actions it returns.

        Events that arise while actions are performed are handled after the last of them, as in the
        pipeline's queue.
        """
        if self._telling:
            self._inbox.append(event)
            return
        self._telling = True
        self._handle(event)
        while self._inbox:  # may grow meanwhile
            self._handle(self._inbox.popleft())
        self._telling = False

    def _handle(self, event: ev.Event) -> None:  # noqa: PLR0912, PLR0915 - a case per action
        recorder, now_s = self.recorder, self.env.now
        if recorder is not None:
            recorder.write(EventRecord(now_s, event))
        kind = type(event)
        if kind is not ev.GroupFinished and kind is not ev.SamplesEnded:  # not a union: most events
            self.accounting.event(now_s, event)
        if self.scaling is not None:
            self.scaling.note(now_s)
        self.ledger.event(event)
        actions = self.coordinator.handle(event)
        if self._ranks is not None:
            self.accounting.at_barrier(now_s, self._ranks.waiting)
        begun = not self.responses.revised
        for action in actions:
            if recorder is not None:
                recorder.write(ActionRecord(now_s, action))
            match action:
                case ev.StartGroup():
                    if not begun:  # after the drops: a recycled group may start again at once
                        begun = True
                        self._begin([one for one in actions if isinstance(one, ev.StartGroup)])
                    self._start(now_s, action)
                case ev.Train():
                    self._train(now_s, action)
                case ev.PushWeights():
                    self.loaded = self.env.event()
                    self.accounting.push_began(now_s)
                    self.env.process(self._push(action.version))
                case ev.Interrupt():
                    self._pause_due, self._by_hand = True, action.by_hand
                    self.accounting.interrupted(now_s)
                case ev.Resume():
                    self._resume(now_s)
                case ev.Save():
                    self.env.process(self._save(action.version))
                case ev.Drop():
                    self._drop(now_s, action)
                case ev.Finish():
                    self._finish(action)
                case _ as never:
                    assert_never(never)
        self._start_others(now_s)
        if (groups := self.groups_in_flight) != self.accounting.groups_in_flight:
            self.accounting.in_flight(now_s, groups)
        if self._pause_due and self.loaded is None:
            self._pause(now_s)
        if self._last_start is not None and self.coordinator.started >= self._last_start:
            self.accounting.nothing_left(now_s)
        if self.scaling is not None and isinstance(event, ev.TrainStepDone):
            self.scaling.step_done(now_s)
        if self._dirty:
            self._set_dirty_timers(now_s)

    @property
    def groups_in_flight(self) -> int:
        """Groups that were started and have not entered the queue."""
        return len(self.flights)

    # --- engines ---------------------------------------------------------------------------------

    def _make_slot(self, number: ev.EngineId) -> Slot:
        system = self.system
        record = None if self.recorder is None else self.recorder.of_engine(number)
        engine = system.make_engine(number, self.seed, record)
        if system.workload.most_turns > 1:
            engine = self._with_turns(engine)
        if self.responses.revised and not isinstance(engine, RevisableEngine):
            raise ValueError(
                f"{type(engine).__name__} cannot change the lengths of responses that it generates"
            )
        if system.limits.group_slots > 1:
            if not isinstance(engine, SampleEngine):
                raise ValueError(f"{type(engine).__name__} does not report when each sample ends")
            engine.report_samples()
        return Slot(number, engine)

    def _with_turns(self, engine: Engine) -> Conversations:
        system, of = self.system, self.responses.of

        def counts(group: ev.GroupId) -> Sequence[int] | None:
            turns = of(group).turns
            return None if turns is None else turns.tolist()

        return Conversations(
            engine,
            system.workload.most_turns,
            lambda group: of(group).tools_s,
            counts=counts,
            tool_tokens=system.workload.tool_tokens,
            most_samples=system.rollout.max_samples,
            prefix_cache=system.rollout.turn_prefix_cache,
        )

    def _begin(self, starts: Sequence[ev.StartGroup]) -> None:
        """Announce groups that start at the same moment together; all have the same version."""
        self.responses.begin([start.group for start in starts], starts[0].version)

    def _start_others(self, now_s: float) -> None:
        """Start groups that the coordinator leaves to the loop: none."""

    def _start(self, now_s: float, start: ev.StartGroup) -> None:
        slot, group = self.slots[start.engine], start.group
        self.ledger.action(start)
        before = self.flights.get(group)  # set if its engine was lost or leaves
        if before is not None and before.slot.retires:
            return  # its tokens are there
        known = before is not None and not self.responses.revised
        draws = before.draws if before is not None and known else self.responses.of(group)
        flight = self.flights[group] = Flight(group, slot, now_s, draws)
        self._submit(now_s, flight, start.version)

    def _submit(self, now_s: float, flight: Flight, version: ev.Version) -> None:
        slot = flight.slot
        if slot.flights:
            slot.flights[flight.group] = flight
        else:
            slot.flights[flight.group] = flight
            self.accounting.engine_changed(now_s, slot)
        if slot.dead:
            return  # The run does not know yet; the group restarts elsewhere once it does.
        slot.engine.submit(
            now_s, flight.group, self.system.workload.prompt_tokens, flight.draws.lengths, version
        )
        self._dirty[slot] = None

    def _set_timer(self, now_s: float, slot: Slot) -> None:
        """Set a timer for the engine's next change, unless an earlier one is set."""
        next_s = slot.engine.next_s()
        if next_s < slot.wake_s:
            slot.wake_s = next_s
            timer = self.env.timeout(next_s - now_s if next_s > now_s else 0.0, slot)
            assert timer.callbacks is not None
            timer.callbacks.append(self._on_timer)

    def _on_timer(self, timer: simpy.Event) -> None:
        # simpy types the value of every event as Any or None.
        slot: Slot = timer.value  # type: ignore[assignment]
        now_s = self.env.now
        if slot.wake_s > now_s * (1 + _CLOCK_ROUNDING):
            return  # An earlier timer has replaced this one and was handled.
        slot.wake_s = math.inf
        self._advance(now_s, slot)
        if math.isinf(slot.wake_s):  # else it got new work, and a timer with it
            self._set_timer(now_s, slot)

    def _advance(self, now_s: float, slot: Slot) -> None:
        engine = slot.engine
        ended = engine.advance(now_s)
        if self._by_sample:
            # Checked when it was made: `isinstance` would compute every property of the protocol.
            for group, samples in cast(SampleEngine, engine).ended_samples(now_s):
                self.tell(ev.SamplesEnded(group, samples))
        for done in ended:
            self._generated(now_s, slot, done)

    def _generated(self, now_s: float, slot: Slot, done: Done) -> None:
        flight = slot.flights.pop(done.group)
        flight.generated_s, flight.done = now_s, done
        flight.tokens = tokens = sum(flight.draws.lengths)
        slot.known_tokens += tokens
        if (controller := self.controller) is not None:
            size = len(flight.draws.lengths), tokens
            if controller.takes_time(*size):
                self.accounting.reading(now_s, slot, +1)
                self.env.process(self._read(flight, controller.reply(slot.number, *size)))
                return
            controller.count(*size)
        self._score(now_s, flight)

    def _read(self, flight: Flight, reply: Process) -> Process:
        yield from reply
        self.accounting.reading(self.env.now, flight.slot, -1)
        if self.flights.get(flight.group) is flight:  # else it was dropped or restarted
            self._score(self.env.now, flight)

    def _score(self, now_s: float, flight: Flight) -> None:
        slot = flight.slot
        latencies_s = flight.draws.rewards_s
        if latencies_s is None:
            if not slot.flights:
                self._has_no_group(now_s, slot)
            self._scored(flight)
            return
        self.accounting.scoring(now_s, slot, +1)
        if not slot.flights:
            self._has_no_group(now_s, slot)
        scored_s = self.rewards.scored_s(now_s, latencies_s)
        timer = self.env.timeout(scored_s - now_s, flight)
        assert timer.callbacks is not None
        timer.callbacks.append(self._on_scored)

    def _has_no_group(self, now_s: float, slot: Slot) -> None:
        """An engine has lost a group, perhaps its last one: it may leave."""
        if self.scaling is not None and slot.retires and not slot.flights:
            self.scaling.leave(slot)
        self.accounting.engine_changed(now_s, slot)

    def _on_scored(self, timer: simpy.Event) -> None:
        flight = timer.value
        assert isinstance(flight, Flight)
        self.accounting.scoring(self.env.now, flight.slot, -1)
        if self.flights.get(flight.group) is flight:  # else it was dropped or restarted
            self._scored(flight)

    def _scored(self, flight: Flight) -> None:
        group, done = flight.group, flight.done
        del self.flights[group]
        flight.decoded = decoded = done.decoded
        heads, first, last = versions_of(decoded)
        self.ledger.report(group, heads, flight.tokens)
        sampling = self.system.limits.sampling
        if self.recorder is not None or sampling is not None:
            scores = self.responses.scores(group, flight.draws.lengths)
            if self.recorder is not None:
                times_s = (flight.start_s, flight.generated_s, self.env.now)
                self.recorder.group(group, flight.slot.number, times_s, done.segments, scores)
            if sampling is not None and (why := sampling.rejects(scores.rewards, scores.masked)):
                self.responses.give_up(group)
                self.accounting.filtered_tokens += flight.tokens
                self.tell(ev.GroupFiltered(group, why))
                return
        self.kept[group] = flight
        if self.scaling is not None:
            self.scaling.tokens += flight.tokens
        self.tell(ev.GroupFinished(group, first, last))

    def _drop(self, now_s: float, drop: ev.Drop) -> None:
        group = drop.group
        self.ledger.action(drop)
        self.responses.give_up(group)
        self.unfinished += drop.reason == ev.RUN_ENDED
        if self.kept.pop(group, None) is not None:
            return
        flight = self.flights.get(group)
        if flight is not None and flight.slot.dead:
            flight.slot.flights.pop(group, None)  # or it would start again with the engine
        elif flight is not None:
            slot = flight.slot
            if slot.engine.next_s() <= now_s:
                self._advance(now_s, slot)  # It may end at this moment.
            if slot.flights.pop(group, None) is not None:
                tokens = slot.engine.drop(now_s, group)
                slot.known_tokens += tokens
                self.accounting.dropped_tokens += tokens
                self._dropped(group, tokens)
                self._dirty[slot] = None
                self._has_no_group(now_s, slot)
        flight = self.flights.pop(group, None)
        if flight is not None and flight.generated:  # it was being scored
            self._dropped(group, flight.tokens)
        self.kept.pop(group, None)
        if drop.reason == ev.RECYCLED:  # it may have ended just now
            left = [event for event in self._inbox if getattr(event, "group", None) != group]
            self._inbox = deque(left)

    def _dropped(self, group: ev.GroupId, tokens: int) -> None:
        """Count the tokens of a group that was dropped before its end was reported."""
        self.ledger.report(group, {}, tokens)
        if self.recorder is not None and tokens:
            self.recorder.metric(self.env.now, DROPPED_TOKENS, tokens)

    def _generate_again(self, tokens: int) -> None:
        """Count tokens that a failure lost."""
        self.ledger.report_twice(tokens)
        if self.recorder is not None and tokens:
            lost = self.ledger.tokens().generated_twice
            self.recorder.metric(self.env.now, DISCARDED_TOKENS, lost)

    # --- weights ---------------------------------------------------------------------------------

    def _pause(self, now_s: float) -> None:
        self._pause_due, self._paused = False, True
        self.accounting.interruptions += not self._by_hand
        self._pause_engines(now_s)
        self.accounting.paused(now_s)
        self._set_timers()

    def _pause_engines(self, now_s: float) -> None:
        for slot in self.slots:
            if not (slot.dead or slot.paused):  # hybrid ones are, since training began
                self._pause_engine(now_s, slot)

    def _pause_engine(self, now_s: float, slot: Slot) -> None:
        if slot.engine.next_s() <= now_s:
            self._advance(now_s, slot)
            if slot.dead:
                return  # it was to leave after this group
        slot.engine.pause(now_s)
        slot.paused = True
        self._dirty[slot] = None

    def _resume(self, now_s: float) -> None:
        self._pause_due = self._paused = False
        if self.responses.revised:
            self._revise()
        self._resume_engines(now_s)
        self.accounting.resumed(now_s)

    def _resume_engines(self, now_s: float) -> None:
        for slot in self.slots:
            if slot.trains:
                continue
            if slot.paused and not slot.dead:
                slot.engine.resume(now_s, self.version)
                self._dirty[slot] = None
            slot.paused = False

    def _train(self, now_s: float, train: ev.Train) -> None:
        self.ledger.action(train)
        self._lend(now_s)
        self.env.process(self.trainer.train(train))

    @property
    def _hybrid(self) -> list[Slot]:
        return self.slots[: self.system.limits.hybrid_engines]

    def _lend(self, now_s: float) -> None:
        for slot in self._hybrid:
            if not slot.paused:
                self._pause_engine(now_s, slot)
            slot.trains, slot.lent_s = True, now_s
            self.accounting.engine_changed(now_s, slot)

    def _give_back(self) -> Process:
        slots, switch, env = self._hybrid, self.system.switch, self.env
        for slot in slots:
            self._record_turn(slot)
        assert switch is not None, "checked by the system"
        yield from self._load(slots, switch.to_generation)
        for slot in slots:
            slot.trains = False
        self.accounting.loading(env.now, "", slots)

    def _record_turn(self, slot: Slot) -> None:
        if self.recorder is not None:
            process = engine_process(slot.number)
            self.recorder.span(process, "wait", slot.lent_s, self.env.now, TRAINERS_TURN)

    def _revise(self) -> None:
        engines: dict[ev.GroupId, RevisableEngine] = {}
        for slot in self.slots:
            if slot.paused and not slot.dead:
                engines |= dict.fromkeys(slot.flights, cast(RevisableEngine, slot.engine))
        if not engines:
            return
        done = {group: engine.tokens_of(group) for group, engine in engines.items()}
        self.responses.go_on(done, self.version)
        for group, engine in engines.items():
            self.flights[group].draws = draws = self.responses.of(group)
            engine.revise(group, draws.lengths)

    def _set_timers(self) -> None:
        if not self._telling:
            self._set_dirty_timers(self.env.now)

    def _set_dirty_timers(self, now_s: float) -> None:
        for slot in self._dirty:
            self._set_timer(now_s, slot)
        self._dirty.clear()

    def _push(self, version: ev.Version) -> Process:
        system, env = self.system, self.env
        hybrid = system.limits.hybrid_engines
        given_back = env.process(self._give_back()) if hybrid else None
        if hybrid < len(self.slots):
            if system.weights.delay_s > 0:
                yield env.timeout(system.weights.delay_s)
            if self._pause_due:
                self._pause(env.now)
            parts = {LOAD: system.weights.load_s}
            if system.colocated and system.switch is not None:
                parts |= system.switch.to_generation
            yield from self._load(self.slots[hybrid:], parts)
        elif self._pause_due:
            self._pause(env.now)
        self.version = version
        if given_back is not None:
            if hybrid < len(self.slots):
                self.accounting.loading(env.now, "", self.slots[hybrid:])
            yield given_back
            if not self._paused:  # there was nothing to interrupt
                for slot in self._hybrid:
                    slot.engine.resume(env.now, version)
                    slot.paused = False
        assert self.loaded is not None
        self.loaded.succeed()
        self.loaded = None
        self.tell(ev.WeightsPushed(version))

    def _load(self, slots: Sequence[Slot], parts: Mapping[str, float]) -> Process:
        """Let engines load weights, or do what the names say."""
        env = self.env
        loading = [slot for slot in slots if not slot.dead]
        for name, seconds in parts.items():
            if seconds <= 0:
                continue
            begin_s = env.now
            self.accounting.loading(begin_s, name, slots)
            yield env.timeout(seconds)
            if self.recorder is not None:
                for slot in loading:
                    self.recorder.span(engine_process(slot.number), name, begin_s, env.now)

    def until_loaded(self) -> Process:
        """Wait until all engines hold the newest weights."""
        while self.loaded is not None:
            yield self.loaded

    # --- the trainer's side ----------------------------------------------------------------------

    def take(self, groups: Sequence[ev.GroupId]) -> Batch:
        """The responses of groups that are trained on now."""
        flights, workload = [self.kept.pop(group) for group in groups], self.system.workload
        lengths = workload.prompt_tokens + np.concatenate([f.draws.tokens for f in flights])
        if workload.tool_tokens:
            lengths += np.concatenate([f.draws.read_from_tools(workload) for f in flights])
        responses = chain.from_iterable([flight.decoded for flight in flights])
        return Batch(lengths, tally(responses))

    def part_done(self, version: ev.Version) -> None:
        """Report that the trainer has finished a part of the batch that leads to `version`."""
        self.tell(ev.TrainPartDone(version))

    def step_done(self, version: ev.Version) -> None:
        """Report the trainer's new version."""
        if self.system.limits.train_steps is None and version == self.system.workload.steps:
            self.tell(ev.StopRequested())
        bounded = self.system.limits.schedule.bound is not None
        measured = self.responses.measured(self.accounting.step_lag) if bounded else ()
        self.tell(ev.TrainStepDone(version, *measured))

    def _request(self) -> Process:
        """Ask what a person asks for; what the coordinator refuses does not happen."""
        for at_s, request in self.system.requests:
            # Two requests at one time: the sum of delays may have passed it by a rounding error.
            yield self.env.timeout(max(0.0, at_s - self.env.now))
            if self.coordinator.refusal(request) is None:
                self.tell(request)

    def _save(self, version: ev.Version) -> Process:
        # A checkpoint is written in the background; the coordinator decides what waits for it.
        yield self.env.timeout(0)
        self.tell(ev.CheckpointDone(version))

    def _waited(self, slot: Slot, cause: str, begin_s: float, end_s: float) -> None:
        """Record why an engine waited, where events do not say it."""
        if self.recorder is not None:
            self.recorder.span(engine_process(slot.number), "wait", begin_s, end_s, cause)

    def trainer_span(self, name: str, begin_s: float, end_s: float, cause: str = "") -> None:
        """Record what the trainer did or waited for."""
        if self.recorder is not None:
            self.recorder.span(TRAINER, name, begin_s, end_s, cause)

    # --- failures --------------------------------------------------------------------------------

    def fail(self, slot: Slot) -> None:
        """Let an engine lose everything, before the coordinator knows."""
        now_s = self.env.now
        if slot.engine.next_s() <= now_s:
            self._advance(now_s, slot)
        slot.engine.fail(now_s)
        tokens = slot.engine.generated_tokens
        self._generate_again(tokens - slot.known_tokens)
        slot.known_tokens = tokens
        slot.dead, slot.paused, slot.wake_s = True, False, math.inf
        self.accounting.engine_changed(now_s, slot)

    def lose(self, slot: Slot) -> None:
        """Count an engine as lost, with its groups."""
        slot.flights.clear()
        # Those that were being scored start over, too: the coordinator lets all groups do so.
        for group in [g for g, flight in self.flights.items() if flight.slot is slot]:
            flight = self.flights.pop(group)
            if flight.generated:
                self._generate_again(flight.tokens)
        self.accounting.engine_losses += 1

    def restart(self, slot: Slot) -> None:
        """Let an engine work again, with the others' weights."""
        slot.dead = False
        if self._paused:
            slot.engine.pause(self.env.now)
            slot.paused = True
        self.accounting.engine_changed(self.env.now, slot)
        self._set_timers()

    # --- the end ---------------------------------------------------------------------------------

    def _finish(self, finish: ev.Finish) -> None:
        self.finish = finish
        if self.recorder is not None:
            self.recorder.end_s = self.env.now
            for slot in self.slots:
                if slot.trains:
                    self._record_turn(slot)
                elif not (slot.paused or slot.dead):
                    slot.engine.pause(self.env.now)  # ends and records what it was doing
        self.over.succeed()
